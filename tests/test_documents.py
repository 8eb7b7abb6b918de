"""Documents: links lead somewhere, no path of a machine, code blocks run, and figures are those of the results."""

import ast
import dataclasses
import inspect
import json
import re
import runpy
import statistics
import subprocess

import pytest
import torch
from helpers import ROOT
from mmdet.registry import HOOKS, MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import nn

import sbp_mmdet
from sbp_mmdet.adapters import Lean
from sbp_mmdet.plan import command
from sbp_mmdet.settings import PRESETS, Settings
from sbp_mmdet.surgery import model_hooks

PAGES = sorted(
    p for pattern in ('*.md', 'docs/*.md', 'docs/research/*.md', 'configs/*/*.md') for p in ROOT.glob(pattern)
)
FOR_USERS = [page for page in PAGES if page.parent.name != 'research']
LINK = re.compile(r'\]\(([^)\s]+)\)')
FENCE = re.compile(r'^```.*?^```', re.DOTALL | re.MULTILINE)
PHOTOGRAPHS = 'gradient_pool_photographs'


def _text(name):
    return (ROOT / name).read_text()


def _anchors(text):
    """The names of the headings of a page, as Git hosts make them."""
    heads = re.findall(r'^#+ (.+)$', FENCE.sub('', text), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', head.lower()).replace(' ', '-') for head in heads}


def _words(page):
    """Without code, comments and the bars of tables."""
    return len(re.findall(r'\S*\w\S*', FENCE.sub('', re.sub(r'<!--.*?-->', '', page.read_text()))))


@pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(page):
    text = page.read_text()
    assert not re.search(r'(?<![\w.~/-])/(work|root|home|tmp)/', text), 'a path of a machine'
    for link in LINK.findall(FENCE.sub('', text)):
        if link.startswith('https://'):
            continue
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text()), link


def test_nothing_is_out_of_sight():
    index, shown = _text('docs/index.md'), ''.join(page.read_text() for page in PAGES)
    for page in ROOT.glob('docs/**/*.md'):
        path = str(page.relative_to(ROOT / 'docs'))
        assert path == 'index.md' or f']({path})' in index, path
    for picture in ROOT.glob('docs/pictures/*'):
        assert f'pictures/{picture.name})' in shown, picture.name


def test_lengths():
    assert _words(ROOT / 'README.md') <= 900
    assert sum(map(_words, FOR_USERS)) <= 9000


