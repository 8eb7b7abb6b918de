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
    """Of two trainings with the same seed, over seeds.

    Attributes:
        mean (float): Of the differences.
        half (float | None): Half of the interval's width, Student's t at 95 %; None for one seed.
        seeds (int): How many.
    """

    mean: float
    half: float | None
    seeds: int

    @property
    def told(self) -> bool:
        """Whether the interval leaves out 0. With twenty comparisons one does so by chance."""
        return self.half is not None and abs(self.mean) > self.half


def describe(experiment: Experiment) -> dict:
    """What a JSON file of results says of its experiment."""
    settings = experiment.settings or dict.fromkeys(experiment.labels)
    return dict(name=experiment.name, settings=dict(settings), compare=experiment.pairs, reach=dict(experiment.reach))


def _ended(runs):
    return {int(seed): run for seed, run in runs.items() if run['finished']}


def _values(runs, name):
    """Last AP by seed, of trainings that ended; what is None was not measured."""
    return {seed: run['ap'][name] for seed, run in sorted(_ended(runs).items()) if name in run['ap']}


def _course(runs, name):
    """Mean of all evaluations by seed, of trainings that ended: it depends less on the seed than the last one does."""
    curves = {seed: [p[name] for p in run['curve'] if name in p] for seed, run in sorted(_ended(runs).items())}
    return {seed: statistics.fmean(curve) for seed, curve in curves.items() if curve}


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """The difference a - b of values with the same seed.

    Args:
        a (Mapping[int, float]): Seed to value.
        b (Mapping[int, float]): Likewise.

    Returns:
        Difference | None: None if they share no seed.
    """
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
    """Table of a study of AP, in AP points (percent), of the trainings that ended. "mean" is that of all evaluations.

    Args:
        found (Mapping): With ``experiment`` (:func:`describe`) and ``results``: label to seed to training.
        markdown (bool): For a page; otherwise for a terminal, with what has not ended. Default: False.
    """
    if markdown:
        hours = sum(run['seconds'] for runs in found['results'].values() for run in _ended(runs).values()) / 3600
        return f'{markdown_table(*_table(found))}\n\n{hours:.1f} hours of training and evaluation in all.'
    going = [
        f'{label}, seed {seed}: not ended, {run["curve"][-1]["step"] if run["curve"] else 0} steps evaluated'
        for label, runs in found['results'].items()
        for seed, run in runs.items()
        if not run['finished']
    ]
    return '\n'.join([text_table(*_table(found)), *going])


def _table(found):
    results, experiment = found['results'], found['experiment']
    against = {label: base for label, base in experiment['compare']}
    names = [name for name in _SHOWN if any(_values(runs, name) for runs in results.values())]
    records = [
        dict(label=label, values={name: _values(runs, name) for name in names}, runs=_ended(runs))
        for label, runs in results.items()
    ]
    columns = [Column('setting', lambda row: row['label']), Column('seeds', lambda row: f'{len(row["runs"])}')]
    columns += [Column(name, lambda row, name=name: _spread([*row['values'][name].values()])) for name in names]
    compared = [(name, name, _values) for name in _COMPARED if name in names]
    compared += [(f'mean {name}', name, _course) for _, name, _ in compared[:1]]
    for head, name, values in compared:

        def cell(row, name=name, values=values):
            base = against.get(row['label'])
            return base and _difference(paired(values(row['runs'], name), values(results.get(base, {}), name)))

        bases = sorted({*against.values()})
        columns.append(Column(f'{head}, less {bases[0] if len(bases) == 1 else "its pair"}', cell))
    for name, value in experiment['reach'].items():

        def reached(row, name=name, value=value):
            return _reached([steps_to(run, name, value) for run in row['runs'].values()])

        columns.append(Column(f'steps to {name} {100 * value:g}', reached))
    return columns, records


