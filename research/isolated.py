"""Runs cases one by one, each in a process of its own, so that none affects the next."""

import json
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
from provenance import describe_machine, write_json

__all__ = ['KILLED', 'describe_error', 'read_rows', 'run_apart', 'sweep']

KILLED = 'the process was killed: too little memory in this machine'


def describe_error(error: Exception) -> str:
    """Return an error as one line."""
    return f'{type(error).__name__}: {" ".join(str(error).split())[:160]}'


def run_apart(compute: Callable[..., dict], *args, seconds: int) -> dict:
    """Call ``compute`` in a process of its own; return ``error`` if it fails or needs too many CPU seconds."""
    try:
        with ProcessPoolExecutor(1, get_context('fork')) as pool:
            return pool.submit(_computed, compute, args, seconds).result()
    except BrokenProcessPool:
        return dict(error=KILLED)


def _computed(compute, args, seconds):
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of its own time, whoever else runs here
    try:
        return compute(*args)
    except Exception as error:  # whatever a model's own code raises: the next one is tried all the same
        return dict(error=describe_error(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(*_):
    raise TimeoutError('no answer in the time that was given')


def read_rows(file: Path) -> dict[str, dict]:
    """Return the rows of a file, or none if it does not exist."""
    return json.loads(file.read_text(encoding='utf-8'))['rows'] if file.exists() else {}


def sweep(file: Path, names: Iterable[str], compute: Callable[[str], dict], **more) -> dict[str, dict]:
    """Add the rows of some names to a file, which is written after each row. Killed ones are left to the next run."""
    rows = read_rows(file)
    for name in names:
        row = compute(name)
        if row.get('error') != KILLED:
            rows[name] = row
            write_json(file, dict(machine=describe_machine(), **more, rows=rows))
        print(name, row.get('error', ''), flush=True)
    return rows
