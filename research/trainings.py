"""Runs, resumes and collects the trainings of an experiment, in a folder for each label and seed."""

import concurrent.futures
import contextlib
import copy
import datetime
import fcntl
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiment import METRICS, Experiment, configs_of
from mmengine.config import Config
from provenance import commit, describe_machine, write_json

__all__ = ['Launcher', 'Training', 'collect', 'look', 'plan', 'read_log', 'run', 'run_all']

# mmengine writes the config into the folder again, with what the command line and tools/train.py set.
_OF_A_RUN = {'default_hooks', 'env_cfg', 'launcher', 'model_wrapper_cfg', 'resume', 'work_dir'}
_TIME = re.compile(r'^(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) - ', re.MULTILINE)

# The first error of a log; torchrun writes its own traceback below that of a process.
_ERROR = re.compile(r'^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception)|error): .+)$', re.MULTILINE)


class Training(NamedTuple):
    """One training: its label in the experiment, its seed, its config with both, and its work directory."""

    label: str
    seed: int
    config: Config
    folder: Path


class Launcher(NamedTuple):
    """Launcher of training runs, which resume from the last checkpoint in their folder if there is one."""

    tools: Path
    gpus: int = 0
    partition: str = ''

    def command(self, training: Training, file: Path) -> tuple[list, dict]:
        """Return command line and environment variables that train a config file."""
        variables = dict(PORT=_free_port(), PYTHON=sys.executable)
        if self.partition:
            name = re.sub(r'\W+', '-', f'{training.label}-{training.seed}')
            words = ['bash', self.tools / 'slurm_train.sh', self.partition, name, file, training.folder, '--resume']
            return words, dict(variables, GPUS=f'{self.gpus or 1}')
        words = [sys.executable, self.tools / 'train.py', file]
        if self.gpus:
            words = ['bash', self.tools / 'dist_train.sh', file, f'{self.gpus}']
        return [*words, '--work-dir', training.folder, '--resume'], variables


def _free_port():
    """Return a free port for the processes of a training to meet."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return f'{free.getsockname()[1]}'


def plan(
    experiment: Experiment, work_dir: Path, labels: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Training]:
    """List the trainings of an experiment in ``work_dir``, seed by seed, so that a study that stops early can compare.

    Args:
        experiment (Experiment): The experiment.
        work_dir (Path): Folder of its trainings.
        labels (Sequence[str]): Settings to train. If empty, all. Default: ().
        seeds (Sequence[int]): Seeds. If empty, those of the experiment. Default: ().

    Returns:
        list[Training]: The trainings, in order.

    Raises:
        ValueError: For an unknown label, or a folder that holds another training.
    """
    configs = configs_of(experiment, labels or experiment.labels)
    trainings = []
    for seed in seeds or experiment.seeds:
        for label, config in configs.items():
            config = copy.deepcopy(config)
            config.randomness = dict(config.get('randomness') or {}, seed=seed)
            trainings.append(Training(label, seed, config, Path(work_dir) / f'{label}-{seed}'))
            _check_folder(trainings[-1])
    return trainings


def _check_folder(training):
    """Raise an error if a folder contains another training run, because both would be read as one curve."""
    folder = training.folder
    if not (folder / 'result.json').exists() and not any(folder.glob('*/vis_data/scalars.json')):
        return  # nothing was trained yet
    files = [file for file in (*sorted(folder.glob('*/vis_data/config.py')), folder / 'config.py') if file.is_file()]
    if not files:
        raise ValueError(f'{folder} has no config.py, so nothing says what was trained there; copy the whole folder')
    there = Config.fromfile(files[-1], import_custom_modules=False).to_dict()
    wanted = Config.fromstring(training.config.pretty_text, '.py').to_dict()  # as a file gives it back
    passing = _OF_A_RUN | ({'load_from'} if there.get('resume') else set())  # which a resumed run has not
    if different := sorted(key for key in {*there, *wanted} - passing if there.get(key) != wanted.get(key)):
        raise ValueError(
            f'{folder} holds another training: {", ".join(different)} differ; '
            'give another --work-dir, or move the folder away'
        )


def run(training: Training, launcher: Launcher, threads: int | None = None) -> dict:
    """Train with ``threads`` CPU threads (if `None`, as the environment has it), unless the folder has a result.

    Returns:
        dict: Result of :func:`look`; it also stands in ``result.json`` in the folder.

    Raises:
        RuntimeError: If the training fails, or ends without AP; names the log. If another process trains in the folder.
    """
    folder = training.folder
    result, file = folder / 'result.json', folder / 'config.py'
    if result.exists():
        return look(training)
    with _alone(folder) as lock:
        file.write_text(training.config.pretty_text)
        words, variables = launcher.command(training, file)
        if threads is not None:
            variables['OMP_NUM_THREADS'] = f'{threads}'
        # The training holds the lock as well: it may outlive this process.
        options = dict(stderr=subprocess.STDOUT, env=os.environ | variables, pass_fds=[lock.fileno()])
        source = commit()  # what is imported now; somebody may commit while it trains
        with open(folder / 'log.txt', 'a', encoding='utf-8') as log:
            start = log.tell()
            done = subprocess.run(words, stdout=log, **options)
        if done.returncode:
            with open(log.name, encoding='utf-8', errors='replace') as text:
                text.seek(start)
                found = _ERROR.search(text.read())
            raise RuntimeError(f'a training failed{f": {found[1]}" if found else ""}; see {log.name}')
        found = look(training)
        if found is None or not found['finished']:
            raise RuntimeError(
                f'a training logged no AP at its end, see {log.name}; its config needs val_dataloader, val_cfg, '
                'val_evaluator and a LocalVisBackend, and its model at least one box in one evaluation'
            )
        write_json(result, dict(found, machine=describe_machine() | source))
    return found


@contextlib.contextmanager
def _alone(folder):
    """Lock a folder: two trainings in it would become one curve. If the process dies, the system releases the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'lock', 'w', encoding='utf-8') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f'another process trains in {folder}; wait for its end, or give another --work-dir'
            ) from None
        except OSError:
            pass  # a file system without locks
        yield lock


