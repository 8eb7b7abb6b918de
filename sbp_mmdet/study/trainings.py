"""Whole trainings of one config, a folder for each setting and seed: run, kept, collected, compared."""

import concurrent.futures
import copy
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config

from ..families import require
from ..provenance import describe_machine
from ..reporting import COLOURS, Column, panels, save_picture, text_table
from .gradients import backbone_with
from .settings import parse_setting

__all__ = ['METRICS', 'Training', 'ap_picture', 'ap_table', 'collect', 'plan', 'read_setting', 'run', 'run_all']

METRICS = {
    f'{kind} AP{size}': f'coco/{key}_mAP{suffix}'
    for kind, key in (('box', 'bbox'), ('mask', 'segm'))
    for size, suffix in (('', ''), (' small', '_s'), (' medium', '_m'), (' large', '_l'))
}


class Training(NamedTuple):
    """One training.

    Args:
        label (str): Of its setting.
        seed (int): Of the training.
        config (Config): Setting and seed are in it.
        folder (Path): Its work directory.
    """

    label: str
    seed: int
    config: Config
    folder: Path


def read_setting(text: str) -> tuple[str, dict | None]:
    """Label and ``sbp_cfg`` of 'label: keep_ratio=0.25'; 'label: none' is the plain backbone, None."""
    label, _, rest = text.partition(':')
    return (label.strip(), None) if rest.strip() == 'none' else parse_setting(text)


def plan(config: Config, settings: dict[str, dict | None], seeds: Sequence[int], work_dir: Path) -> list[Training]:
    """The trainings of a study, seed by seed: one that is stopped has compared something.

    Args:
        config (Config): Of the detector.
        settings (dict): Label to ``sbp_cfg``; None is no SBP.
        seeds (Sequence[int]): The same for each setting: same start, same order of images.
        work_dir (Path): A folder for each training is made in here.

    Returns:
        list[Training]: None has started.

    Raises:
        ValueError: For a setting that cannot be honoured, or a seed that stands twice.
    """
    if len(set(seeds)) < len(seeds):
        raise ValueError(f'seeds {[*seeds]} must differ')
    for sbp_cfg in settings.values():
        backbone_with(config, sbp_cfg)
    return [
        Training(label, seed, _with(config, sbp_cfg, seed), Path(work_dir) / f'{label}-{seed}')
        for seed in seeds
        for label, sbp_cfg in settings.items()
    ]


def _with(config, sbp_cfg, seed):
    config = copy.deepcopy(config)
    config.randomness = dict(config.get('randomness') or {}, seed=seed)
    config.model.backbone.update(type=require(config.model.backbone).backbone, sbp_cfg=sbp_cfg)
    config.custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
    return config


