"""What trainings say of AP: mean and spread over seeds, differences seed by seed with an interval, AP against steps."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from experiment import Experiment
from tables import COLOURS, panels, save_picture

from sbp_mmdet.plan.tables import Column, markdown_table, text_table

__all__ = ['Difference', 'accuracy_picture', 'accuracy_table', 'describe', 'paired', 'steps_to']

CONFIDENCE = 0.95
_SHOWN = ('box AP', 'box AP small', 'box AP medium', 'mask AP', 'top-1')
_COMPARED = ('box AP', 'mask AP', 'top-1')


class Difference(NamedTuple):
    """Of trainings with the same seed, over seeds: mean, and half of the interval (t at 95 %; None for one)."""

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
    """What a JSON file of results says of its experiment."""
    settings = experiment.settings or dict.fromkeys(experiment.labels)
    return dict(name=experiment.name, settings=dict(settings), compare=experiment.pairs, reach=dict(experiment.reach))


def _ended(runs):
    return {int(seed): run for seed, run in sorted(runs.items()) if run['finished']}


def _values(runs, name):
    """Last AP by seed, of trainings that ended; what is None was not measured."""
    return {seed: run['ap'][name] for seed, run in _ended(runs).items() if name in run['ap']}


def _course(runs, name):
    """Mean of all evaluations by seed, of trainings that ended: it depends less on the seed than the last one does."""
    curves = {seed: [point[name] for point in run['curve'] if name in point] for seed, run in _ended(runs).items()}
    return {seed: statistics.fmean(curve) for seed, curve in curves.items() if curve}


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """The difference a - b of values with the same seed; None if they share no seed."""
    differences = [a[seed] - b[seed] for seed in sorted({*a} & {*b})]
    if not differences:
        return None
    n, half = len(differences), None
    if n > 1:
        from scipy.stats import t  # scipy is mmdet's; it takes a second to import

        half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(statistics.fmean(differences), half, n)


def steps_to(run: Mapping, name: str, value: float) -> int | None:
    """The step of the first evaluation that reached a value; None: none did."""
    return next((point['step'] for point in run['curve'] if point.get(name, -1) >= value), None)


def accuracy_table(found: Mapping, markdown: bool = False) -> str:
    """Table of a study of AP, in AP points (percent), of trainings that ended. "mean" is that of all evaluations."""
    results, experiment = found['results'], found['experiment']
    against = dict(experiment['compare'])
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
    for name, value in experiment['reach'].items():

        def reached(label, name=name, value=value):
            return _reached([steps_to(run, name, value) for run in _ended(results[label]).values()])

        columns.append(Column(f'steps to {name} {100 * value:g}', reached))
    if markdown:
        hours = sum(run['seconds'] for runs in results.values() for run in _ended(runs).values()) / 3600
        return f'{markdown_table(columns, results)}\n\n{hours:.1f} hours of training and evaluation in all.'
    going = [
        f'{label}, seed {seed}: not ended, {run["curve"][-1]["step"] if run["curve"] else 0} steps evaluated'
        for label, runs in results.items()
        for seed, run in runs.items()
        if not run['finished']
    ]
    return '\n'.join([text_table(columns, results), *going])


def _spread(values):
    if not values:
        return None
    spread = f' ± {100 * statistics.stdev(values):.1f}' if len(values) > 1 else ''
    return f'{100 * statistics.fmean(values):.1f}{spread}'


def _reached(steps):
    known = [step for step in steps if step is not None]
    late = f'{len(steps) - len(known)} of {len(steps)} never' if len(known) < len(steps) else ''
    return ', '.join(filter(None, [f'{statistics.fmean(known):.0f}' if known else '', late])) or None


def accuracy_picture(found: Mapping, path: Path) -> None:
    """Draws AP against steps: each seed (thin), and the mean of those that ended (thick).

    Raises:
        ValueError: If nothing was evaluated yet.
    """

    def curve(run, name):
        return {point['step']: 100 * point[name] for point in run['curve'] if name in point}

    results = found['results']
    names = [name for name in _COMPARED if any(curve(run, name) for runs in results.values() for run in runs.values())]
    if not names:
        raise ValueError('no training was evaluated yet: there is nothing to draw')
    figure, grid = panels(1, len(names), figsize=(5.5 * len(names), 4))
    handles = []
    for i, (label, runs) in enumerate(results.items()):
        line = dict(color=COLOURS[i % len(COLOURS)], linestyle='-' if i < len(COLOURS) else '--')
        for axes, name in zip(grid[0], names, strict=True):
            for run in runs.values():
                axes.plot(*zip(*curve(run, name).items(), strict=True), linewidth=0.7, alpha=0.5, **line)
            ended = [curve(run, name) for run in _ended(runs).values()]
            common = sorted(set.intersection(*map(set, ended))) if ended else []
            axes.plot(common, [statistics.fmean(c[step] for c in ended) for step in common], linewidth=2, **line)
        handles += grid[0][0].plot([], [], linewidth=2, label=label, **line)
    for axes, name in zip(grid[0], names, strict=True):
        axes.set(title=name, xlabel='step', ylabel='AP points')
        axes.grid(alpha=0.3)
    save_picture(figure, path, legend=handles, columns=8)