def look(training: Training) -> dict | None:
    """Read the state of a training run from its folder.

    Returns:
        dict | None: Result of :func:`collect`, with ``machine``, ``seconds`` of training and evaluation, and
        ``finished``; ``None`` if nothing was logged.

    Raises:
        ValueError: If the result is damaged.
    """
    result = training.folder / 'result.json'
    try:
        found = json.loads(result.read_text()) if result.exists() else read_log(training.folder)
    except ValueError as error:
        raise ValueError(f'{result} is damaged ({error}); remove it, and it is made again from the logs') from error
    if found is None or not (found['curve'] or found['loss']):
        return None
    loop = training.config.train_cfg
    last = found['curve'][-1]['evaluated'] if found['curve'] else 0
    found['finished'] = last >= loop.get('max_epochs', loop.get('max_iters', 0))
    found.setdefault('machine', dict(commit=None))
    return found


def read_log(folder: Path) -> dict | None:
    """Read mmengine's logs in a work directory; a resumed training run counts as one.

    Returns:
        dict | None: Result of :func:`collect`, with ``seconds``; ``None`` if there is no log.
    """
    entries, seconds = [], 0
    for file in sorted(Path(folder).glob('*/vis_data/scalars.json')):
        new = [*_entries(file.read_text())]
        start = next((entry['iter'] for entry in new if 'iter' in entry), None)
        if start is not None:  # what came after the checkpoint was trained again
            again = (i for i, entry in enumerate(entries) if entry.get('iter', -1) >= start)
            entries = entries[: next(again, len(entries))]
        entries += new
        for log in file.parents[1].glob('*.log'):
            times = [datetime.datetime.strptime(at, '%Y/%m/%d %H:%M:%S') for at in _TIME.findall(log.read_text())]
            seconds += (times[-1] - times[0]).total_seconds() if times else 0
    return dict(collect(entries), seconds=seconds) if entries else None


def _entries(text):
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # the process is writing it, or was killed there


def collect(entries: Iterable[dict]) -> dict:
    """Read what mmengine's log of scalars says of a training.

    Returns:
        dict: ``ap``, the last of each of :data:`METRICS` that was evaluated, by name; ``curve``, all of them, with the
        ``step`` they were evaluated after (in a first epoch the last one that was logged) and ``evaluated``, mmengine's
        own count (epochs, or steps); where no box was found mmdet logs no AP, and it is 0; ``loss``, pairs of step and
        loss; ``step_s``, median seconds of a step, and ``memory``, the most MB on a GPU, None where not logged.
    """
    entries, curve, loss, step = [*entries], {}, [], 0
    begins = {}  # the first logged step of each epoch
    # -1 is COCO's word for: there is no such object.
    evaluated = [name for name, key in METRICS.items() if any(entry.get(key, -1) >= 0 for entry in entries)]
    for entry in entries:
        step = entry.get('iter', step)
        if 'loss' in entry:
            begins.setdefault(entry.get('epoch'), step)
            loss.append([step, entry['loss']])
        elif 'iter' not in entry and evaluated:
            ap = {name: max(entry.get(METRICS[name], 0), 0) for name in evaluated}
            if 'top-1' in ap:
                ap['top-1'] /= 100  # accuracy is logged in percent, AP is not
            point = dict(step=step, evaluated=entry.get('step', step), **ap)
            curve[point['evaluated']] = point  # a second evaluation of the same weights takes the place of the first
    curve = [*curve.values()]
    if None not in begins and len(begins) > 1:  # the last line before an evaluation is not the epoch's last step
        first, last = min(begins), max(begins)
        length = (begins[last] - begins[first]) // (last - first)
        curve = [dict(point, step=length * point['evaluated']) for point in curve]
    seconds = [entry['time'] for entry in entries if 'loss' in entry and 'time' in entry]
    memory = [entry['memory'] for entry in entries if 'loss' in entry and 'memory' in entry]
    return dict(
        ap={name: point[name] for point in curve for name in METRICS if name in point},
        curve=curve,
        loss=loss,
        step_s=statistics.median(seconds) if seconds else None,
        memory=max(memory, default=None),
    )


def run_all(
    trainings: Sequence[Training],
    launcher: Launcher,
    jobs: int = 1,
    threads: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[int, dict]]:
    """Run training runs, ``jobs`` at a time, and call ``done`` after each.

    Returns:
        dict[str, dict[int, dict]]: Results of :func:`run` by label and seed.

    Raises:
        RuntimeError: As soon as a run fails. The other active runs continue to their end, and no new one is started.
    """
    results = {training.label: {} for training in trainings}
    failed = threading.Event()

    def run_next(training):
        """Run a training, unless another has failed: a worker may take the next before the failure is seen below."""
        if failed.is_set():
            return None
        try:
            return run(training, launcher, threads)
        except BaseException:
            failed.set()
            raise

    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    running = {pool.submit(run_next, training): training for training in trainings}
    try:
        for job in concurrent.futures.as_completed(running):
            label, seed, *_ = running[job]
            if (result := job.result()) is not None:
                results[label][seed] = result
                done()
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f'{label}, seed {seed}: {error}; trainings beside it go on to their end') from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # also where somebody interrupts: nothing new is started
    return results
