"""Tables and pictures of what the tools of this folder measure; new and older files of docs/results.

    python research/tables.py README.md docs/*.md

writes the tables of Markdown files anew. A table stands between ``<!-- table: PATH.json -->`` and ``<!-- end -->``; the
path is relative to the Markdown file. Below it stand machine, versions and command.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from sbp_mmdet.plan.tables import Column, format_bytes, markdown_table, text_table
from sbp_mmdet.resume import AtomicBackend

__all__ = ['COLOURS', 'benchmark_table', 'panels', 'save_picture', 'table']

BLOCK = re.compile(r'(<!-- table: (\S+) -->\n).*?(<!-- end -->)', re.DOTALL)
COLOURS = ('#1f77b4', '#d95f02', '#1b9e77', '#7b4fa3', '#e7298a', '#66a61e', '#a6761d', '#444444')


def _cell(head, key, form):
    """A column that stays empty where a row has nothing for it."""

    def cell(row):
        value = row.get(key)
        return None if value is None else form(value)

    return key, Column(head, cell)


_COLUMNS = (
    _cell('stored', 'saved_bytes', format_bytes),
    _cell('ratio', 'saved_ratio', '{:.3f}'.format),
    _cell('held', 'held_bytes', format_bytes),
    _cell('ratio', 'held_ratio', '{:.3f}'.format),
    _cell('peak', 'peak_bytes', format_bytes),
    _cell('ratio', 'peak_ratio', '{:.3f}'.format),
    _cell('reserved', 'reserved', format_bytes),
    _cell('seconds', 'seconds', '{:.3g}'.format),
    _cell('time, ratio', 'ratio', '{:.2f}'.format),
    _cell('least and most', 'spread', str),
    _cell('cosine', 'cosine', '{:.4f}'.format),
    _cell('gradient error', 'error', '{:.1e}'.format),
    _cell('compiling, s', 'compile_s', '{:.0f}'.format),
    _cell('', 'reason', str),
)
# Of older files, and their names now.
_OLD = dict(variant='preset', step_s='seconds', total_ratio='ratio', drawn_error='error', relative_error='error')


def benchmark_table(rows: list[dict], markdown: bool = False) -> str:
    """A line for each preset or rival, ratios to the first of its group (``arch`` and ``stage`` in older files)."""
    records, base = [], {}
    for row in rows:
        row = {_OLD.get(key, key): value for key, value in row.items()}
        group = [str(row[key]) for key in ('family', 'arch', 'size', 'unit', 'stage') if row.get(key)]
        if not base or base['group'] != group:
            base = dict(row, group=group)
        for kind in ('saved', 'held', 'peak'):
            if row.get(f'{kind}_bytes') is not None and base.get(f'{kind}_bytes'):
                row[f'{kind}_ratio'] = row[f'{kind}_bytes'] / base[f'{kind}_bytes']
        if 'ratio_min' in row:
            row['spread'] = f'{row["ratio_min"]:.2f} to {row["ratio_max"]:.2f}'
        records.append(dict(row, group=', '.join(group)))
    columns = [column for key, column in _COLUMNS if any(row.get(key) is not None for row in records)]
    name = Column('preset', lambda row: f'`{row["preset"]}`' if markdown else row['preset'])
    groups = [Column('of', lambda row: row['group'])] if any(row['group'] for row in records) else []
    return (markdown_table if markdown else text_table)([name, *groups, *columns], records)


def table(results: dict) -> str:
    """The Markdown table that fits what a file holds, and where, with what and how it was measured.

    Raises:
        ValueError: If no tool of this version makes a table of it.
    """
    machine = results['machine']
    return f"""{_rows(results)}

*{machine['date']}, {machine['device']}, torch {machine['torch']}: `{machine['command']}`*
"""


def _rows(results):
    if 'experiment' in results:
        from accuracy import accuracy_table

        return accuracy_table(results, markdown=True)
    rows = results.get('rows') or []
    if 'results' in results:
        from gradients import study_table

        return study_table(results, markdown=True)
    if rows and 'answer' in rows[0]:
        columns = [Column(key, lambda row, key=key: str(row[key])) for key in ('images', 'answer', 'seconds')]
        return markdown_table([Column('config', lambda row: row['config'].removeprefix('mmdet::')), *columns], rows)
    if rows and 'peak' in rows[0]:
        return _detector_table(rows)
    if not rows or not {'preset', 'variant'} & {*rows[0]}:
        raise ValueError('it is of a tool that is gone; docs/research/lost.md names the commit that has it')
    return benchmark_table(rows, markdown=True)


def _detector_table(rows):
    """Of whole detectors, counted by the planner."""
    base = next(row for row in rows if row.get('fits', True))
    columns = [Column('preset', lambda row: f'`{row.get("variant") or row["preset"]}`')]
    for key in ('parameters', 'optimizer', 'gradients'):
        columns.append(Column(key, lambda row, key=key: format_bytes(row[key])))
    columns.append(Column('stored', lambda row: format_bytes(sum(row['saved'].values()))))
    columns.append(Column('peak', lambda row: format_bytes(row['peak'])))
    columns.append(Column('ratio', lambda row: f'{row["peak"] / base["peak"]:.3f}'))
    return markdown_table(columns, [row for row in rows if row.get('fits', True)])


def panels(rows: int = 1, columns: int = 1, **options) -> tuple:
    """An empty picture, drawn without a display: figure, and its axes as an array (rows, columns)."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, squeeze=False, **{'layout': 'constrained', **options})
    for axes in grid.flat:
        axes.spines[['top', 'right']].set_visible(False)
    return figure, grid


def save_picture(figure, path: Path, title: str = '', legend: Sequence = (), columns: int = 5, dpi: int = 100) -> None:
    """Writes a picture, its folder included, and closes it; ``legend`` (handles) stands below all panels."""
    import matplotlib.pyplot as plt

    if legend:
        figure.legend(handles=legend, loc='outside lower center', ncols=columns, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10, x=0.01, ha='left')
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('files', nargs='+', type=Path, help='Markdown files')
    files, pages = parser.parse_args().files, {}
    for path in files:

        def fill(match, path=path):
            try:
                return match[1] + table(json.loads((path.parent / match[2]).read_text())) + match[3]
            except (OSError, ValueError, LookupError, TypeError) as error:
                parser.error(f'{path}: no table can be made of {match[2]}: {type(error).__name__}: {error}')

        try:
            pages[path] = BLOCK.subn(fill, path.read_text())
        except OSError as error:
            parser.error(str(error))
    for path, (text, number) in pages.items():
        AtomicBackend().put_text(text, path)
        print(f'{path}: {number} tables')


if __name__ == '__main__':
    main()
