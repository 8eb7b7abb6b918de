"""Writes the figures of docs/results into the tables of the documents.

    python research/document_tables.py           updates cells that differ
    python research/document_tables.py --check   lists cells that differ, and fails if there are any

Rows, columns and the markup of a figure (significant ones are bold) are those of the page.
"""

import argparse
import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _results(name):
    return json.loads((ROOT / f'docs/results/{name}.json').read_text())


def _rows(name, **where):
    """Return a function from a preset to its row. Older files call some presets by former names."""
    rows = [row for row in _results(name)['rows'] if all(row[key] == value for key, value in where.items())]
    rows = {frozenset((row.get('preset') or row['variant']).split('+')): row for row in reversed(rows)}
    blocks = any('exact-block' in variant for variant in rows)
    former = dict(exact='exact-block', int8='int8-block') if blocks else {}
    former |= dict(sbp='recompute') if any('recompute' in variant for variant in rows) else {}

    def find(variant):
        preset, *pieces = variant.split('+')
        return rows.get(frozenset([former.get(preset, preset), *pieces]))

    return find


def _ratio(rows, variant, key):
    row = rows(variant)
    return '' if row is None else f'{row[key] / rows("none")[key]:.3f}'


def _complete_heads(heads):
    """Yield complete column heads: a head without a measure gets that of its left neighbour ('stored: A | B')."""
    measure = ''
    for head in heads:
        before, colon, _ = head.partition(': ')
        measure = before if colon else measure if head[:1].isupper() or head.startswith('stage') else ''
        yield head if colon or not measure else f'{measure}: {head}'


def _strip_markup(cell):
    return cell.replace('\\*', '').replace('*', '').replace('`', '').strip()


TIMES = {
    'ConvNeXt-B, stage 1': 'convnext_b_stage1',
    'ConvNeXt-B, stage 3': 'convnext_b_stage3',
    'ConvNeXt-B, backbone': 'convnext_b_backbone',
    'Swin-T, stage 1': 'swin_t_stage1',
    'Swin-T, stage 3': 'swin_t_stage3',
    'ViT-B, 196 tokens': 'vit_b_224',
    'ResNet-50': 'r50_chain',
    'ResNet-50, 800 x 1344': 'r50_large',
    'ResNet-50, bf16': 'r50_bf16',
    'ResNet-101': 'r101',
    'ResNet-101, bf16': 'r101_bf16',
    'ResNeXt-101': 'x101',
    'RegNetX-3.2': 'regnet',
    'HRNet-W18': 'hrnet',
    'CSPNeXt-L': 'cspnext_l',
    'CSPDarknet-L': 'cspdarknet_l',
    'DINO, a layer of the encoder': 'dino_encoder_layer',
    'DINO, the encoder': 'dino_encoder',
}


def _time(first, column):
    row = _rows(f'time_{TIMES[first]}')(column)
    return '' if row is None else f'{row["ratio"]:.2f}'


STEPS = {'ConvNeXt-B': 'step_convnext_b', 'ResNet-50': 'step_r50', 'Swin-T': 'step_swin_t'}
STEPS |= {'DINO R-50': 'dino_step', 'RTMDet-S': 'rtmdet_step'}


EVERYTHING = ('with_cp+cp-heads+cp-rpn+cp-neck', 'with_cp+cp-heads+cp-neck', 'with_cp+cp-transformer+cp-neck')


def _step(first, column):
    rows = _rows(f'time_{STEPS[column]}')
    row = next(filter(None, map(rows, EVERYTHING)), None) if first == 'everything checkpointed' else rows(first)
    return '' if row is None else f'{row["ratio"]:.2f} ({row["ratio_min"]:.2f} to {row["ratio_max"]:.2f})'


