"""Writes the tables of Markdown files anew from the measurements under docs/results.

    python tools/analysis_tools/update_tables.py README.md

A table stands between ``<!-- table: PATH.json -->`` and ``<!-- end -->``; the path is relative to the Markdown file.
The JSON file is what ``benchmark_block.py``, ``benchmark_memory.py``, ``benchmark_steps.py``, ``gradient_study.py``,
``gradient_norms.py`` or ``sweep.py`` writes with ``--json``. Below the table stand machine, versions and command.
"""

import argparse
import itertools
import json
import re
from pathlib import Path

from sbp_mmdet.analysis.report import markdown, steps_markdown
from sbp_mmdet.reporting import Column, format_bytes, markdown_table
from sbp_mmdet.resume import AtomicBackend
from sbp_mmdet.study.accuracy import accuracy_markdown
from sbp_mmdet.study.report import norms_table, study_table

BLOCK = re.compile(r'(<!-- table: (\S+) -->\n).*?(<!-- end -->)', re.DOTALL)

RIVALS_COLUMNS = (
    ('gradient error', 'drawn_error', '{:.0e}'),
    ('graphs of 5 sizes', 'graphs_of_5_sizes', '{}'),
    ('compiling, s', 'compile_s', '{:.0f}'),
    ('', 'reason', '{}'),
)


def blocks_table(rows: list[dict]) -> str:
    """A Markdown table of a benchmark of blocks."""
    records = []
    keys = ('family', 'arch', 'unit', 'stage')
    for (family, arch, unit, stage), group in itertools.groupby(rows, key=lambda row: [row[key] for key in keys]):
        first, *others = group
        label = f'{family} {arch}, {unit}' + (f', stage {stage}' if stage else '')
        records += [dict(first, base=first, label=label), *(dict(row, base=first, label='') for row in others)]
    columns = [
        Column('', lambda row: row['label']),
        Column('preset', lambda row: f'`{row["preset"]}`'),
    ]
    for head, key in (('stored', 'saved_bytes'), ('peak', 'peak_bytes')):
        columns += [
            _or_empty(head, key, lambda row, key=key: format_bytes(row[key])),
            _or_empty('ratio', key, lambda row, key=key: f'{row[key] / row["base"][key]:.3f}'),
        ]
    if 'total_ratio' in rows[0]:
        columns.append(_or_empty('time, ratio', 'total_ratio', lambda row: f'{row["total_ratio"]:.2f}'))
    if 'cosine' in rows[0]:
        names = {'cosine': 'cosine', 'relative error': 'relative_error'}
        columns += [Column(head, lambda row, key=key: f'{row[key]:.4f}') for head, key in names.items()]
    for head, key, form in RIVALS_COLUMNS:
        if any(key in row for row in rows):
            columns.append(_or_empty(head, key, lambda row, key=key, form=form: form.format(row[key])))
    return markdown_table(columns, records)


def _or_empty(head, key, cell):
    return Column(head, lambda row: None if row.get(key) is None else cell(row))


def sweep_table(rows: list[dict]) -> str:
    """A Markdown table of the planner's answers, see ``sweep.py``."""
    columns = [Column(key, lambda row, key=key: str(row[key])) for key in ('images', 'answer', 'seconds')]
    return markdown_table([Column('config', lambda row: row['config'].removeprefix('mmdet::')), *columns], rows)


def table(results: dict) -> str:
    """The table that fits what a file holds, and where, with what and how it was measured."""
    machine = results['machine']
    return f"""{_rows(results)}

*{machine['date']}, {machine['device']}, torch {machine['torch']}: `{machine['command']}`*
"""


def _rows(results):
    if 'experiment' in results:
        return accuracy_markdown(results)
    if 'rows' not in results:
        return norms_table(results) if 'steps' in results['case'] else study_table(results)
    rows = results['rows']
    if 'answer' in rows[0]:
        return sweep_table(rows)
    if 'variant' not in rows[0]:
        return blocks_table(rows)
    return markdown(rows) if 'peak' in rows[0] else steps_markdown(rows)


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
