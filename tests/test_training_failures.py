"""What the runner of experiments does when a training fails."""

import concurrent.futures
import sys
import time

import pytest
from helpers import RESEARCH  # noqa: F401  puts research/ on the path
from mmengine.config import Config

import trainings  # isort: skip
from trainings import Training, run, run_all

LOG = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 3, in b
[rank0]: KeyError: 3
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED
"""


def test_nothing_is_started_after_a_failure(tmp_path, monkeypatch):
    """A worker takes the next training before its caller sees that one has failed."""
    started = []

    def fail(training, *_):
        started.append(training.seed)
        raise RuntimeError('a training failed')

    late = concurrent.futures.as_completed
    monkeypatch.setattr(trainings, 'run', fail)
    monkeypatch.setattr(concurrent.futures, 'as_completed', lambda jobs: (time.sleep(0.2), late(jobs))[1])
    with pytest.raises(RuntimeError, match='plain, seed 1: a training failed'):
        run_all([Training('plain', seed, None, tmp_path) for seed in (1, 2, 3)], None)
    assert started == [1]


class Fails:
    """Launcher of a training that writes a log and fails."""

    def __init__(self, log):
        self.log = log

    def command(self, *_):
        return [sys.executable, '-c', f'print({self.log!r}); raise SystemExit(1)'], {}


@pytest.mark.parametrize(('log', 'said'), [(LOG, 'failed: KeyError: 3; see '), ('out of luck', 'failed; see ')])
def test_the_first_error_of_a_log_is_told(log, said, tmp_path):
    """The message has the error of the last try, and not that of the launcher, which follows it in the log."""
    (tmp_path / 'log.txt').write_text('ValueError: of an earlier try\n')
    with pytest.raises(RuntimeError, match=said):
        run(Training('plain', 1, Config(), tmp_path), Fails(log))
