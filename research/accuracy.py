"""Reports the AP of trainings: mean and spread over seeds, and paired differences with their interval."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from experiment import Experiment
from tables import markdown_table

from sbp_mmdet.plan.tables import Column, format_table

__all__ = ['Difference', 'accuracy_table', 'describe', 'paired']

CONFIDENCE = 0.95
_SHOWN = ('box AP', 'box AP small', 'box AP medium', 'mask AP', 'top-1')
_COMPARED = ('box AP', 'mask AP', 'top-1')


class Difference(NamedTuple):
    """Mean difference of trainings with the same seeds, and half its 95 % interval; `None` for a single pair."""

    mean: float
    half: float | None
    seeds: int

    def __str__(self):
        if self.half is None:
            return f'{100 * self.mean:+.1f}, one seed'
        low, high = 100 * (self.mean - self.half), 100 * (self.mean + self.half)
        text = f'{100 * self.mean:+.1f} ({low:+.1f} to {high:+.1f})'
        return f'**{text}**' if abs(self.mean) > self.half else text  # one in twenty is bold by chance


def describe(experiment: Experiment) -> dict:
    """Return the experiment of a JSON file of results."""
    settings = experiment.settings or dict.fromkeys(experiment.labels)
    return dict(name=experiment.name, settings=dict(settings), compare=experiment.pairs)


def _ended(runs):
    return {int(seed): run for seed, run in sorted(runs.items()) if run['finished']}


def _values(runs, name):
    """Return the last AP of finished training runs by seed. Metrics that were not measured are omitted."""
    return {seed: run['ap'][name] for seed, run in _ended(runs).items() if name in run['ap']}


def _course(runs, name):
    """Return the mean AP over all evaluations by seed, for finished runs. It varies less than the last evaluation."""
    curves = {seed: [point[name] for point in run['curve'] if name in point] for seed, run in _ended(runs).items()}
    return {seed: statistics.fmean(curve) for seed, curve in curves.items() if curve}


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """Return the differences a - b of values with the same seed, or None if they share no seed."""
    differences = [a[seed] - b[seed] for seed in sorted({*a} & {*b})]
    if not differences:
        return None
    n, half = len(differences), None
    if n > 1:
        from scipy.stats import t  # scipy is mmdet's; it takes a second to import

        half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(statistics.fmean(differences), half, n)


def accuracy_table(found: Mapping, markdown: bool = False) -> str:
    """Format a study of AP in points (percent), for finished training runs. "mean" is the mean over all evaluations."""
    results, against = found['results'], dict(found['experiment']['compare'])
    bases = sorted({*against.values()})
    base = bases[0] if len(bases) == 1 else 'its pair'
    names = [name for name in _SHOWN if any(_values(runs, name) for runs in results.values())]
    columns = [Column('setting', lambda label: label), Column('seeds', lambda label: f'{len(_ended(results[label]))}')]
    columns += [Column(name, lambda label, n=name: _spread([*_values(results[label], n).values()])) for name in names]
    compared = [(name, name, _values) for name in _COMPARED if name in names]
    compared += [(f'mean {name}', name, _course) for _, name, _ in compared[:1]]
    for head, name, values in compared:

        def cell(label, name=name, values=values):
            pair = results.get(against.get(label), {})
            difference = paired(values(results[label], name), values(pair, name))
            return difference and str(difference)

        columns.append(Column(f'{head}, less {base}', cell))
    if markdown:
        hours = sum(run['seconds'] for runs in results.values() for run in _ended(runs).values()) / 3600
        return f'{markdown_table(columns, results)}\n\n{hours:.1f} hours of training and evaluation in all.'
    going = [
        f'{label}, seed {seed}: not ended, {run["curve"][-1]["step"] if run["curve"] else 0} steps evaluated'
        for label, runs in results.items()
        for seed, run in runs.items()
        if not run['finished']
    ]
    return '\n'.join([format_table(columns, results), *going])


def _spread(values):
    if not values:
        return None
    spread = f' ± {100 * statistics.stdev(values):.1f}' if len(values) > 1 else ''
    return f'{100 * statistics.fmean(values):.1f}{spread}'
