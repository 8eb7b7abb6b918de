"""Formats tables and pictures of measurements."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from provenance import portable

from sbp_mmdet.plan.tables import Column, format_cells, format_table

__all__ = [
    'COLOURS',
    'append_line',
    'benchmark_table',
    'format_bytes',
    'markdown_table',
    'panels',
    'save_picture',
]

COLOURS = ('#1f77b4', '#d95f02', '#1b9e77', '#7b4fa3', '#e7298a', '#66a61e', '#a6761d', '#444444')


def markdown_table(columns: Sequence[Column], records: Iterable[dict]) -> str:
    """Format a table in Markdown."""
    head, *lines = (f'| {" | ".join(cells)} |' for cells in format_cells(columns, records))
    return '\n'.join([head, '|' + '---|' * len(columns), *lines])


def format_bytes(n: int) -> str:
    """Format a number of bytes in GB (1e9 bytes), or in MB below one GB."""
    return f'{n / 1e9:.2f} GB' if n >= 1e9 else f'{n / 1e6:.0f} MB'


def _cell(head, key, form):
    """Return a column that is empty for rows without the key."""

    def cell(row):
        value = row.get(key)
        return None if value is None else form(value)

    return key, Column(head, cell)


def _milliseconds(seconds):
    return f'{1e3 * seconds:.4g}'


_COLUMNS = (
    _cell('stored', 'saved_bytes', format_bytes),
    _cell('ratio', 'saved_ratio', '{:.3f}'.format),
    _cell('stored, counted', 'counted_stored', format_bytes),
    _cell('peak', 'peak_bytes', format_bytes),
    _cell('ratio', 'peak_ratio', '{:.3f}'.format),
    _cell('counted', 'counted_peak', format_bytes),
    _cell('reserved', 'reserved', format_bytes),
    _cell('by the model', 'replayed', format_bytes),
    _cell('context', 'context', format_bytes),
    _cell('needs, counted', 'counted_needs', format_bytes),
    _cell('cache given back', 'retries', str),
    _cell('seconds', 'seconds', '{:.3g}'.format),
    _cell('time, ratio', 'ratio', '{:.2f}'.format),
    _cell('least and most', 'spread', str),
    _cell('issued after, ms', 'issue', _milliseconds),
    _cell('issuing, ratio', 'issue_ratio', '{:.2f}'.format),
    _cell('kernels, ms', 'busy', _milliseconds),
    _cell('launches', 'launches', str),
    _cell('launches, counted', 'counted_launches', str),
    _cell('moved, counted', 'moved', format_bytes),
    _cell('compared with', 'compared_with', '`{}`'.format),
    _cell('cosine', 'cosine', '{:.4f}'.format),
    _cell('gradient error', 'error', '{:.1e}'.format),
    _cell('under autocast', 'amp_error', '{:.1e}'.format),
    _cell('compiling, s', 'compile_s', '{:.0f}'.format),
    _cell('kinds', 'kinds', str),
    _cell('modules', 'modules', str),
    _cell('outputs', 'outputs', '{:.0e}'.format),
    _cell('gradients', 'gradients', '{:.0e}'.format),
    _cell('', 'reason', str),
)


def append_line(file: Path, row: dict) -> None:
    """Append a line of JSON and wait until it is on the disk."""
    with open(file, 'a', encoding='utf-8') as lines:
        lines.write('\n' + json.dumps(portable(row)))  # what a killed writer left of its line stands alone
        lines.flush()
        os.fsync(lines.fileno())


def benchmark_table(rows: list[dict], markdown: bool = False) -> str:
    """Format a line for each preset or rival, with ratios to the first."""
    records, base = [], rows[0]
    for row in rows:
        row = dict(row)
        for kind in ('saved', 'peak'):
            if row.get(f'{kind}_bytes') is not None and base.get(f'{kind}_bytes'):
                row[f'{kind}_ratio'] = row[f'{kind}_bytes'] / base[f'{kind}_bytes']
        if 'ratio_min' in row:
            row['spread'] = f'{row["ratio_min"]:.2f} to {row["ratio_max"]:.2f}'
        records.append(row)
    columns = [column for key, column in _COLUMNS if any(row.get(key) is not None for row in records)]
    name = Column('preset', lambda row: f'`{row["preset"]}`' if markdown else row['preset'])
    return (markdown_table if markdown else format_table)([name, *columns], records)


def panels(rows: int = 1, columns: int = 1, **options) -> tuple:
    """Create an empty picture without a display: the figure, and its axes as an array (rows, columns)."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, squeeze=False, **{'layout': 'constrained', **options})
    for axes in grid.flat:
        axes.spines[['top', 'right']].set_visible(False)
    return figure, grid


def save_picture(figure, path: Path, legend: Sequence = (), columns: int = 5, dpi: int = 100) -> None:
    """Write a picture, make its folder, and close it. ``legend`` (handles) is placed below all panels."""
    import matplotlib.pyplot as plt

    if legend:
        figure.legend(handles=legend, loc='outside lower center', ncols=columns, fontsize=8, frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
