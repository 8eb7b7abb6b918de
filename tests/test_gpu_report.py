"""The report of a GPU keeps finished rows however its processes end, and a second call continues it."""

import json
import os
import subprocess
import sys
import tarfile
import time

import pytest
import torch
from helpers import ROOT, TOOLS, environment, run

import benchmark  # isort: skip  (helpers puts tools/ and research/ on the path)
import gpu_parts
import gpu_report
from gpu_parts import Part
from tables import append_line

PYTHON = dict(SBP_PYTHON=sys.executable)
# Stands in for research/benchmark.py: what happens to a preset is its name.
WORKER = """
import json, os, sys, time
cut = sys.argv.index('--lines')
file, presets = sys.argv[cut + 1], sys.argv[1:cut]
open('started', 'a').write(' '.join(presets) + '\\n')
def note(**row):
    with open(file, 'a') as lines:
        lines.write('\\n' + json.dumps(row))
for preset in presets:
    note(preset=preset, state='begun')
    if preset == 'out_of_memory':
        note(preset=preset, reason='out of memory')
        continue
    if preset == 'raises':
        note(preset=preset, reason='a bug')
        raise RuntimeError('a bug')
    if preset == 'hangs':
        time.sleep(100)
    if preset == 'killed':
        open(file, 'a').write('\\n{"preset": "killed", "sec')
        os.kill(os.getpid(), 9)
    note(preset=preset, seconds=0.5)
"""
PRESETS = ('none', 'raises', 'exact', 'out_of_memory', 'hangs', 'int8', 'killed', 'sbp')


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Runs a report of the parts that it is given, as if typed; returns the lines that processes wrote."""
    (tmp_path / 'worker.py').write_text(WORKER)
    monkeypatch.setattr(gpu_report, 'ROOT', tmp_path)

    def typed(parts, *words):
        monkeypatch.setattr(gpu_parts, 'parts_of_report', lambda rehearse: parts)
        monkeypatch.setattr(sys, 'argv', ['tool', '--rehearse', '--out', str(tmp_path / 'out'), *words])
        started = tmp_path / 'started'
        started.unlink(missing_ok=True)
        gpu_report.main()
        return started.read_text().splitlines() if started.exists() else []

    return typed


def part(name='part', seconds=3, presets=PRESETS, **more):
    return Part(name, seconds, ('worker.py {presets} --lines {lines}',), presets, **more)


def test_whatever_ends_a_process_is_a_row_and_the_others_are_measured(report, tmp_path):
    parts = [part(), part('beside', 60, ('none', 'exact'), timed=False)]
    assert report(parts) == [
        'none exact',
        'none raises exact out_of_memory hangs int8 killed sbp',
        'none exact out_of_memory hangs int8 killed sbp',
        'none int8 killed sbp',
        'none sbp',
    ]
    rows, begun = gpu_report.rows_of(parts[0], tmp_path / 'out')
    assert {name: row.get('reason', row.get('seconds')) for name, row in rows.items()} == dict(
        dict.fromkeys(('none', 'exact', 'int8', 'sbp'), 0.5),
        raises='a bug',
        out_of_memory='out of memory',
        hangs='its process ended: too long',
        killed='its process ended: killed by signal 9',
    ) and not begun  # fmt: skip
    page = (tmp_path / 'out/report.md').read_text()
    assert all(f'| `{name}` |' in page for name in PRESETS)
    assert report(parts) == []  # what failed would fail again
    with tarfile.open(tmp_path / 'out.tar.gz') as archive:
        assert {'out/report.md', 'out/part.jsonl', 'out/part.log', 'out/states.jsonl'} <= {*archive.getnames()}
    assert report(parts, '--parts', 'beside') == ['none exact']  # unless it is named


def test_what_was_ended_with_the_report_is_tried_once_more(report, tmp_path):
    """A machine that goes leaves rows, one that was begun, and perhaps half a line."""
    (tmp_path / 'out').mkdir()
    file = tmp_path / 'out/part.jsonl'
    append_line(file, dict(preset='none', seconds=0.5))
    append_line(file, dict(preset='exact', state='begun'))
    file.write_text(file.read_text() + '\n{"preset": "exact", "sec')
    assert report([part(presets=('none', 'exact', 'int8'))]) == ['none exact int8']
    for _ in range(2):
        append_line(file, dict(preset='sbp', state='begun'))
    assert report([part(presets=('none', 'exact', 'int8', 'sbp'))]) == []
    assert '| `sbp` |' in (tmp_path / 'out/report.md').read_text()


def test_what_the_end_would_cut_is_left_to_the_next_call(report, tmp_path, capsys):
    parts = [part('long', 300, ('none',)), part('short', 2, ('none',))]
    assert report(parts, '--minutes', '1') == ['none']
    assert 'run it again for long\n' in capsys.readouterr().out
    assert report(parts, '--minutes', '6') == ['none']


def test_the_page_compares_with_what_was_counted(report, tmp_path):
    (tmp_path / 'docs/results').mkdir(parents=True)
    counted = dict(rows=[dict(variant='none', peak=400), dict(variant='exact', peak=100)])
    (tmp_path / 'docs/results/detector_bytes_x.json').write_text(json.dumps(counted))
    steps = part(presets=('none', 'exact'), counted=('x', 'peak', 'peak_bytes'))
    (tmp_path / 'out').mkdir()
    for name, peak in (('none', 500), ('exact', 110)):
        append_line(tmp_path / 'out/part.jsonl', dict(preset=name, peak_bytes=peak, launches=7))
    log = 'x\nFAILED tests/test_a.py::test_b - ValueError\n1 failed, 3 passed in 2s\n'
    (tmp_path / 'out/test_a.log').write_text(log)
    report([steps, Part('test_a', 1, ())])
    page = (tmp_path / 'out/report.md').read_text()
    assert '| 1.250 |' in page and '| 1.100 |' in page and '| 7 |' in page
    assert '    FAILED tests/test_a.py::test_b - ValueError\n    1 failed, 3 passed in 2s' in page


def test_it_ends_what_it_runs(tmp_path):
    """By SIGTERM, as Slurm sends it: what measures would keep the GPU. Nothing is to blame."""
    (tmp_path / 'worker.py').write_text(
        WORKER.replace('time.sleep(100)', 'print(os.getpid(), flush=True); time.sleep(100)')
    )
    code = (
        'import sys, gpu_parts, gpu_report; from pathlib import Path; '
        'part = gpu_parts.Part("a", 60, ("worker.py none hangs --lines {lines}",), ("none", "hangs")); '
        f'gpu_parts.parts_of_report = lambda rehearse: [part]; gpu_report.ROOT = Path({str(tmp_path)!r}); '
        f'sys.argv = ["tool", "--rehearse", "--out", {str(tmp_path)!r}]; gpu_report.main()'
    )
    paths = os.pathsep.join([str(ROOT), str(TOOLS)])
    report = subprocess.Popen([sys.executable, '-c', code], env=environment(PYTHONPATH=paths))
    log = tmp_path / 'a.log'
    for _ in range(600):
        if log.exists() and log.read_text().endswith('\n'):
            break
        time.sleep(0.1)
    report.terminate()
    assert report.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert 'reason' not in (tmp_path / 'a.jsonl').read_text()


class Understood(Exception):  # noqa: N818
    """Error that a tool raises once it has read its arguments and would begin to measure."""


def test_commands_are_understood(monkeypatch, tmp_path):
    """Options, presets and configs, as if there were a GPU: up to the measurement. No part outlasts ten minutes, and
    those of --quick are expected to take ten together."""

    def measure(*args, **kwargs):
        raise Understood

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(benchmark, 'use_device', str)
    monkeypatch.setattr(benchmark, 'describe_machine', lambda device: {})
    load, known = benchmark.load_config, {}
    monkeypatch.setattr(benchmark, 'load_config', lambda *a: known.get(str(a)) or known.setdefault(str(a), load(*a)))
    for name in ('measure_module', 'measure_steps'):
        monkeypatch.setattr(benchmark, name, measure)
    parts = gpu_parts.parts_of_report(False)
    assert len({p.name for p in parts} | {'states'}) == len(parts) + 1
    assert parts[0].commands[0].startswith('-m sbp_mmdet.plan verify ')
    assert all(2 * p.seconds < 600 for p in parts)
    assert sum(p.seconds for p in parts if p.quick and p.timed) < 400
    for p in (*parts, *gpu_parts.parts_of_report(True)):
        for command in p.commands:
            assert (
                command.startswith(('-m pytest ', '-m sbp_mmdet.plan verify ')) or (ROOT / command.split()[0]).is_file()
            )
    for p in parts:
        if p.presets:
            words = p.commands[0].replace('{presets}', ' '.join(p.presets)).replace('{lines}', str(tmp_path / 'lines'))
            monkeypatch.setattr(sys, 'argv', words.split())
            with pytest.raises(Understood):
                benchmark.main()


def test_rehearsal(tmp_path):
    """Of two parts. `bash tools/gpu_report.sh --rehearse` rehearses all of them."""
    parts = ['training_exact', 'test_ops_rows']
    run('bash', TOOLS / 'gpu_report.sh', '--rehearse', '--out', tmp_path, '--parts', *parts, cwd=ROOT, **PYTHON)
    states = {line['part']: line['state'] for line in gpu_report.lines_of(tmp_path / 'states.jsonl')}
    assert states == dict.fromkeys(parts, 'done')
    page = (tmp_path / 'report.md').read_text()
    assert all(text in page for text in ('tests collected', '    ap: '))


def test_wheels(tmp_path):
    """A folder without any is named; so is an environment that lacks what the report needs."""
    options = dict(cwd=ROOT, check=False, **PYTHON)
    done = run('bash', TOOLS / 'gpu_report.sh', '--wheels', tmp_path, '--out', tmp_path / 'out', **options)
    assert done.returncode == 2 and f'--wheels {tmp_path}/wheels: there are no wheels' in done.stderr
    (tmp_path / 'torch.py').write_text('raise ImportError("no torch here")')
    done = run('bash', TOOLS / 'gpu_report.sh', '--out', tmp_path / 'out', **options, PYTHONPATH=tmp_path)
    assert done.returncode == 2 and 'no torch here' in done.stderr and '--wheels' in done.stderr