def _rival(first, column):
    names = {'selective checkpointing': 'selective', 'efficient_conv_bn_eval': 'conv-bn-eval'}
    name = next((name for start, name in names.items() if first.startswith(start)), first.split(',')[0])
    if name == 'torch.compile':
        name = first.replace('torch.compile', 'compile').replace(', budget ', '-')
    model, _, column = column.rpartition(': ')
    rows = _rows('time_r50' if model else 'rivals_backbone_cpu')
    if rows(name) is None:
        return ''
    if column in ('stored', 'peak'):
        return _ratio(rows, name, {'stored': 'saved_bytes', 'peak': 'peak_bytes'}[column])
    key, form = dict(time=('ratio', '.2f'), error=('error', '.0e'))[column]
    return f'{rows(name)[key] or 0:{form}}'.replace('0e+00', '0')


def _in_the_readme(first, column):
    measure, _, subject = column.partition(': ')
    return _step(first, subject).split(' ')[0] if measure.startswith('time') else None


def _trained(first, column):
    """Return the mean over seeds, or the paired difference to 'none' with its 95 % interval (Student's t)."""
    results = _results('nuclei')['results']
    runs, plain = results[first], results['none']
    if column in ('box AP', 'mask AP'):
        return _spread([run['ap'][column] for run in runs.values()])
    reached = (lambda run: run['ap']['box AP']) if column.startswith('box AP') else _course
    return '' if first == 'none' else _interval([reached(run) - reached(plain[seed]) for seed, run in runs.items()])


def _unpadded(first, column):
    """Return the same figures for evaluations without padding. Seeds without a partner have no difference."""
    subject, _, column = column.rpartition(': ')
    results = _results('nuclei_unpadded')['results'][subject]
    ends = {name: {seed: run['ap']['box AP'] for seed, run in runs.items()} for name, runs in results.items()}
    if first not in ends or column == 'box AP':
        return _spread([*ends.get(first, {}).values()])
    both = [seed for seed in ends[first] if seed in ends['none']]
    return '' if first == 'none' else _interval([ends[first][seed] - ends['none'][seed] for seed in both])


def _course(run):
    return statistics.mean(point['box AP'] for point in run['curve'])


def _spread(values):
    each = f' ± {100 * statistics.stdev(values):.1f}' if len(values) > 1 else ''
    return f'{100 * statistics.mean(values):.1f}{each}' if values else ''


def _interval(values):
    mean = 100 * statistics.mean(values)
    if len(values) == 1:
        return f'{mean:+.1f}, one pair'
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    half = 100 * t * statistics.stdev(values) / len(values) ** 0.5
    return f'{round(mean, 1) + 0:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})'


_UP = [0.25, 0.31, 0.36, 0.42, 0.47, 0.53, 0.58, 0.64, 0.69, 0.75]
_RATIOS = {'uniform': '', 'increasing': f',keep_ratio={_UP}', 'decreasing': f',keep_ratio={_UP[::-1]}'}


def _format_gradient_figure(first, column):
    """Format the cosine or the norm ratio of the gradients of a setting of the paper's method, with its deviation."""
    first, words = re.sub(', the default', '', first), ''
    if first[0].isdigit():
        words = f',blocks=[{first.replace("-", ", ")}]' if first != '2-2-6-0' else ''
    elif first.split()[0] in _RATIOS:
        words = _RATIOS[first.split()[0]]
    else:
        sampler, ratio = first.split()
        words = f',keep_ratio={ratio}' * (ratio != '0.5') + ',sampler=random' * (sampler == 'random')
    results = _results('gradient_settings')['results']
    results = results[re.sub(r'=\[(.*)\]', lambda match: f'=({match[1].replace(" ", "")})', f'sbp{words}')]
    value = results['mean layer' if column == 'mean layer' else 'backbone']
    value = value['norm_ratio' if column.startswith('norm ratio') else 'cosine']
    return f'{value["mean"]:.3f} ± {value["std"]:.3f}'