def _spread(values):
    if not values:
        return None
    spread = f' ± {100 * statistics.stdev(values):.1f}' if len(values) > 1 else ''
    return f'{100 * statistics.fmean(values):.1f}{spread}'


def _difference(difference):
    if difference is None:
        return None
    mean, half, _ = difference
    if half is None:
        return f'{100 * mean:+.1f}, one seed'
    interval = f'{100 * mean:+.1f} ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f})'
    return f'**{interval}**' if difference.told else interval


def _reached(steps):
    if not steps:
        return None
    late = steps.count(None)
    mean = f'{statistics.fmean(step for step in steps if step is not None):.0f}' if late < len(steps) else ''
    return ', '.join([*([mean] if mean else []), *([f'{late} of {len(steps)} never'] if late else [])])


def accuracy_picture(found: Mapping, path: Path) -> None:
    """Draws AP against steps, and the difference at each evaluation, mean over seeds with its interval.

    Args:
        found (Mapping): See :func:`accuracy_table`. Trainings that have not ended are thin lines without a mean.
        path (Path): A PNG file.
    """
    results, against = found['results'], dict(found['experiment']['compare'])
    names = [name for name in _COMPARED if any(_curve(run, name) for runs in results.values() for run in runs.values())]
    if not names:
        raise ValueError('no training was evaluated yet: there is nothing to draw')
    figure, grid = panels(1, 1 + len(names), figsize=(4.5 * (1 + len(names)), 4))
    handles = []
    for i, (label, runs) in enumerate(results.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = dict(color=colour, linestyle='-' if i < len(COLOURS) else '--', linewidth=2)
        for axes, name in zip(grid[0], names, strict=False):
            for run in runs.values():
                axes.plot(*zip(*_curve(run, name).items(), strict=True), color=colour, linewidth=0.7, alpha=0.5)
            means = _over_seeds([_curve(run, name) for run in _ended(runs).values()])
            axes.plot([*means], [*means.values()], **line)
        handles += grid[0][0].plot([], [], **line, label=label)
        if label in against:
            _draw_difference(grid[0][-1], runs, results.get(against[label], {}), names[0], line)
    for axes, name in zip(grid[0], names, strict=False):
        axes.set(title=f'{name}: mean of the seeds (thick), each seed (thin)', xlabel='step', ylabel='AP points')
    bases = sorted({*against.values()})
    title = f'{names[0]} less that of {bases[0] if len(bases) == 1 else "its pair"}, 95 % interval'
    grid[0][-1].set(title=title, xlabel='step', ylabel='AP points')
    grid[0][-1].axhline(0, color='black', linewidth=0.7)
    # The interval of two seeds is too wide to be drawn whole: the means say how much is shown.
    heights = [height for line in grid[0][-1].lines for height in line.get_ydata()]
    room = max(map(abs, heights)) or 1
    grid[0][-1].set_ylim(min(heights) - room, max(heights) + room)
    for axes in grid[0]:
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    save_picture(figure, path, legend=handles, columns=8)


def _curve(run, name):
    return {point['step']: 100 * point[name] for point in run['curve'] if name in point}


def _over_seeds(curves):
    """Mean at the steps that all curves have."""
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return {step: statistics.fmean(curve[step] for curve in curves) for step in common}


def _draw_difference(axes, runs, base, name, line):
    ended, base = _ended(runs), _ended(base)
    a = {seed: _curve(run, name) for seed, run in ended.items() if seed in base}
    b = {seed: _curve(base[seed], name) for seed in a}
    points = {}
    for step in _over_seeds([*a.values(), *b.values()]):
        points[step] = paired({s: c[step] for s, c in a.items()}, {s: c[step] for s, c in b.items()})
    axes.plot([*points], [point.mean for point in points.values()], **line)
    sure = {step: point for step, point in points.items() if point.half is not None}
    low, high = ([p.mean + sign * p.half for p in sure.values()] for sign in (-1, 1))
    axes.fill_between([*sure], low, high, color=line['color'], alpha=0.15)
