"""An answer that nobody reads, a full disk and Ctrl-C end the command without a traceback."""

import json
import multiprocessing as mp
import os
import signal
import sys
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sbp_mmdet.plan import command, report

RETINA = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'


def _run_without_stderr(stdout):
    os.dup2(stdout, 1)
    os.close(2)
    sys.stdout, sys.stderr = open(1, 'w', closefd=False), None
    command.main(['plan', RETINA, '--size', '64x64', '--budget', '9GiB', '--json'])


def _run(stdout, stderr, waits, words):
    """Run the command in a process of its own, whose standard output is a file descriptor."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout, sys.stderr = (open(number, 'w', closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if waits:
        report.build_model = lambda *args: (print('builds', file=sys.stderr, flush=True), time.sleep(60))
    command.main(words)


def run_with(stdout, folder, waits=False, words=('report', RETINA)):
    """Return the exit code of the command and what it wrote to stderr."""
    file = folder / 'stderr'
    with file.open('w') as stderr:
        process = mp.get_context('fork').Process(target=_run, args=(stdout, stderr.fileno(), waits, [*words]))
        process.start()
    end = time.monotonic() + 60
    while waits and process.is_alive() and time.monotonic() < end:
        if 'builds' in file.read_text():
            os.kill(process.pid, signal.SIGINT)
            break
        time.sleep(0.05)
    process.join(60)
    return process.exitcode, file.read_text()


def test_a_pipe_that_nobody_reads(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_with(writing, tmp_path) == (128 + signal.SIGPIPE, '')
    finally:
        os.close(writing)


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='this system has no /dev/full')
@pytest.mark.parametrize(
    'words', [('report', RETINA), ('plan', RETINA, '--size', '64x64', '--budget', '9GiB', '--json')]
)
def test_a_full_disk(words, tmp_path):
    with open('/dev/full', 'w') as full:
        code, said = run_with(full.fileno(), tmp_path, words=words)
    *counts, line = said.splitlines()
    assert code == 2 and line == (
        'sbp-mmdet: error: the answer cannot be written: No space left on device; make room there'
    )
    assert all(one.startswith('counts ') for one in counts)


def test_an_interruption(tmp_path):
    with open(os.devnull, 'w') as nowhere:
        code, said = run_with(nowhere.fileno(), tmp_path, waits=True)
    assert (code, said) == (128 + signal.SIGINT, 'builds\nsbp-mmdet: interrupted\n')


def test_a_process_without_stdout(monkeypatch):
    """The command ends without an error if ``sys.stdout`` is ``None``, as in a process that began with it closed."""
    monkeypatch.setattr(sys, 'stdout', None)
    command.main(['report', RETINA])


def test_a_process_without_stderr(tmp_path):
    file = tmp_path / 'answer'
    with file.open('w') as answer:
        process = mp.get_context('fork').Process(target=_run_without_stderr, args=(answer.fileno(),))
        process.start()
        process.join(60)
    assert process.exitcode == 0 and json.loads(file.read_text())['answer'] == 'none'


def test_warnings_of_checkpointing_in_a_model_of_mmdet(monkeypatch, recwarn):
    """mmdet's Swin does not say which checkpoints it means."""

    def build(*args):
        checkpoint(torch.nn.Identity(), torch.zeros(1, requires_grad=True))
        raise ValueError('built')

    monkeypatch.setattr(report, 'build_model', build)
    with pytest.raises(SystemExit):
        command.main(['report', RETINA])
    assert not [one for one in recwarn if 'use_reentrant' in str(one.message)]
