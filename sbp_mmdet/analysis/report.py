"""Tables and pictures of what :func:`.detector.measure_detector` counted, and of steps' times."""

import functools
from collections.abc import Sequence
from pathlib import Path

from ..reporting import Column, format_bytes, markdown_table, panels, save_picture, text_table
from ..settings import PRESETS

__all__ = [
    'ORDER',
    'against_time',
    'groups',
    'markdown',
    'picture',
    'steps_markdown',
    'steps_picture',
    'steps_table',
    'table',
]

ORDER = ['stem', 'stage 1', 'stage 2', 'stage 3', 'stage 4', 'output norms', 'backbone', 'neck', 'RPN']
_NAME = Column('variant', lambda row: f'`{row["variant"]}`')
_BACKBONE = ('stem', 'stage 1', 'stage 2', 'stage 3', 'stage 4', 'output norms', 'backbone')


def groups(row: dict) -> dict[str, int]:
    """The bars of the picture: they add up to the peak.

    Args:
        row (dict): Of ``measure_detector``.

    Returns:
        dict[str, int]: Name to bytes.
    """
    saved = row['saved']
    bars = {'parameters': row['parameters'], 'optimizer states': row['optimizer']}
    bars['saved: backbone'] = sum(saved.get(part, 0) for part in _BACKBONE)
    bars['saved: neck and RPN'] = saved.get('neck', 0) + saved.get('RPN', 0)
    bars['saved: heads'] = sum(n for part, n in saved.items() if part not in (*_BACKBONE, 'neck', 'RPN'))
    bars['gradients and temporaries at the peak'] = row['peak'] - sum(bars.values())
    return bars


def table(rows: list[dict]) -> str:
    """Text for a terminal: a line for each variant, ratios to the first.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``variant``.

    Returns:
        str: Lines.
    """
    fitting = _fitting(rows)
    base = fitting[0] if fitting else {}
    parts = [part for part in ORDER if any(part in row['saved'] for row in fitting)]
    parts += sorted({part for row in fitting for part in row['saved']} - set(parts))
    fixed = dict(params='parameters', optim='optimizer', grads='gradients')
    columns = [Column('MB (1e6 bytes)', lambda row: row['variant'])]
    columns += [Column(head, lambda row, key=key: _megabytes(row[key])) for head, key in fixed.items()]
    columns += [Column(part, lambda row, part=part: _megabytes(row['saved'].get(part, 0))) for part in parts]
    columns += [
        Column('peak', lambda row: _megabytes(row['peak'])),
        Column('ratio', lambda row: f'{row["peak"] / base["peak"]:.3f}'),
        Column('peak in', lambda row: row['peak_phase']),
    ]
    if base.get('step_s') is not None:
        columns += [
            Column('reserved', lambda row: _megabytes(row['reserved'])),
            Column('step ms', lambda row: f'{row["step_s"] * 1e3:.1f}'),
            Column('ratio', lambda row: f'{row["step_s"] / base["step_s"]:.2f}'),
        ]
    columns += _if_any(rows, ('overflows', 'retries'))
    return text_table(_with_what_does_not_fit(columns), rows)


def _fitting(rows):
    return [row for row in rows if row.get('fits', True)]


def _with_what_does_not_fit(columns):
    """The same columns, for a row of a variant that ran out of memory too: its peak says so, the rest is empty."""

    def cell(row, column):
        if row.get('fits', True) or column is columns[0]:
            return column.cell(row)
        return 'does not fit' if column.head == 'peak' else None

    return [Column(column.head, functools.partial(cell, column=column)) for column in columns]


def _megabytes(n):
    return f'{n / 1e6:.0f}'