def _draws(first, column):
    """Return cosine and relative error of weight gradients from sampled rows."""
    label = {'a half': ',keep_ratio=0.5', 'an eighth': ',keep_ratio=0.125', 'a quarter': ''}[first.split(', ')[1]]
    if first.startswith('sbp'):
        label = {'': ',keep_ratio=0.25'}.get(label, '')
    others = ('every', '_uniform'), ('photographs', '_photographs'), ('Swin', '_swin'), ('ViT', '_vit')
    suffix = next((suffix for start, suffix in others if column.startswith(start)), '')
    file = f'gradient_rows{suffix}' + '_8' * column.endswith('eight')
    backbone = _results(file)['results'][first.split(', ')[0] + label]['backbone']
    return f'{backbone["cosine"]["mean"]:.3f}, {backbone["relative_error"]["mean"]:.2f}', ''


def _reserved(first, column):
    """Return the memory that torch reserves, or needs, relative to the tensors at the peak of a step."""
    kind, _, preset = column.partition(' with ')
    row = _results('reserved_memory')['rows'].get(f'{first}/{preset or "none"}', {})
    return f'{row[{"needed": "capacity"}.get(kind, kind)] / row["peak"]:.2f}' if 'peak' in row else ''


def _swin_l(first, column):
    """Return the measured memory of DINO with Swin-L, the counts for two sizes, and the batch that explains it."""
    results = _results('swin_l_memory')
    row = results['rows'][first]
    figures = {'measured, GiB': f'{row["measured"]}', 'batch that explains it': f'{row["pixels"]:.2f}'}
    figures |= {size.replace('x', ' x '): f'{row[size]["logged"] / 2**30:.1f}' for size in row if size[0].isdigit()}
    return figures[column]


def _largest(first, column):
    """Return the largest batches of a detector with a preset on all cards."""
    variant = dict(plain='none', checkpointing='with_cp+targets').get(column, column.strip('`'))
    row = _results('largest_batches')['rows'].get(f'{first}/{variant}', {})
    return ', '.join(map(str, row['images'].values())) if 'images' in row else ''


def _pipeline(first, column):
    """Return the size of the largest batch of a pipeline, and its pixels relative to those of a real one."""
    row = next(row for row in _results('pipeline_sizes')['rows'] if row['name'] == first)
    return f'{row["ratio"]:.2f}' if column == 'ratio' else ' x '.join(map(str, row['size'][:2]))


TABLES = [
    ('docs/costs.md', 'Blocks: time', _time),
    ('docs/costs.md', 'A whole step: time', _step),
    ('docs/costs.md', 'What else there is', _rival),
    ('docs/costs.md', 'The largest batch', _largest),
    ('docs/research/zoo_memory.md', 'Six figures of one card', _swin_l),
    ('docs/research/zoo_memory.md', 'Gaps between tensors', _reserved),
    ('docs/research/zoo_memory.md', 'Sizes of batches', _pipeline),
    ('README.md', 'Less memory for your config', _in_the_readme),
    ('docs/research/accuracy.md', 'Result', _trained),
    ('docs/research/accuracy.md', 'Without padding', _unpadded),
    ('docs/research/gradients.md', 'Weights from a sample of the rows', _draws),
    ('docs/research/gradients.md', 'The same on photographs, in a Swin and in a ViT', _draws),
    ('docs/research/gradients.md', 'Keep ratio and sampler', _format_gradient_figure),
    ('docs/research/gradients.md', 'One ratio for all blocks', _format_gradient_figure),
    ('docs/research/gradients.md', 'How many blocks', _format_gradient_figure),
]


def _outside(name, report):
    """Return the table of a script's results, formatted by that script."""
    return importlib.import_module(report).report(_results(name)['rows'])


# Page -> the texts between its marks <!-- results: NAME --> and <!-- end -->, by name.
REPORTS = {
    'docs/research/outside_models.md': {
        'outside_models': lambda: _outside('outside_models', 'outside_models'),
        'outside_losses': lambda: _outside('outside_losses', 'outside_losses'),
    },
    'docs/research/zoo_memory.md': {
        'zoo_recipes': lambda: importlib.import_module('zoo_memory').report_recipes(_results('zoo_memory')['rows']),
        'swin_l_memory': lambda: _outside('swin_l_memory', 'swin_l_memory'),
        'counted_and_resident': lambda: _outside('counted_and_resident', 'counted_and_resident'),
    },
}


