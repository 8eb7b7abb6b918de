"""Results of the GPU report as a file of docs/results, and their tables in README.md and docs/costs.md.

    python research/gpu_results.py read OUT    # OUT: a folder of tools/gpu_report.sh; adds its rows
    python research/gpu_results.py write       # the tables

The first reads verifications, whole steps, steps with limited memory, and modules.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from provenance import CHECKOUT, write_json
from tables import markdown_table

sys.path.append(str(CHECKOUT / 'tools'))
from gpu_rows import lines_of  # noqa: E402
from gpu_trials import CAPS, FAMILIES, MODULES, STEPS  # noqa: E402

from sbp_mmdet.plan.tables import Column  # noqa: E402

RESULTS = CHECKOUT / 'docs/results/gpu_h100.json'
_FILES = {'verify': 'verify*.jsonl', 'step': 'steps*.jsonl', 'cap': 'caps*.jsonl', 'module': 'modules*.jsonl'}
_TRIALS = {trial.name: trial for trial in (*FAMILIES, *STEPS, *CAPS, *MODULES)}
_KEYS = {
    'verify': ('kinds', 'modules', 'outputs', 'gradients'),
    'step': ('peak_bytes', 'reserved', 'context', 'replayed', 'seconds', 'ratio', 'ratio_min', 'ratio_max'),
    'cap': ('peak_bytes', 'reserved', 'context', 'retries', 'seconds', 'reason'),
    'module': ('peak_bytes', 'error', 'seconds', 'ratio', 'ratio_min', 'ratio_max', 'issue', 'issue_ratio'),
}
_PRESETS = {'with_cp': 'checkpointing', 'exact': '`exact`', 'exact_min': '`exact_min`', 'int8': '`int8`'}
_MORE = {'sampled': '`sampled`', 'sbp': '`sbp`'}


def read(out: Path) -> None:
    """Add the rows of a report to the file of results, in place of those that it has of the same trials.

    Args:
        out (Path): Folder of the report.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else dict(runs=[])
    for kind, pattern in _FILES.items():
        for file in sorted(out.glob(pattern)):
            machine, every = None, {}
            for line in lines_of(file):
                machine = line.get('machine', machine)
                trial, _, preset = line.get('row', '').rpartition('/')
                if trial in _TRIALS and line.get('state') != 'begun':
                    every[trial, preset] = {key: line[key] for key in _KEYS[kind] if key in line}
            found = {name: row for name, row in every.items() if _KEYS[kind][0] in row or kind == 'cap' and row}
            for run in results['runs']:
                if run['kind'] == kind:
                    run['rows'] = [row for row in run['rows'] if (row['trial'], row['preset']) not in found]
            rows = [dict(trial=trial, preset=preset, **row) for (trial, preset), row in found.items()]
            results['runs'].append(dict(kind=kind, machine=machine, rows=rows))
    results['runs'] = [run for run in results['runs'] if run['rows']]
    write_json(RESULTS, results)


def measured_rows(kind: str) -> dict[tuple[str, str], dict]:
    """Return the measured rows of a kind by trial and preset, for whole steps by the detector's name in the tables.

    Args:
        kind (str): 'verify', 'step', 'cap' or 'module'.
    """
    runs = json.loads(RESULTS.read_text())['runs'] if RESULTS.exists() else []
    rows = [row for run in runs if run['kind'] == kind for row in run['rows']]
    name = (lambda trial: _TRIALS[trial].counted) if kind == 'step' else str
    return {(name(row['trial']), row['preset']): row for row in rows}


def used_bytes(row: dict) -> int:
    """Return what a step needs of a GPU: what torch reserves, and CUDA's context."""
    return row['reserved'] + row['context']


def tables(needs: dict[tuple[str, str], float]) -> dict[tuple[str, str], str]:
    """Return the tables of the pages.

    Args:
        needs (dict[tuple[str, str], float]): Bytes that the planner counts, by detector and preset.

    Returns:
        dict[tuple[str, str], str]: Markdown by page and marker.
    """
    steps, caps, modules, verified = (measured_rows(kind) for kind in ('step', 'cap', 'module', 'verify'))

    def agreement(key):
        return lambda family: ', '.join(f'{verified[family, preset][key]:.0e}' for preset in ('exact', 'int8'))

    def spread(row):
        return f'{row["ratio"]:.2f} ({row["ratio_min"]:.2f} to {row["ratio_max"]:.2f})'

    def columns(rows, presets, form):
        def column(preset, head):
            return Column(head, lambda name: form(rows.get((name, preset)), name, preset))

        return [Column('', str), *(column(preset, head) for preset, head in presets.items())]

    def compared(row, name, preset):
        if not row:
            return 'not reached'
        return f'{used_bytes(row) / 1e9:.1f} ({needs[name, preset] / 1e9:.1f}), {row["peak_bytes"] / 1e9:.2f}'

    def limited(row, *_):
        return (row.get('reason') or f'{used_bytes(row) / 1e9:.1f}') if row else 'not reached'

    timed = [name for name in dict.fromkeys(name for name, _ in steps) if 'ratio' in steps[name, 'none']]
    of_modules = columns(modules, _PRESETS | _MORE, lambda row, *_: f'{row["ratio"]:.2f}' if row else '')
    of_families = [
        Column('', str),
        Column('modules', lambda family: str(verified[family, 'exact']['modules'])),
        Column('outputs, `exact`, `int8`', agreement('outputs')),
        Column('gradients, `exact`, `int8`', agreement('gradients')),
    ]
    return {
        ('docs/costs.md', 'gpu verify'): markdown_table(of_families, dict.fromkeys(name for name, _ in verified)),
        ('docs/costs.md', 'gpu memory'): markdown_table(
            columns(steps, {'none': 'plain'} | _PRESETS, compared), dict.fromkeys(name for name, _ in steps)
        ),
        ('docs/costs.md', 'gpu caps'): markdown_table(
            columns(caps, {'none': 'plain'} | _PRESETS, limited), dict.fromkeys(name for name, _ in caps)
        ),
        ('docs/costs.md', 'gpu steps'): markdown_table(columns(steps, _PRESETS, lambda row, *_: spread(row)), timed),
        ('docs/costs.md', 'gpu modules'): markdown_table(of_modules, dict.fromkeys(name for name, _ in modules)),
        ('README.md', 'gpu steps'): markdown_table(
            columns(steps, _PRESETS, lambda row, *_: f'{row["ratio"]:.2f}'), timed
        ),
    }


def write_tables(found: dict[tuple[str, str], str]) -> None:
    """Write tables between their markers.

    Args:
        found (dict[tuple[str, str], str]): Markdown by page and marker.

    Raises:
        ValueError: If a page has no such marker.
    """
    for (name, marker), table in found.items():
        page = CHECKOUT / name
        block = re.compile(rf'(<!-- results: {marker} -->\n).*?(<!-- end -->)', re.DOTALL)
        text, n = block.subn(lambda match, table=table: f'{match[1]}{table}\n{match[2]}', page.read_text())
        if not n:
            raise ValueError(f'{name} has no marker <!-- results: {marker} -->')
        page.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest='action', required=True)
    reading = actions.add_parser('read', help='add the rows of a report')
    reading.add_argument('out', type=Path, help='folder of the report')
    actions.add_parser('write', help='write the tables')
    args = parser.parse_args()
    if args.action == 'read':
        read(args.out)
    else:
        from memory_overview import counted_needs

        write_tables(tables(counted_needs()))


if __name__ == '__main__':
    main()