def _blocks(name):
    return re.findall(r'^```python\n(.*?)^```', _text(name), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize('name', ['README.md', 'docs/usage.md', 'docs/pretrained.md'])
def test_examples(name, tmp_path):
    for number, block in enumerate(_blocks(name)):
        if '_base_' in block:
            (tmp_path / f'{number}.py').write_text(block)
            model, _ = _changed(Config.fromfile(tmp_path / f'{number}.py'))
            assert any(isinstance(m, Lean) for m in model.modules())
            continue
        exec(block, names := {})
        if 'custom_hooks' in names:
            assert len(list(model_hooks(names['custom_hooks']))) == len(names['custom_hooks'])
        elif isinstance(model := names.get('model'), dict) and 'sbp_cfg' in model['backbone']:
            assert sbp_mmdet.SBPConvNeXt('atto', sbp_cfg=model['backbone']['sbp_cfg']).sbp


@pytest.mark.parametrize('page', FOR_USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands(page, monkeypatch):
    """Blocks of shell are shell, name files that are there, and sbp-mmdet takes what they give it."""
    monkeypatch.setattr(command, 'load_config', lambda *args: 1 / 0)
    for block in re.findall(r'^```bash\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE):
        assert subprocess.run(['bash', '-n'], input=block, text=True, check=False).returncode == 0, block
        for file in re.findall(r'(?<![\w/.-])(?:tools|research|configs)/[\w/.-]+', block):
            assert (ROOT / file).exists(), file
        for line in re.findall(r'^sbp-mmdet (.*?)(?:  #.*)?$', block, re.M):
            words = line.split()
            with pytest.raises(SystemExit if words == ['check'] else ZeroDivisionError):
                command.main(words)


def test_line_in_the_log(tmp_path):
    block = next(block for block in _blocks('docs/usage.md') if 'mask-rcnn_swin-t' in block and 'exact' in block)
    (tmp_path / 'swin.py').write_text(block)
    _, said = _changed(Config.fromfile(tmp_path / 'swin.py'))
    for name in ('README.md', 'docs/usage.md'):
        assert f'\nLeanHook: {said[0].splitlines()[0]}\n' in _text(name), said[0]


def _changed(cfg):
    """The detector of a config after its hooks, and what they say."""
    init_default_scope('mmdet')
    cfg.model.backbone.init_cfg, said = None, []
    model = MODELS.build(cfg.model)
    for hook in model_hooks(cfg.get('custom_hooks')):
        said.append(hook.apply(model))
    return model, said


def test_example_of_a_family():
    names, (family, operation) = {}, _blocks('docs/extending.md')
    exec(family, names)
    assert len(family.split('@adapter')[1].splitlines()) < 30
    model = nn.Sequential(names['MyBlock'](8), names['MyBlock'](8))
    x, gradients = torch.randn(2, 8, 16, 16), []
    for preset in ('none', 'exact'):
        if preset == 'exact':
            assert len(sbp_mmdet.apply_lean(model, preset=preset).changed) == 2
        gradients.append(torch.autograd.grad(model(x).square().sum(), [*model.parameters()]))
    for exact, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))
    exec(operation, names)
    mlp, tokens, mask = names['mlp'], names['tokens'], names['mask'].flatten()[:, None]
    expected = torch.where(mask, mlp(tokens), mlp(tokens).detach())
    for out in (names['out'], expected):
        gradients.append(torch.autograd.grad(out.square().sum(), tokens)[0])
    torch.testing.assert_close(*gradients[-2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'kind',
    [
        kind
        for name in sbp_mmdet.__all__
        if isinstance(kind := getattr(sbp_mmdet, name), type) and name != 'AtomicBackend'
    ],
    ids=lambda kind: kind.__name__,
)
def test_docstrings_of_registered_classes(kind):
    """Each argument with its default, and an example that builds."""
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert re.search(rf'^        (\w+, )?{name}\b.* \(.+\): ', kind.__doc__, re.M), name
    example = kind.__doc__.split('Example:')[1].strip(' `\n')
    exec(example, names := {})
    if hooks := names.get('custom_hooks'):
        assert kind in [type(HOOKS.build(hook)) for hook in hooks]
    else:
        init_default_scope('mmdet')
        cfg = {key: value for key, value in names['backbone'].items() if key != '_delete_'}
        with torch.device('meta'):
            assert type(MODELS.build(cfg)) is kind


def test_every_key_has_a_row():
    lines = re.findall(r'^\| `(\w+)` \| .+? \| (\S+) \| ', _text('docs/usage.md').split('## Presets')[0], re.M)
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert [key for key, _ in lines] == [*fields]
    assert {key: ast.literal_eval(cell.strip('`')) for key, cell in lines} == fields | {'preset': 'exact'}


def test_every_preset_has_a_row():
    presets = re.findall(r'^\| `(\w+)` \|', _text('docs/usage.md').split('## Presets')[1].split('\n## ')[0], re.M)
    assert presets == [*PRESETS]
    shown = re.findall(r'^\| `(\w+)` \|', _text('README.md'), re.M)
    assert shown == ['with_cp', *(name for name in PRESETS if name in shown[1:])]


# Figures


def _results(name):
    return json.loads(_text(f'docs/results/{name}.json'))


def _rows(name, **where):
    """Preset to row, in today's names. Files of before call 'exact' 'exact-block' where there was such a preset."""
    rows = [row for row in _results(name)['rows'] if all(row[key] == value for key, value in where.items())]
    rows = {frozenset((row.get('preset') or row['variant']).split('+')): row for row in reversed(rows)}
    blocks = any('exact-block' in variant for variant in rows)
    former = dict(exact='exact-block', int8='int8-block') if blocks else {}
    former |= dict(paper='recompute') if any('recompute' in variant for variant in rows) else {}

    def find(variant):
        preset, *pieces = variant.split('+')
        return rows.get(frozenset([former.get(preset, preset), *pieces]))

    return find


def _ratio(rows, variant, key, form='.3f'):
    row = rows(variant)
    return '' if row is None else f'{row[key] / rows("none")[key]:{form}}'


def _tables(name, heading):
    """(first cell, head of the column, cell) of the table under a heading."""
    part = re.split(r'\n#+ ', _text(name).split(f'# {heading}\n')[1])[0]
    head, _, *lines = (line.strip('| ').split(' | ') for line in _padded(part) if line.startswith('|'))
    for first, *cells in lines:
        for column, cell in zip([*_whole(head)][-len(cells) :], cells, strict=True):
            yield _plain(first), _plain(column), _plain(cell)


def _whole(heads):
    """Heads of columns; one without a measure has that of the column before it, 'stored: ConvNeXt-B | ResNet-50'."""
    measure = ''
    for head in heads:
        before, colon, _ = head.partition(': ')
        measure = before if colon else measure if head[0].isupper() or head.startswith('stage') else ''
        yield head if colon or not measure else f'{measure}: {head}'


def _padded(part):
    return (re.sub(r'\|(?=\|)|\| (?=\|)', '| - ', line) for line in part.splitlines())


def _plain(cell):
    cell = cell.replace('\\*', '').replace('*', '').replace('`', '').strip()
    return '' if cell == '-' else cell


# Rows of the tables of bytes to files.
DETECTORS = {
    'ConvNeXt-T': 'convnext_t',
    'ConvNeXt-B': 'convnext_b',
    'Swin-T': 'swin_t',
    'ViT-B': 'vit_b',
    'ResNet-50': 'r50',
    'CSPNeXt': 'rtmdet_s',
    'DINO': 'dino_r50',
}


def _counted(key):
    """Of a detector, by the end of the first cell: its bytes where nothing is changed, and presets relative to that."""

    def figure(first, column):
        detector = next(file for name, file in DETECTORS.items() if name in first)
        rows = _rows(f'detector_bytes_{detector}')
        preset, *pieces = column.split(' and ')
        if preset == 'plain':
            return f'{rows("none")[key] / 1e9:.2f} GB'
        return _ratio(rows, preset + ('+cp-heads+cp-rpn+cp-neck' if pieces else ''), key)

    return figure


TIMES = {
    'ConvNeXt-B, stage 1': 'convnext_b_stage1',
    'ConvNeXt-B, stage 3': 'convnext_b_stage3',
    'Swin-T, stage 1': 'swin_t_stage1',
    'Swin-T, stage 3': 'swin_t_stage3',
    'ViT-B, 196 tokens': 'vit_b_224',
    'ResNet-50': 'r50',
    'CSPNeXt-L': 'cspnext_l',
    'CSPDarknet-L': 'cspdarknet_l',
    'DINO, a layer of the encoder': 'dino_encoder_layer',
}


def _time(first, column):
    row = _rows(f'time_{TIMES[first]}')(column)
    return '' if row is None else f'{row["ratio"]:.2f}'


def _step(first, column):
    preset, *skip = first.split(', ')
    row = _rows(f'detector_steps_{column[-1].lower()}')(preset + ('+skip' if skip else ''))
    return '' if row is None else f'{row["ratio"]:.2f} ({row["ratio_min"]:.2f} to {row["ratio_max"]:.2f})'


def _fp32(first, column):
    rows = _rows('fp32_convnext' if 'ConvNeXt' in first else 'fp32_vit')
    inside = ('stem', 'stage', 'output', 'backbone')
    stored = [sum(n for part, n in rows(v)['saved'].items() if part.startswith(inside)) for v in (column, 'with_cp')]
    return f'{stored[0] / stored[1]:.2f}'


def _rival(first, column):
    names = {'selective checkpointing': 'selective', 'torch.compile with': 'compile-0.1', 'torch.compile': 'compile'}
    rows = _rows('rivals_backbone_cpu')
    name = next((name for start, name in names.items() if first.startswith(start)), first)
    if column == 'stored':
        return _ratio(rows, name, 'saved_bytes')
    key, form = dict(time=('total_ratio', '.2f'), error=('drawn_error', '.0e'))[column]
    return f'{rows(name)[key] or 0:{form}}'.replace('0e+00', '0')


def _in_the_readme(first, column):
    measure, _, subject = column.partition(': ')
    if measure in ('stored', 'peak'):
        first = {'sampled': 'exact'}.get(first, first)  # it stores the same
        return _counted('backbone' if measure == 'stored' else measure)(subject, first)
    if measure == 'time':
        return _time(f'ConvNeXt-B, {subject}', first)
    if column == 'box AP' and first != 'with_cp':
        return _trained({'paper': 'zero'}.get(first, first), 'box AP, less none').split(' (')[0]
    return None


def test_first_figures_of_the_readme():
    said = [float(figure) for figure in re.findall(r'\b0\.\d\d\b', _text('README.md').split('## ')[0])]
    peaks = [
        _counted('peak')(detector, preset) for preset in ('exact', 'with_cp') for detector in ('ConvNeXt-B', 'DINO')
    ]
    assert said == [round(float(peak), 2) for peak in peaks]


def _trained(first, column):
    """Mean over seeds; differences to the setting 'none' are paired, with the interval of Student's t."""
    results = _results('nuclei')['results'] | _results('nuclei_sampled')['results']
    runs = [{seed: results[name][seed] for seed in results[first]} for name in (first, 'none')]
    if column in ('box AP', 'mask AP'):
        values = [100 * run['ap'][column] for run in runs[0].values()]
        return f'{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}'
    ends = [[100 * run['ap']['box AP'] for run in of.values()] for of in runs]
    courses = [[100 * statistics.mean(p['box AP'] for p in run['curve']) for run in of.values()] for of in runs]
    values = [a - b for a, b in zip(*(courses if column.startswith('mean') else ends), strict=True)]
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    mean, half = statistics.mean(values), t * statistics.stdev(values) / len(values) ** 0.5
    return '' if first == 'none' else f'{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})'


def _cosines(*files):
    """Of gradient studies: a column of the first file, or of the one that it names, such as 'nuclei: backbone'."""

    def figure(first, column):
        subject, _, column = column.rpartition(': ')
        file = next((file for file in files if subject and subject in file), files[0])
        first = re.sub(
            ', the paper.*', '', {'4 blocks of 12': 'blocks 4', '12 blocks of 12': 'blocks 12'}.get(first, first)
        )
        found = _results(file)['results']
        found = found[first if first in found else f'blocks {first}']
        value = found['mean layer' if column == 'mean layer' else 'backbone']
        value = value['norm_ratio' if column.startswith('norm ratio') else 'cosine']
        return f'{value["mean"]:.3f}', f'{value["mean"]:.3f} ± {value["std"]:.3f}'

    return figure


def _draws(first, column):
    """Cosine and relative error of rows that are drawn by norm, and of every n-th row."""
    label = {'a half': ',keep_ratio=0.5', 'an eighth': ',keep_ratio=0.125', 'a quarter': ''}[first.split(', ')[1]]
    if first.startswith('paper'):
        label = {'': ',keep_ratio=0.25'}.get(label, '')
    file = 'gradient_rows' + '_uniform' * column.startswith('every') + '_8' * column.endswith('eight')
    found = _results(file)['results'][first.split(', ')[0] + label]['backbone']
    return f'{found["cosine"]["mean"]:.3f}, {found["relative_error"]["mean"]:.2f}', ''


def test_picture_of_what_is_stored(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'research'))
    tool, rows = runpy.run_path(str(ROOT / 'research/draw_stored.py')), _rows('block_cpu', stage=1)
    for preset in tool['STORED']:
        n, channels, height, width = rows(preset)['shape']
        unit = 4 * n * channels * height * width
        assert tool['units'](preset) == pytest.approx(rows(preset)['saved_bytes'] / unit, abs=0.021), preset


@pytest.mark.parametrize(
    'page, heading, figure',
    [
        ('docs/costs.md', 'Backbones: stored bytes', _counted('backbone')),
        ('docs/costs.md', 'Blocks: time', _time),
        ('docs/costs.md', 'Whole detectors: peak', _counted('peak')),
        ('docs/costs.md', 'A whole step: time', _step),
        ('docs/costs.md', 'In fp32', _fp32),
        ('docs/costs.md', 'What else there is', _rival),
        ('README.md', 'Which preset', _in_the_readme),
        ('docs/research/accuracy.md', 'Result', _trained),
        ('docs/research/gradients.md', 'What dropped positions send', _cosines('gradient_nuclei', PHOTOGRAPHS)),
        ('docs/research/gradients.md', 'Weights from a sample of the rows', _draws),
        ('docs/research/gradients.md', 'Keep ratio and sampler', _cosines('gradient_samplers', 'gradient_atto')),
        ('docs/research/gradients.md', 'One ratio for all blocks', _cosines('gradient_orders')),
        ('docs/research/gradients.md', 'How many blocks', _cosines('gradient_blocks')),
        ('docs/research/vit.md', 'Orders, samplers, number of blocks', _cosines('gradient_vit')),
    ],
)
def test_figures(page, heading, figure):
    cells = [*_tables(page, heading)]
    assert cells
    for first, column, cell in cells:
        expected = figure(first, column)
        assert expected is None or cell in ([expected] if isinstance(expected, str) else expected), (first, column)
