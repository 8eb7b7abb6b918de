"""Tables and pictures of the studies of gradients."""

from pathlib import Path

from ..families import Layer, layer_of
from ..reporting import COLOURS, Column, markdown_table, panels, save_picture
from .measures import HEADS, MEASURES, SUMS

__all__ = ['norms_picture', 'norms_table', 'study_picture', 'study_table']

_NAMES = {'cosine': 'cosine similarity', 'relative_error': 'relative error', 'norm_ratio': 'norm ratio'}


def study_table(study: dict) -> str:
    """A Markdown table: mean and spread (standard deviation over batches) of each setting.

    Settings of the backbone take a row each. If one changes more than that, each takes a row for each measure, and the
    columns are the parts of the detector as gradients pass them.

    Args:
        study (dict): As ``gradient_study.py --json`` writes it.

    Returns:
        str: Lines.
    """
    results, kept = study['results'], study['kept']
    stages = [part for part in SUMS if part.startswith('stage') and any(part in row for row in results.values())]
    if any('pieces' in setting for setting in study['settings'].values()):
        return _table_of_parts(results, stages)
    shown = [('cosine', part) for part in ('network', 'backbone', *stages, 'mean layer')]
    shown += [(measure, 'backbone') for measure in MEASURES[1:]]
    heads = [part if measure == 'cosine' else f'{_NAMES[measure]}, backbone' for measure, part in shown]
    heads[0] = f'cosine: {heads[0]}'
    columns = [Column('setting', lambda label: label)]
    columns += [_measure(head, part, measure, results) for head, (measure, part) in zip(heads, shown, strict=True)]
    columns.append(Column('kept positions of the last SBP layer', lambda label: _kept(kept.get(label))))
    return markdown_table(columns, results)


def _measure(head, part, measure, results):
    return Column(head, lambda label: _cell(results[label].get(part, {}).get(measure)))


def _table_of_parts(results, stages):
    heads = [part for part in HEADS if any(part in row for row in results.values())]
    parts = ['network', *heads, 'backbone', *reversed(stages), 'mean layer']
    columns = [
        Column('setting', lambda line: line[0] if line[1] == MEASURES[0] else ''),
        Column('measure', lambda line: _NAMES[line[1]]),
    ]
    for part in parts:
        columns.append(Column(part, lambda line, part=part: _cell(results[line[0]].get(part, {}).get(line[1]))))
    return markdown_table(columns, [(label, measure) for label in results for measure in MEASURES])


def _cell(value):
    if not value or value['mean'] is None:
        return '-'
    spread = '' if value['std'] is None else f' ± {value["std"]:.3f}'
    return f'{value["mean"]:.3f}{spread}'


def _kept(check):
    if check is None:
        return '-'
    dropped = '0' if check['dropped'] == 0 else f'{check["dropped"]:.2f}'
    return f'`{check["layer"]}`: error {check["error"]:.0e}; dropped ones {dropped}'


def study_picture(study: dict, title: str, path: Path) -> None:
    """Draws each setting: the three measures of the backbone and of the mean layer, and the cosine block by block.

    Args:
        study (dict): As ``gradient_study.py --json`` writes it.
        title (str): Above the panels.
        path (Path): A PNG file.
    """
    results = study['results']
    labels = list(results)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(labels))]
    heights = 0.6 + 0.27 * len(labels), 3
    figure, grid = panels(2, 3, figsize=(11, 4.2 + 0.27 * len(labels)), height_ratios=heights)
    for axes, measure in zip(grid[0], MEASURES, strict=True):
        for place, (label, colour) in enumerate(zip(labels, colours, strict=True)):
            for part, marker, shift in (('backbone', 'o', -0.13), ('mean layer', 'D', 0.13)):
                value = results[label][part][measure]
                if value['mean'] is not None:
                    bar = dict(fmt=marker, ms=5, capsize=2, color=colour, mfc=colour if marker == 'o' else 'white')
                    axes.errorbar(value['mean'], place + shift, xerr=value['std'] or 0, **bar)
        axes.set_yticks(range(len(labels)), labels if axes is grid[0][0] else [], fontsize=9)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_title(_NAMES[measure], fontsize=10)
        axes.axvline(0 if measure == 'relative_error' else 1, color='black', lw=0.8, ls=':')
    kinds = _layers(results[labels[0]])
    for axes, (name, layers) in zip(grid[1], kinds.items(), strict=False):
        for label, colour in zip(labels, colours, strict=True):
            values = [results[label][layer]['cosine'] for layer in layers]
            known = [(i, v['mean'], v['std'] or 0) for i, v in enumerate(values) if v['mean'] is not None]
            x, mean, std = (list(column) for column in zip(*known, strict=True))
            low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
            style = '.-' if labels.index(label) < len(COLOURS) else '.--'
            axes.plot(x, mean, style, color=colour, lw=1.2, ms=5, label=label)
            axes.fill_between(x, low, high, color=colour, alpha=0.1, lw=0)
        _stage_lines(axes, layers.values())
        axes.set_title(f'cosine of each block: {name}', fontsize=10)
        axes.set_xlabel('block', fontsize=9)
        axes.set_ylim(top=1.03)
    for axes in grid[1][len(kinds) :]:
        axes.set_axis_off()
    markers = [('backbone', 'o', 'black'), ('mean layer', 'D', 'white')]
    shapes = [_line(color='black', marker=m, ls='', mfc=f, label=name) for name, m, f in markers]
    _finish(figure, grid.flat, title, path, [*shapes, *grid[1][0].get_legend_handles_labels()[0]])