def run(training: Training, command: Sequence[str | Path], threads: int | None = None) -> dict:
    """Trains once, unless the folder has the result of the same training.

    Args:
        training (Training): What to train.
        command (Sequence): Words that a config file and ``--work-dir FOLDER`` are added to.
        threads (int | None): CPU threads; None: as the environment has it. Default: None.

    Returns:
        dict: Of :func:`collect`, and ``machine``.

    Raises:
        RuntimeError: If the training fails; names the log.
    """
    folder, text = training.folder, training.config.pretty_text
    result, file = folder / 'result.json', folder / 'config.py'
    if result.exists() and file.read_text() == text:
        return json.loads(result.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of another config
    file.write_text(text)
    environment = dict(os.environ, **({} if threads is None else dict(OMP_NUM_THREADS=str(threads))))
    with open(folder / 'log.txt', 'w') as log:
        words = [*command, file, '--work-dir', folder]
        if subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode:
            raise RuntimeError(f'a training failed; {log.name} says why')
    scalars = max(folder.glob('*/vis_data/scalars.json'), key=lambda path: path.stat().st_mtime)
    found = dict(machine=describe_machine(), **collect(scalars.read_text().splitlines()))
    whole = result.with_suffix('.part')
    whole.write_text(json.dumps(found))
    whole.replace(result)
    return found


def collect(lines: Sequence[str]) -> dict:
    """What mmengine's log of scalars says of a training.

    Args:
        lines (Sequence[str]): JSON, one entry each.

    Returns:
        dict: ``ap``, the last of each of :data:`METRICS` that was evaluated, by name; ``curve``, all of them, with the
        ``step`` they were evaluated after; ``loss``, pairs of step and loss; ``step_s``, seconds of a step, the median
        of what was logged, and ``memory``, the most MB on a GPU: None where they were not logged.
    """
    curve, loss, seconds, memory, step = [], [], [], [], 0
    for entry in map(json.loads, lines):
        step = entry.get('iter', step)
        if 'loss' in entry:
            loss.append([step, entry['loss']])
            seconds += [entry['time']] if 'time' in entry else []
            memory += [entry['memory']] if 'memory' in entry else []
        # -1 is COCO's word for: there is no such object
        ap = {name: entry[key] for name, key in METRICS.items() if entry.get(key, -1) >= 0}
        curve += [dict(step=step, **ap)] if ap else []
    last = {name: point[name] for point in curve for name in METRICS if name in point}
    middle = statistics.median(seconds) if seconds else None
    return dict(ap=last, curve=curve, loss=loss, step_s=middle, memory=max(memory, default=None))


def run_all(
    trainings: Sequence[Training],
    command: Sequence[str | Path],
    jobs: int = 1,
    threads: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[int, dict]]:
    """Runs trainings, several at a time.

    Args:
        trainings (Sequence[Training]): Of :func:`plan`.
        command (Sequence): See :func:`run`.
        jobs (int): At a time. Default: 1.
        threads (int | None): CPU threads of each. Default: None, as the environment has it.
        done (Callable): Called after each one.

    Returns:
        dict: Label to seed to the result of :func:`run`.

    Raises:
        RuntimeError: If one fails; names setting, seed and log. What runs beside it goes on to its end.
    """
    results = {training.label: {} for training in trainings}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, training, command, threads): training for training in trainings}
        try:
            for job in concurrent.futures.as_completed(running):
                label, seed, *_ = running[job]
                results[label][seed] = job.result()
                done()
        except RuntimeError as error:
            raise RuntimeError(f'{label}, seed {seed}: {error}; trainings beside it go on to their end') from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # also where somebody interrupts: nothing new is started
    return results


def ap_table(results: dict[str, dict]) -> str:
    """Text for a terminal: mean AP of each setting and its range over the seeds."""
    records = [
        dict(name=name, label=label, values=values)
        for name in METRICS
        for label in results
        if (values := _values(results[label], name))
    ]
    columns = [
        Column('', lambda row: row['name']),
        Column('setting', lambda row: row['label']),
        Column('mean', lambda row: f'{statistics.fmean(row["values"]):.3f}'),
        Column('min to max', lambda row: f'{min(row["values"]):.3f} to {max(row["values"]):.3f}'),
        Column('seeds', lambda row: str(len(row['values']))),
    ]
    return text_table(columns, records)


def _values(runs, name):
    return [run['ap'][name] for run in runs.values() if name in run['ap']]


def ap_picture(results: dict[str, dict], path: Path) -> None:
    """Draws losses, mean over the seeds with their range, and the last AP of each training.

    Args:
        results (dict): Of :func:`run_all`.
        path (Path): A PNG file.
    """
    names = ('box AP', 'mask AP')
    figure, grid = panels(1, 1 + len(names), figsize=(12, 4), width_ratios=[2, *[1] * len(names)])
    left, *right = grid[0]
    for i, (label, runs) in enumerate(results.items()):
        colour = COLOURS[i % len(COLOURS)]
        steps = [step for step, _ in next(iter(runs.values()))['loss']]
        columns = list(zip(*([loss for _, loss in run['loss']] for run in runs.values()), strict=True))
        left.plot(steps, [statistics.fmean(c) for c in columns], color=colour, label=label)
        left.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15)
        for axes, name in zip(right, names, strict=True):
            values = _values(runs, name)
            axes.plot([i] * len(values), values, 'o', color=colour, alpha=0.7)
    left.set(xlabel='iteration', ylabel='training loss')
    left.legend()
    for axes, name in zip(right, names, strict=True):
        axes.set(title=f'{name}, one point per seed', xticks=range(len(results)), xlim=(-0.5, len(results) - 0.5))
        axes.set_xticklabels(results, rotation=30)
        axes.grid(axis='y', alpha=0.3)
    save_picture(figure, path, dpi=80)