def update_report(text: str, name: str, report: str) -> tuple[str, list[str]]:
    """Write a text between its marks in a page.

    Args:
        text (str): The page.
        name (str): Name in the mark.
        report (str): The text.

    Returns:
        tuple[str, list[str]]: The page, and 'NAME: the report' if it changed.

    Raises:
        ValueError: If the page has no such marks.
    """
    start, end = f'<!-- results: {name} -->\n', '\n<!-- end -->'
    before, found, rest = text.partition(start)
    own, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f'there are no marks {start.strip()!r} and {end.strip()!r}; correct REPORTS in {__file__}')
    return ''.join([before, start, report, end, after]), [f'{name}: the report'] if own != report else []


def update_table(text: str, heading: str, figure: Callable) -> tuple[str, list[str]]:
    """Write the figures of the first table under a heading.

    Args:
        text (str): The page.
        heading (str): The heading, without marks.
        figure (Callable): Maps the first cell of a row and the head of a column to the cell: a text, a tuple of texts
            that are right (the first is written), or None for a cell that is not from a result.

    Returns:
        tuple[str, list[str]]: The page, and 'row, column: cell -> figure' for each cell that changed.

    Raises:
        ValueError: If there is no such heading, or no table under it.
    """
    before, found, part = text.partition(f'# {heading}\n')
    part, *after = re.split(r'(?=\n#+ )', part, maxsplit=1)
    lines, changes = part.split('\n'), []
    rows = [number for number, line in enumerate(lines) if line.startswith('|')]
    if not found or len(rows) < 3:
        raise ValueError(f'there is no table under the heading {heading!r}; correct TABLES in {__file__}')
    heads = [*_complete_heads(_cells(lines[rows[0]]))]
    for number in rows[2:]:
        first, *cells = _cells(lines[number])
        columns = heads[-len(cells) :]
        for at, (column, cell) in enumerate(zip(columns, cells, strict=True)):
            expected = figure(_strip_markup(first), _strip_markup(column))
            right = [expected] if isinstance(expected, str) else expected
            if right is not None and _strip_markup(cell) not in right:
                changes.append(f'{_strip_markup(first)}, {_strip_markup(column)}: {cell or "empty"} -> {right[0]}')
                cells[at] = cell.replace(_strip_markup(cell), right[0]) if _strip_markup(cell) else right[0]
        if cells != _cells(lines[number])[1:]:
            lines[number] = f'| {" | ".join([first, *cells])} |'
    return ''.join([before, found, '\n'.join(lines), *after]), changes


def _cells(line):
    return [cell.strip() for cell in line.strip().removeprefix('|').removesuffix('|').split('|')]


def update_page(page: Path) -> tuple[str, list[str]]:
    """Write the figures of all tables of a page.

    Args:
        page (Path): The page.

    Returns:
        tuple[str, list[str]]: The text of the page, and its changes, see :func:`update_table`.
    """
    text, changes = page.read_text(encoding='utf-8'), []
    for name, heading, figure in TABLES:
        if ROOT / name == page:
            text, found = update_table(text, heading, figure)
            changes += found
    for name, report in REPORTS.get(str(page.relative_to(ROOT)), {}).items():
        text, found = update_report(text, name, report())
        changes += found
    return text, changes


def pages() -> set[str]:
    """Return the names of the pages that have tables of results."""
    return {*REPORTS, *(name for name, *_ in TABLES)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing')
    check, differ = parser.parse_args().check, False
    for page in sorted({ROOT / name for name in pages()}):
        text, changes = update_page(page)
        for change in changes:
            print(f'{page.relative_to(ROOT)}: {change}')
        differ |= bool(changes)
        if not check:
            page.write_text(text)
    sys.exit(1 if check and differ else 0)


if __name__ == '__main__':
    main()