def norms_table(study: dict) -> str:
    """A Markdown table: norms relative to the first variant, and how many layers get no gradient at all.

    Args:
        study (dict): As ``gradient_norms.py --json`` writes it.

    Returns:
        str: Lines.
    """
    results = study['results']
    first = next(iter(results.values()))['norms']
    parts = [part for part in SUMS if part in first and part not in ('network', 'mean layer', *HEADS)]
    layers = [part for part in first if part not in SUMS]

    def norms(label):
        return results[label]['norms']

    def zero(label):
        return sum(not any(norms(label)[layer]) for layer in layers)

    columns = [
        Column('setting', lambda label: label),
        Column('first loss', lambda label: f'{results[label]["loss"][0]:.3f}'),
        Column('last loss', lambda label: f'{results[label]["loss"][-1]:.3f}'),
    ]
    columns += [
        Column(part, lambda label, part=part: f'{_median_ratio(norms(label)[part], first[part]):.2f}') for part in parts
    ]
    columns.append(Column('layers whose gradient is 0', lambda label: f'{zero(label)} of {len(layers)}'))
    return markdown_table(columns, results)


def _median_ratio(values, others):
    ratios = sorted(v / o for v, o in zip(values, others, strict=True) if o)
    return ratios[len(ratios) // 2] if ratios else float('nan')


def norms_picture(study: dict, title: str, path: Path) -> None:
    """Draws the norm of one kind of layer (of ConvNeXt the first pointwise one) over the training, light to dark from
    shallow to deep, and the backbone's.

    Args:
        study (dict): As ``gradient_norms.py --json`` writes it.
        title (str): Above the panels.
        path (Path): A PNG file.
    """
    import matplotlib

    results = study['results']
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    figure, grid = panels(rows, columns, figsize=(3 * columns, 2.9 * rows + 0.5), sharex=True, sharey=True)
    everything = [v for row in results.values() for norms in row['norms'].values() for v in norms if v]
    floor = min(everything) / 3
    for axes, (label, row) in zip(grid.flat, results.items(), strict=False):
        kinds = list(_layers(row['norms']).values())
        layers = kinds[len(kinds) // 2]
        steps = range(1, len(row['loss']) + 1)
        for i, (name, layer) in enumerate(layers.items()):
            values = [v or floor for v in row['norms'][name]]
            colour = matplotlib.colormaps['viridis_r'](0.1 + 0.9 * i / max(len(layers) - 1, 1))
            axes.semilogy(steps, values, color=colour, lw=1, label=_short(layer) if i in (0, len(layers) - 1) else None)
        axes.semilogy(steps, row['norms']['backbone'], color='black', lw=1.8, label='backbone')
        zero = sum(not any(row['norms'][name]) for name in layers)
        if zero:
            text = f'{zero} of {len(layers)} layers: exactly 0'
            axes.text(0.5, 0.12, text, transform=axes.transAxes, ha='center', va='bottom', fontsize=9, color='#b00020')
        axes.set_title(label, fontsize=10)
        axes.set_ylim(bottom=floor / 3)
    for axes in grid[-1]:
        axes.set_xlabel('training step', fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[:, 0]:
        axes.set_ylabel('L2 norm of the gradient', fontsize=9)
    for axes in list(grid.flat)[len(results) :]:
        axes.set_axis_off()
    _finish(figure, grid.flat, title, path, grid[0][0].get_legend_handles_labels()[0])


def _short(layer):
    return f'{layer.label} of stage {layer.stage + 1}, block {layer.block + 1}'


def _layers(parts) -> dict[str, dict[str, Layer]]:
    """The layers that pictures show, by kind, in the order of the forward pass."""
    found = sorted(((layer, name) for name in parts if (layer := layer_of(name))), key=lambda pair: pair[0][:2])
    kinds = dict.fromkeys(layer.label for layer, _ in found)
    return {kind: {name: layer for layer, name in found if layer.label == kind} for kind in kinds}


def _stage_lines(axes, layers):
    stages = [layer.stage for layer in layers]
    starts = [i for i, stage in enumerate(stages) if i == 0 or stage != stages[i - 1]]
    for start in starts[1:]:
        axes.axvline(start - 0.5, color='#bbbbbb', lw=0.8)
    ends = [*starts[1:], len(stages)]
    axes.set_xticks(
        [(a + b - 1) / 2 for a, b in zip(starts, ends, strict=True)], [f'stage {stages[a] + 1}' for a in starts]
    )


def _line(**style):
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def _finish(figure, drawn, title, path, legend):
    for axes in drawn:
        axes.tick_params(labelsize=8)
        axes.grid(axis='both', color='#eeeeee')
        axes.set_axisbelow(True)
    save_picture(figure, path, title, legend)