def markdown(rows: list[dict]) -> str:
    """A Markdown table.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``variant``.

    Returns:
        str: Lines.
    """
    base, kept = next(iter(_fitting(rows)), {}), ('parameters', 'optimizer', 'gradients')
    columns = [_NAME, *(Column(key, lambda row, key=key: format_bytes(row[key])) for key in kept)]
    for name in ('backbone', 'neck and RPN', 'heads'):
        head = {'backbone': 'saved: backbone', 'neck and RPN': 'neck, RPN'}.get(name, name)
        columns.append(Column(head, lambda row, name=name: format_bytes(groups(row)[f'saved: {name}'])))
    columns += [
        Column('peak', lambda row: format_bytes(row['peak'])),
        Column('ratio', lambda row: f'{row["peak"] / base["peak"]:.3f}'),
    ]
    if base.get('step_s') is not None:
        columns.append(Column('step, ratio', lambda row: f'{row["step_s"] / base["step_s"]:.2f}'))
    columns += _if_any(rows, ('overflows', 'retries'))
    return markdown_table(_with_what_does_not_fit(columns), rows)


def picture(rows: list[dict], title: str, path: Path) -> None:
    """Draws a bar for each variant, stacked to its peak.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``variant``.
        title (str): Above the bars.
        path (Path): A PNG file.
    """
    rows = _fitting(rows)
    if not rows:
        raise ValueError('nothing fits into the device; there is no peak to draw')
    colours = ['#9aa0a6', '#5f6b7a', '#1f77b4', '#6fb1e0', '#f2a541', '#e8e3d9']
    figure, axes, places = _bars(rows, title, 'peak of a training step, GB (1e9 bytes)')
    left = [0.0] * len(rows)
    handles = []
    for i, name in enumerate(groups(rows[0])):
        values = [groups(row)[name] / 1e9 for row in rows]
        handles.append(axes.barh(places, values, left=left, height=0.68, color=colours[i], label=name))
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, row, end in zip(places, rows, left, strict=True):
        ratio = row['peak'] / rows[0]['peak']
        axes.text(end, place, f'  {row["peak"] / 1e9:.2f} GB  ({ratio:.2f}x)', va='center', fontsize=9)
    axes.set_xlim(0, max(left) * 1.22)
    save_picture(figure, path, legend=handles, columns=3, dpi=140)


def _bars(rows, title, label):
    """Figure, axes, and the place of each row's bar, the first on top."""
    figure, grid = panels(figsize=(10, 1.6 + 0.45 * len(rows)))
    axes, places = grid[0, 0], list(range(len(rows)))[::-1]
    axes.set_yticks(places, [row['variant'].replace('+', ' + ') for row in rows], fontsize=9)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10, loc='left')
    return figure, axes, places


_STEPS = (
    Column('step, s', lambda row: f'{row["step_s"]:.3g}'),
    Column('ratio (min to max)', lambda row: f'{row["ratio"]:.2f} ({row["ratio_min"]:.2f} to {row["ratio_max"]:.2f})'),
)
# What stands in a table only where some row has it.
_COSTS = {
    'held_bytes': ('held', format_bytes),
    'held_ratio': ('ratio', '{:.3f}'.format),
    'peak_bytes': ('peak', format_bytes),
    'peak_ratio': ('ratio', '{:.3f}'.format),
    'drawn_error': ('gradient error', '{:.0e}'.format),
    'graphs': ('graphs', str),
    'compile_s': ('compiling, s', '{:.0f}'.format),
    'overflows': ('steps without optimizer', str),
    'retries': ('allocator retries', str),
    'reason': ('', str),
}


def _steps_columns(rows):
    return [Column(head, functools.partial(_if_timed, cell=cell)) for head, cell in _STEPS] + _if_any(rows, _COSTS)


def _if_any(rows, keys):
    """Columns of those keys that some row has."""
    found = {key: _COSTS[key] for key in keys if any(row.get(key) is not None for row in rows)}
    return [Column(head, functools.partial(_if_there, key=key, form=form)) for key, (head, form) in found.items()]


def _if_timed(row, cell):
    return cell(row) if 'step_s' in row else None


def _if_there(row, key, form):
    return None if row.get(key) is None else form(row[key])


