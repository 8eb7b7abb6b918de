"""The report of a GPU keeps finished rows however its processes end, and a second call continues it."""

import json
import os
import subprocess
import sys
import tarfile
import time
import types

import pytest
from helpers import ROOT, TOOLS, ForkedProcess, make_environment, run

import case  # isort: skip  (helpers puts tools/ and research/ on the path)
import gpu_estimates
import gpu_parts
import gpu_report
import gpu_trials
import gpu_worker
from gpu_parts import Part
from gpu_rows import lines_of, read_rows
from gpu_trials import Trial
from memory_overview import DETECTORS
from tables import append_line

PYTHON = dict(SBP_PYTHON=sys.executable)
# Stands in for tools/gpu_worker.py: what happens to a row is the name of its preset.
WORKER = """
import json, os, sys, time
cut = sys.argv.index('--lines')
file, rows = sys.argv[cut + 1], sys.argv[1:cut]
open('started', 'a').write(' '.join(row.split('/')[1] for row in rows) + '\\n')
def note(**found):
    with open(file, 'a') as lines:
        lines.write('\\n' + json.dumps(found))
for row in rows:
    preset = row.split('/')[1]
    note(row=row, preset=preset, state='begun')
    if preset == 'out_of_memory':
        note(row=row, preset=preset, reason='out of memory')
        continue
    if preset == 'raises':
        note(row=row, preset=preset, reason='a bug')
        raise RuntimeError('a bug')
    if preset == 'hangs':
        time.sleep(100)
    if preset == 'killed':
        open(file, 'a').write('\\n{"row": "a trial/killed", "sec')
        os.kill(os.getpid(), 9)
    note(row=row, preset=preset, seconds=0.5)
"""
PRESETS = ('none', 'raises', 'exact', 'out_of_memory', 'hangs', 'int8', 'killed', 'sbp')


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Return a function that runs a report of given parts, as on the command line, and returns the presets of each
    process."""
    (tmp_path / 'worker.py').write_text(WORKER)
    for module in (gpu_report, gpu_estimates):
        monkeypatch.setattr(module, 'ROOT', tmp_path)

    def typed(parts, *words):
        monkeypatch.setattr(gpu_parts, 'parts_of_report', lambda rehearse: parts)
        monkeypatch.setattr(sys, 'argv', ['tool', '--rehearse', '--out', str(tmp_path / 'out'), *words])
        started = tmp_path / 'started'
        started.unlink(missing_ok=True)
        gpu_report.main()
        return started.read_text().splitlines() if started.exists() else []

    return typed


def make_part(name='part', seconds=2, presets=PRESETS, **more):
    trials = more.pop('trials', (Trial('a trial', '', presets),))
    return Part(name, seconds, ('worker.py {rows} --lines {lines}',), 'steps', trials, **more)


def test_whatever_ends_a_process_is_a_row_and_the_others_are_measured(report, tmp_path):
    parts = [make_part()]
    assert report(parts) == [
        'none raises exact out_of_memory hangs int8 killed sbp',
        'none exact out_of_memory hangs int8 killed sbp',
        'none int8 killed sbp',
        'none sbp',
    ]
    rows, begun = read_rows(parts[0], tmp_path / 'out')
    assert {row['preset']: row.get('reason', row.get('seconds')) for row in rows.values()} == dict(
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
    assert report([*parts, make_part('other', presets=('none', 'exact'))], '--parts', 'other') == ['none exact']
    assert report(parts, '--parts', 'part')[0].startswith('none raises')  # unless it is named


def test_each_trial_has_its_baseline(report, tmp_path):
    """Missing rows are measured together with the first row of their own trial that ran."""
    trials = (Trial('a', '', ('none', 'exact')), Trial('b', '', ('none', 'exact', 'int8')), Trial('c', '', ('none',)))
    (tmp_path / 'out').mkdir()
    for row in ('a/none', 'a/exact', 'b/exact', 'c/none'):
        append_line(tmp_path / 'out/part.jsonl', dict(row=row, preset=row[2:], seconds=0.5))
    append_line(tmp_path / 'out/part.jsonl', dict(row='b/none', preset='none', reason='out of memory'))
    assert report([make_part(trials=trials)]) == ['exact int8']


def test_what_was_ended_with_the_report_is_tried_once_more(report, tmp_path):
    """A machine that disappears leaves finished rows, an unfinished one, and perhaps half a line."""
    (tmp_path / 'out').mkdir()
    file = tmp_path / 'out/part.jsonl'
    append_line(file, dict(row='a trial/none', preset='none', seconds=0.5))
    append_line(file, dict(row='a trial/exact', preset='exact', state='begun'))
    file.write_text(file.read_text() + '\n{"row": "a trial/exact", "sec')
    assert report([make_part(presets=('none', 'exact', 'int8'))]) == ['none exact int8']
    for _ in range(2):
        append_line(file, dict(row='a trial/sbp', preset='sbp', state='begun'))
    assert report([make_part(presets=('none', 'exact', 'int8', 'sbp'))]) == []
    assert '| `sbp` |' in (tmp_path / 'out/report.md').read_text()


def test_the_end_of_the_report_is_no_fault_of_a_row(report, tmp_path):
    parts = [make_part(presets=('none', 'hangs'), seconds=1.5)]
    report(parts, '--minutes', str(2.5 / 60))
    assert read_rows(parts[0], tmp_path / 'out')[1]['a trial/hangs'] == 1
    assert report(parts) == ['none hangs']
    assert read_rows(parts[0], tmp_path / 'out')[0]['a trial/hangs']['reason'] == 'its process ended: too long'


def test_what_the_end_would_cut_is_left_to_the_next_call(report, tmp_path, capsys):
    parts = [make_part('long', 300, ('none',)), make_part('short', 2, ('none',))]
    assert report(parts, '--minutes', '1') == ['none']
    assert 'run it again for long\n' in capsys.readouterr().out
    assert 'Not measured yet: long.' in (tmp_path / 'out/report.md').read_text()
    assert report(parts, '--minutes', '6') == ['none']


def test_the_page_says_which_estimates_were_wrong(report, tmp_path):
    (tmp_path / 'docs/results').mkdir(parents=True)
    rows = [dict(detector='D', variant=name, peak=peak, needs=2 * peak) for name, peak in (('none', 4), ('exact', 1))]
    rows = [dict(row, peak=row['peak'] * 1e9, needs=row['needs'] * 1e9) for row in rows]
    counted = dict(runs=[dict(kind='measure', rows=[]), dict(kind='count', rows=rows)])
    (tmp_path / 'docs/results/memory_overview.json').write_text(json.dumps(counted))
    cpu = dict(rows=[dict(preset='none', ratio=1.0), dict(preset='exact', ratio=0.8)])
    (tmp_path / 'docs/results/time_t.json').write_text(json.dumps(cpu))
    trials = (
        Trial('steps', '', ('none', 'exact'), counted='D', times='t'),
        Trial('capped', '', ('none',), cap=5, counted='D'),
    )
    (tmp_path / 'out').mkdir()
    for row, found in {
        'steps/none': dict(peak_bytes=4.1e9, reserved=5e9, context=1e9, replayed=4.9e9, ratio=1.0),
        'steps/exact': dict(peak_bytes=3e9, reserved=3.2e9, context=0.9e9, replayed=3.1e9, ratio=1.2),
        'capped/none': dict(seconds=1.0),
    }.items():
        append_line(tmp_path / 'out/part.jsonl', dict(found, row=row, preset=row.split('/')[1], launches=7))
    (tmp_path / 'out/test_a.log').write_text(
        'x\nFAILED tests/test_a.py::test_b - ValueError\n1 failed, 3 passed in 2s\n'
    )
    report([make_part(trials=trials), Part('test_a', 1, ('-c pass',))])
    page, _, wrong = (tmp_path / 'out/report.md').read_text().partition('## Estimates that were wrong')
    assert '    FAILED tests/test_a.py::test_b - ValueError\n    1 failed, 3 passed in 2s' in page
    assert '| 4.10 GB | 1.000 | 4.00 GB |' in page and '| 7 |' in page
    assert '- peak, counted: 1 of 2 were right.' in wrong
    assert '- reserved, by the model of the allocator: 2 of 2 were right.' in wrong
    table = [line.strip('| ').split(' | ') for line in wrong.splitlines() if line.startswith('| ')][1:]
    assert [(what, trial, ratio) for what, trial, *_, ratio in table] == [
        ('peak, counted', 'steps', '3.00'),
        ('`needs` of the planner, reserved and context', 'steps', '2.05'),
        ('time, by a CPU', 'steps', '1.50'),
        ('fits into the cap: `needs` without context', 'capped', '0.73'),
        ('`needs` of the planner, reserved and context', 'steps', '0.75'),
    ]
    (tmp_path / 'docs/results/memory_overview.json').write_text('{')  # what is missing ends no report
    report([make_part(trials=trials)])
    assert 'counted' not in (tmp_path / 'out/report.md').read_text().partition('time, by a CPU')[0]


def test_it_ends_what_it_runs(tmp_path):
    """On SIGTERM, which Slurm sends, the report stops the measuring process, which would otherwise keep the GPU."""
    (tmp_path / 'worker.py').write_text(
        WORKER.replace('time.sleep(100)', 'print(os.getpid(), flush=True); time.sleep(100)')
    )
    code = (
        'import sys, gpu_parts, gpu_report; from pathlib import Path; '
        'trials = (gpu_parts.Trial("a", "", ("none", "hangs")),); '
        'part = gpu_parts.Part("a", 60, ("worker.py a/none a/hangs --lines {lines}",), "steps", trials); '
        f'gpu_parts.parts_of_report = lambda rehearse: [part]; gpu_report.ROOT = Path({str(tmp_path)!r}); '
        f'sys.argv = ["tool", "--rehearse", "--out", {str(tmp_path)!r}]; gpu_report.main()'
    )
    paths = os.pathsep.join([str(ROOT), str(TOOLS)])
    report = subprocess.Popen([sys.executable, '-c', code], env=make_environment(PYTHONPATH=paths))
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


@pytest.mark.parametrize('rehearse', [True, False])
def test_parts(rehearse, monkeypatch, tmp_path):
    """Files, configs, presets and baselines exist, and the most important parts should fit into ten minutes."""
    load, known, begun = gpu_worker.load_config, {}, []
    parts = gpu_parts.parts_of_report(rehearse)
    assert len({p.name for p in parts} | {'states'}) == len(parts) + 1
    first = [p for p in parts[: [p.name for p in parts].index('blocks')] if p.timed]
    assert all(p.quick for p in first) and (rehearse or sum(p.seconds * len(p.trials) for p in first) <= 465)
    monkeypatch.setattr(gpu_worker, 'load_config', lambda *a: known.get(str(a)) or known.setdefault(str(a), load(*a)))
    for kind in gpu_worker.KINDS:
        monkeypatch.setitem(
            gpu_worker.KINDS, kind, lambda trial, config, names, *a: begun.append((trial, config, names))
        )
    for p in parts:
        for command in p.commands:
            words = command.split()
            assert command.startswith('-m pytest ') or (ROOT / words[0]).is_file()
            assert all((ROOT / word).is_file() for word in words if word.startswith('tests/'))
        assert len({*p.rows}) == len(p.rows)
        gpu_worker.measure_part(p, p.rows, float('inf'), 'cpu', pytest.fail)
    assert [trial for trial, *_ in begun] == [trial for p in parts for trial in p.trials]
    heads = {detector.head: detector for detector in DETECTORS}
    issued = {row['model'] for row in json.loads((ROOT / 'docs/results/issue_time.json').read_text())['rows']}
    for trial, config, names in begun:
        assert names == [*trial.presets]
        assert not config or [case.parse_name(name) for name in names if name != 'SyncBN']
        assert not trial.times or (ROOT / f'docs/results/time_{trial.times}.json').is_file(), trial.times
        assert not trial.issue or trial.issue in issued
        if trial.counted and not rehearse:
            counted = heads[trial.counted]
            assert (counted.config, counted.batch, counted.size) == (trial.config, trial.batch, trial.size)


def test_a_worker_leaves_what_does_not_fit(monkeypatch):
    """A worker begins no trial that the deadline would cut. If a detector cannot be built, the others still run."""
    found = []

    def measure(trial, config, names, device, note):
        if trial.name == 'b':
            raise ValueError('no such detector\nmore')
        for name in names:
            note(dict(preset=name, seconds=1.0))

    monkeypatch.setitem(gpu_worker.KINDS, 'steps', measure)
    trials = tuple(Trial(name, '', ('none', 'exact')) for name in 'abc')
    gpu_worker.measure_part(
        make_part(trials=trials), ['a/none', 'b/none', 'b/exact', 'c/exact'], float('inf'), 'cpu', found.append
    )
    assert [(row['row'], row.get('reason')) for row in found] == [
        ('a/none', None),
        ('b/none', 'no such detector'),
        ('b/exact', 'no such detector'),
        ('c/exact', None),
    ]
    gpu_worker.measure_part(make_part(trials=trials), ['a/none'], time.monotonic() + 1, 'cpu', pytest.fail)


@pytest.fixture
def rehearse(monkeypatch, tmp_path):
    """Return a function that runs the rehearsal of a report whose processes are forks, and returns its page."""
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    forking = types.SimpleNamespace(**vars(subprocess) | dict(Popen=ForkedProcess))
    monkeypatch.setattr(gpu_report, 'subprocess', forking)
    gpu_worker.load_config(gpu_trials.SHAPES)  # so that forks need not read all of MMDetection's metafiles

    def typed(*words):
        monkeypatch.setattr(sys, 'argv', ['tool', '--rehearse', '--minutes', '20', '--out', str(tmp_path), *words])
        gpu_report.main()
        return (tmp_path / 'report.md').read_text()

    return typed


@pytest.mark.slow
def test_rehearsal(rehearse, tmp_path):
    """The whole quick report runs with tiny sizes."""
    page = rehearse('--quick')
    parts = [p for p in gpu_parts.parts_of_report(True) if p.quick]
    states = {line['part']: line['state'] for line in lines_of(tmp_path / 'states.jsonl')}
    assert states == dict.fromkeys([p.name for p in parts], 'done')
    for p in parts:
        rows, begun = read_rows(p, tmp_path)
        assert [*rows] == [*p.rows] and not begun
        assert not [row for row in rows.values() if 'reason' in row]
    assert all(f'**{trial.name}**' in page for p in parts for trial in p.trials)
    assert page.count('tests collected') == 2 and '- time, by a CPU: ' in page and 'cannot be read' not in page


@pytest.mark.slow
def test_rehearsal_of_a_training(rehearse):
    assert '    ap: ' in rehearse('--parts', 'training_exact')


def test_script(tmp_path):
    """The script checks the environment and starts the report with its own arguments, without its options."""
    python = tmp_path / 'python'
    python.write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    python.chmod(0o755)
    words = ('--rehearse', '--parts', 'sync_bn', '--out', tmp_path / 'new/out')
    run('bash', TOOLS / 'gpu_report.sh', *words, cwd=tmp_path, SBP_PYTHON=python, CALLS=tmp_path / 'calls')
    checks, _, report = (tmp_path / 'calls').read_text().partition('tools/gpu_report.py ')
    assert 'import torch, mmcv.ops, mmdet.apis, sbp_mmdet' in checks
    for code in checks.split('-c ')[1:]:
        compile(code, 'gpu_report.sh', 'exec')
    assert report == f'--out {tmp_path}/new/out --rehearse --parts sync_bn\n'


def test_wheels(tmp_path):
    """An empty folder is reported, and so is an environment that lacks a package that the report needs."""
    options = dict(cwd=ROOT, check=False, **PYTHON)
    done = run('bash', TOOLS / 'gpu_report.sh', '--wheels', tmp_path, '--out', tmp_path / 'out', **options)
    assert done.returncode == 2 and f'--wheels {tmp_path}/wheels: there are no wheels' in done.stderr
    (tmp_path / 'torch.py').write_text('raise ImportError("no torch here")')
    done = run('bash', TOOLS / 'gpu_report.sh', '--out', tmp_path / 'out', **options, PYTHONPATH=tmp_path)
    assert done.returncode == 2 and 'no torch here' in done.stderr and '--wheels' in done.stderr
