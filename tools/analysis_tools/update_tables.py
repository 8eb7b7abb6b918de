"""Writes the tables of Markdown files anew from the measurements under docs/results.

    python tools/analysis_tools/update_tables.py README.md

A table stands between ``<!-- table: PATH.json -->`` and ``<!-- end -->``; the path is relative to the Markdown file.
The JSON file is what ``benchmark_block.py``, ``benchmark_memory.py``, ``benchmark_steps.py``, ``gradient_study.py`` or
``gradient_norms.py`` writes with ``--json``. Below the table stand the machine, the versions and the command.
"""

import argparse
import itertools
import json
import re
from pathlib import Path

from sbp_mmdet.analysis.report import format_bytes, markdown, steps_markdown
from sbp_mmdet.study.report import norms_table, study_table

BLOCK = re.compile(r'(<!-- table: (\S+) -->\n).*?(<!-- end -->)', re.DOTALL)


def blocks_table(rows: list[dict]) -> str:
    """A Markdown table of a benchmark of blocks."""
    lines = []
    groups = itertools.groupby(rows, key=lambda row: (row['part'], row['arch'], row['stage']))
    for i, ((part, arch, stage), group) in enumerate(groups):
        rows = list(group)
        timed, compared = 'total_ratio' in rows[0], 'cosine' in rows[0]
        if i == 0:
            more = (['time, ratio'] if timed else []) + (['cosine', 'relative error'] if compared else [])
            lines.append('| | ' + ' | '.join(['mode', 'stored', 'ratio', 'peak', 'ratio', *more]) + ' |')
            lines.append('|' + '---|' * (6 + len(more)))
        label = f'ConvNeXt {arch}' + (f', {part}, stage {stage}' if stage else f', {part}')
        for row in rows:
            cells = [label, f'`{row["mode"]}`']
            for key in ('saved_bytes', 'peak_bytes'):
                cells += [format_bytes(row[key]), f'{row[key] / rows[0][key]:.3f}']
            cells += [f'{row["total_ratio"]:.2f}'] if timed else []
            cells += [f'{row["cosine"]:.4f}', f'{row["relative_error"]:.4f}'] if compared else []
            lines.append('| ' + ' | '.join(cells) + ' |')
            label = ''
    return '\n'.join(lines)


def table(results: dict) -> str:
    """The table that fits what a file holds, and where, with what and how it was measured."""
    machine = results['machine']
    return f"""{_rows(results)}

*{machine['date']}, {machine['device']}, torch {machine['torch']}: `{machine['command']}`*
"""


def _rows(results):
    if 'rows' not in results:
        return norms_table(results) if 'steps' in results['case'] else study_table(results)
    rows = results['rows']
    if 'setting' not in rows[0]:
        return blocks_table(rows)
    return markdown(rows) if 'peak' in rows[0] else steps_markdown(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('files', nargs='+', type=Path, help='Markdown files')
    for path in parser.parse_args().files:
        text = path.read_text()

        def fill(match, path=path):
            return match[1] + table(json.loads((path.parent / match[2]).read_text())) + match[3]

        path.write_text(BLOCK.sub(fill, text))
        print(f'{path}: {len(BLOCK.findall(text))} tables')


if __name__ == '__main__':
    main()
