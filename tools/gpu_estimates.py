"""Comparison of estimates that were made without a GPU with the measurements of the GPU report."""

import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from gpu_parts import ROOT, Part
from gpu_trials import Trial

__all__ = ['Estimate', 'add_counted', 'compare_estimates', 'table']

_NEAR = (0.95, 1.05)  # of measured / estimated: within it, an estimate was right
CONTEXT = 0.6e9  # what `needs` of the planner has for CUDA's context, which a cap on torch does not hold


class Estimate(NamedTuple):
    """Figure that was estimated and measured.

    Attributes:
        what (str): What was estimated, and how.
        trial (str): Name of the trial.
        preset (str): The preset.
        estimated (float): The estimate.
        measured (float): The measurement.
        unit (str): 'bytes', 'times' (relative to plain) or 'launches'.
    """

    what: str
    trial: str
    preset: str
    estimated: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float:
        """Measured relative to estimated."""
        return self.measured / self.estimated

    @property
    def wrong(self) -> bool:
        """Whether the estimate and the measurement differ by more than 5 %."""
        return not _NEAR[0] <= self.ratio <= _NEAR[1]


def _results(name: str) -> dict:
    """Return a file of docs/results; a missing or unreadable file is empty."""
    try:
        return json.loads((ROOT / f'docs/results/{name}.json').read_text())
    except (OSError, ValueError):
        return {}


def _counted(trial: Trial) -> dict[str, dict]:
    """Return the counted rows of a trial's detector by preset."""
    runs = [run for run in _results('memory_overview').get('runs', ()) if run.get('kind') == 'count']
    rows = [row for run in runs for row in run.get('rows', ())]
    return {row['variant']: row for row in rows if trial.counted and row.get('detector') == trial.counted}


def add_counted(part: Part, trial: Trial, rows: dict[str, dict]) -> None:
    """Add what was counted without a GPU to the rows of a trial.

    Args:
        part (Part): Part of the report.
        trial (Trial): One of its trials.
        rows (dict[str, dict]): Its rows by preset. They get ``counted_stored``, or ``counted_peak`` and
            ``counted_needs``, if these were counted.
    """
    keys = dict(counted_peak='peak', counted_needs='needs') if part.kind == 'steps' else {}
    if part.kind == 'modules' and trial.module == 'backbone':
        keys = dict(counted_stored='backbone')
    for preset, counted in _counted(trial).items():
        if preset in rows:
            rows[preset].update({key: counted[own] for key, own in keys.items() if counted.get(own)})


def _ratios(file: str, model: str | None = None) -> dict[str, float]:
    """Return times of docs/results relative to plain by preset."""
    rows = [row for row in _results(file).get('rows', ()) if model is None or row.get('model') == model]
    return {row.get('preset'): row['ratio'] for row in rows if row.get('ratio')}


def compare_estimates(trial: Trial, rows: dict[str, dict]) -> Iterator[Estimate]:
    """Yield all figures of a trial that were estimated and measured.

    Args:
        trial (Trial): A trial of the report.
        rows (dict[str, dict]): Its rows by preset, with what :func:`add_counted` adds.
    """
    times = _ratios(f'time_{trial.times}') if trial.times else {}
    issue = _ratios('issue_time', trial.issue) if trial.issue else {}
    for preset, row in rows.items():
        found = [(what, row.get(own), row.get(key), unit) for what, own, key, unit in _IN_A_ROW]
        if row.get('reserved') and row.get('context') is not None:
            measured = row['reserved'] + row['context']
            found.append(('`needs` of the planner, reserved and context', row.get('counted_needs'), measured, 'bytes'))
        if trial.cap and row.get('counted_needs'):
            needs, cap = row['counted_needs'] - CONTEXT, trial.cap * 2**30
            ran = row.get('reason') is None
            if ran != (needs <= cap) and (ran or row['reason'] == 'out of memory'):
                what = f'{"fits into" if ran else "does not fit into"} the cap: `needs` without context'
                found.append((what, needs, cap, 'bytes'))
        if preset != trial.presets[0] and not row.get('compared_with'):
            found.append(('time, by a CPU', times.get(preset), row.get('ratio'), 'times'))
            found.append(('time to issue, by small maps on a CPU', issue.get(preset), row.get('issue_ratio'), 'times'))
        for what, estimated, measured, unit in found:
            if estimated and measured:
                yield Estimate(what, trial.name, preset, estimated, measured, unit)


_IN_A_ROW = (
    ('peak, counted', 'counted_peak', 'peak_bytes', 'bytes'),
    ('stored, counted', 'counted_stored', 'saved_bytes', 'bytes'),
    ('reserved, by the model of the allocator', 'replayed', 'reserved', 'bytes'),
    ('launches, counted', 'counted_launches', 'launches', 'launches'),
)


def table(found: list[Estimate]) -> list[str]:
    """Return the report's lines about estimates: how many of each kind were right, and a table of the wrong ones.

    Args:
        found (list[Estimate]): All estimates.
    """
    if not found:
        return ['Nothing that was estimated has been measured yet.']
    lines = ['Right is within 5 %.', '']
    for what in dict.fromkeys(estimate.what for estimate in found):
        own = [estimate for estimate in found if estimate.what == what]
        lines.append(f'- {what}: {sum(not estimate.wrong for estimate in own)} of {len(own)} were right.')
    lines += ['', '| what | of | preset | estimated | measured | measured / estimated |', '|---|---|---|---|---|---|']
    wrong = sorted((estimate for estimate in found if estimate.wrong), key=lambda one: -abs(math.log(one.ratio)))
    for one in wrong:
        values = (_FORMS[one.unit](value) for value in (one.estimated, one.measured))
        lines.append(f'| {one.what} | {one.trial} | `{one.preset}` | {" | ".join(values)} | {one.ratio:.2f} |')
    return lines


_FORMS = dict(bytes=lambda n: f'{n / 1e9:.2f} GB', times='{:.2f}'.format, launches='{:.0f}'.format)