def _with_ratios(rows):
    """What is held, relative to the first row."""
    found, base = [], rows[0]
    for row in rows:
        ratios = {f'{k}_ratio': row[f'{k}_bytes'] / base[f'{k}_bytes'] for k in ('held', 'peak') if f'{k}_bytes' in row}
        found.append(dict(row, **ratios))
    return found


def steps_table(rows: list[dict]) -> str:
    """Text for a terminal: a line for each variant of :func:`.step_times.measure_steps`."""
    rows = _with_ratios(rows)
    return text_table([Column('variant', lambda row: row['variant']), *_steps_columns(rows)], rows)


def steps_markdown(rows: list[dict]) -> str:
    """A Markdown table: a line for each variant of :func:`.step_times.measure_steps`."""
    rows = _with_ratios(rows)
    return markdown_table([_NAME, *_steps_columns(rows)], rows)


def steps_picture(rows: list[dict], title: str, path: Path) -> None:
    """Draws a bar for each variant: the median of its ratios to the first, and a line from the least to the most.

    Args:
        rows (list[dict]): Of :func:`.step_times.measure_steps`.
        title (str): Above the bars.
        path (Path): A PNG file.
    """
    rows = [row for row in rows if 'step_s' in row]
    label = f'time of a training step, relative to {rows[0]["variant"]}'
    figure, axes, places = _bars(rows, title, label)
    ratios, low, high = ([row[key] for row in rows] for key in ('ratio', 'ratio_min', 'ratio_max'))
    spread = [[r - a for r, a in zip(ratios, low, strict=True)], [b - r for r, b in zip(ratios, high, strict=True)]]
    axes.barh(places, ratios, height=0.68, color='#6fb1e0', xerr=spread, ecolor='#5f6b7a', capsize=3)
    axes.axvline(1, color='#5f6b7a', lw=0.8, ls=':')
    for place, row in zip(places, rows, strict=True):
        axes.text(row['ratio_max'], place, f'  {row["ratio"]:.2f}x  ({row["step_s"]:.3g} s)', va='center', fontsize=9)
    axes.set_xlim(0, max(high) * 1.22)
    save_picture(figure, path, dpi=140)


def against_time(rows: list[dict], others: Sequence[str], title: str, path: Path) -> None:
    """Draws memory against time, a point for each row that has both, relative to the first row. A hollow point has
    gradients that are more than 5 % off while stochastic depth drops images.

    Args:
        rows (list[dict]): Of ``benchmark_block.py``, for one unit, or of ``benchmark_steps.py`` with ``--rivals``.
        others (Sequence[str]): Names that are not presets or variants; these and plain checkpointing are drawn in grey.
        title (str): Above the points.
        path (Path): A PNG file.

    Raises:
        ValueError: If nothing has a time.
    """
    steps = 'held_bytes' in rows[0]
    time, stored = ('ratio', 'held_bytes') if steps else ('total_ratio', 'saved_bytes')
    drawn = [row for row in rows if row.get(time) and row.get(stored) is not None]
    if not drawn:
        raise ValueError('there are no times to draw; measure with --rounds 1 or more')
    figure, grid = panels(figsize=(8, 5))
    axes = grid[0, 0]
    for row in drawn:
        name = row['preset'] if 'preset' in row else row['variant']
        other = name in others or PRESETS[name.split('+')[0]].sbp_cfg is None
        x, y, colour = row[time], row[stored] / rows[0][stored], '#5f6b7a' if other else '#1f77b4'
        wrong = (row.get('drawn_error') or 0) > 0.05
        axes.plot(x, y, 's' if other else 'o', color=colour, fillstyle='none' if wrong else 'full')
        axes.annotate(name, (x, y), xytext=(4, 4), textcoords='offset points', fontsize=8, color=colour)
    of = 'a training step' if steps else 'forward and backward pass'
    axes.set_xlabel(f'time of {of}, relative to the plain one')
    axes.set_ylabel('held when the forward pass ends, relative' if steps else 'stored for the backward pass, relative')
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc='left')
    save_picture(figure, path, dpi=140)
