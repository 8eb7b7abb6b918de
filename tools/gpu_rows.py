"""The rows of the GPU report on disk: each part appends lines of JSON to a file of its own."""

import collections
import contextlib
import itertools
import json
from pathlib import Path

from gpu_parts import Part

__all__ = ['lines_of', 'missing', 'read_rows', 'rows_to_run']


def lines_of(file: Path) -> list[dict]:
    """Read the complete lines of a file; a line that a killed process left unfinished is skipped."""
    lines = []
    for line in file.read_text(encoding='utf-8').splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def read_rows(part: Part, out: Path) -> tuple[dict[str, dict], collections.Counter]:
    """Return the finished rows by name, and how often each row without a result was begun."""
    lines = [line for line in lines_of(out / f'{part.name}.jsonl') if 'row' in line]
    rows = {line['row']: line for line in lines if line.get('state') != 'begun'}
    return rows, collections.Counter(line['row'] for line in lines if line['row'] not in rows)


def missing(part: Part, out: Path) -> list[str]:
    """Return the names of the rows to measure. A row that was running when the report ended is tried once more."""
    rows, begun = read_rows(part, out)
    return [name for name in part.rows if name not in rows and begun[name] < 2]


def rows_to_run(part: Part, out: Path) -> list[str]:
    """Return the missing rows, each trial's preceded by its baseline, if the baseline could run."""
    rows, left = read_rows(part, out)[0], {*missing(part, out)}
    found = []
    for _, names in itertools.groupby(part.rows, key=lambda name: name.rpartition('/')[0]):
        names = [*names]
        if wanted := [name for name in names if name in left]:
            base = [name for name in names if name in rows and 'reason' not in rows[name]][:1]
            found += [*base, *wanted]
    return found
