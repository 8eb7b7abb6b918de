"""The report of a GPU: parts, limits, going on where it stopped, and the page; and a rehearsal on a CPU."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from helpers import ROOT, TOOLS, environment, run

import benchmark  # isort: skip  (helpers puts tools/ and research/ on the path)
import gpu_report
from gpu_report import Part

PYTHON = dict(SBP_PYTHON=sys.executable)


def test_every_part_has_less_than_ten_minutes_and_files_of_its_own():
    for rehearse in (False, True):
        parts = gpu_report.parts_of_report(rehearse)
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            assert 0 < part.minutes < 10
            for command in part.commands:
                script = command.split()[0]
                assert script == '-m' or (ROOT / script).is_file()


def typed(monkeypatch, out, *words):
    monkeypatch.setattr(sys, 'argv', ['tool', '--out', str(out), *words])
    gpu_report.main()
    return json.loads((out / 'states.json').read_text())


def test_it_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    flag, script = tmp_path / 'flag', tmp_path / 'bad.py'
    script.write_text(f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 'not yet')")
    parts = [
        Part('good', 'Good', 1, ('-c print(1)',)),
        Part('bad', 'Bad', 1, (f'{script}', '-c print(2)')),
        Part('slow', 'Slow', 0.02, ('-c __import__("time").sleep(60)',)),
        Part('gpu', 'Of a GPU', 1, (), needs_gpu=True),
    ]
    monkeypatch.setattr(gpu_report, 'parts_of_report', lambda rehearse: parts)
    states = typed(monkeypatch, tmp_path, '--rehearse')
    found = {name: states[name]['state'] for name in ('good', 'bad', 'slow', 'gpu')}
    assert found == dict(good='done', bad='failed', slow='too long', gpu='needs a GPU')
    said = capsys.readouterr().out
    assert 'run it again for slow\n' in said and 'failed: bad; their logs say why, and --parts tries' in said
    assert typed(monkeypatch, tmp_path, '--rehearse')['bad'] == states['bad']  # not in every call
    assert 'not yet' in (tmp_path / 'bad.log').read_text()
    flag.touch()
    os.link(tmp_path / 'states.json', tmp_path / 'old')
    good = (tmp_path / 'good.log').stat().st_mtime_ns
    states = typed(monkeypatch, tmp_path, '--rehearse', '--parts', 'good', 'bad')
    assert states['bad']['state'] == 'done' and (tmp_path / 'good.log').stat().st_mtime_ns == good
    assert json.loads((tmp_path / 'old').read_text())['bad']['state'] == 'failed'  # written anew, not in place
    assert '## Bad' in (tmp_path / 'report.md').read_text()


def test_a_part_that_the_end_would_kill_is_left_to_the_next_call(monkeypatch, tmp_path):
    parts = [Part(name, name, minutes, ('-c pass',)) for name, minutes in (('a', 5), ('b', 5), ('c', 0.1))]
    monkeypatch.setattr(gpu_report, 'parts_of_report', lambda rehearse: parts)
    states = typed(monkeypatch, tmp_path, '--rehearse', '--minutes', '1')
    assert {name: state['state'] for name, state in states.items() if name != 'rehearsal'} == dict(a='done', c='done')
    assert 'b' in typed(monkeypatch, tmp_path, '--rehearse', '--minutes', '6')


def test_what_cannot_be_read_leaves_the_page(tmp_path):
    parts = [Part('block', 'Block', 1, ()), *gpu_report.parts_of_report(True)]
    (tmp_path / 'block.json').write_text('{"rows": [')  # killed while it wrote
    folder = tmp_path / 'training_none/1/vis_data'
    folder.mkdir(parents=True)
    line = dict(iter=1, loss=2.5, time=0.5, memory=70)
    (folder / 'scalars.json').write_text(json.dumps(line) + '\n{"iter": 2, "lo')
    (tmp_path / 'tests.log').write_text(
        '....\nFAILED tests/test_vit.py::test_x - ValueError\n1 failed, 3 passed in 2s\n'
    )
    page = gpu_report.write_page(parts, {}, tmp_path).read_text()
    assert 'Its results cannot be read: JSONDecodeError' in page
    assert '| none |  | 2.5 | 0.5 | 70 |' in page
    assert '    FAILED tests/test_vit.py::test_x - ValueError\n    1 failed, 3 passed in 2s' in page


def test_it_ends_what_it_runs(tmp_path):
    """By SIGTERM, as Slurm sends it: what measures would keep the GPU."""
    pid = tmp_path / 'pid'
    wait = tmp_path / 'wait.py'
    wait.write_text(f'import os, time; open({str(pid)!r}, "w").write(str(os.getpid())); time.sleep(100)')
    part = f'gpu_report.Part("a", "A", 1, ({str(wait)!r},))'
    code = (
        f'import sys, gpu_report; gpu_report.parts_of_report = lambda rehearse: [{part}]; '
        f'sys.argv = ["tool", "--rehearse", "--out", {str(tmp_path)!r}]; gpu_report.main()'
    )
    paths = os.pathsep.join([str(ROOT), str(TOOLS)])
    report = subprocess.Popen([sys.executable, '-c', code], env=environment(PYTHONPATH=paths))
    for _ in range(600):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.1)
    report.terminate()
    assert report.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


class Understood(Exception):  # noqa: N818
    """A tool has read its arguments, and would measure now."""


def test_commands_for_a_gpu_are_understood(monkeypatch, tmp_path):
    """Options, presets and configs of what cannot be rehearsed, as if there were a GPU: up to the measurement."""

    def measure(*args, **kwargs):
        raise Understood

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(benchmark, 'use_device', str)
    for name in ('measure_module', 'measure_steps'):
        monkeypatch.setattr(benchmark, name, measure)
    seen = 0
    for part in gpu_report.parts_of_report(False):
        for command in part.commands:
            if command.startswith('research/benchmark.py'):
                monkeypatch.setattr(sys, 'argv', command.replace('{out}', str(tmp_path)).split())
                with pytest.raises(Understood):
                    benchmark.main()
                seen += 1
    assert seen == 11


def test_rehearsal(tmp_path):
    """Of three parts, with the page. `bash tools/gpu_report.sh --rehearse` rehearses all but the caps."""
    parts = ['steps_t', 'training', 'tests']
    run('bash', TOOLS / 'gpu_report.sh', '--rehearse', '--out', tmp_path, '--parts', *parts, cwd=ROOT, **PYTHON)
    states = json.loads((tmp_path / 'states.json').read_text())
    assert {name: states[name]['state'] for name in parts} == dict.fromkeys(parts, 'done')
    page = (tmp_path / 'report.md').read_text()
    assert all(text in page for text in ('tests collected', '| `exact` |', '| none | ', '| paper | '))


def test_wheels(tmp_path):
    """A folder without any is named; so is an environment that lacks what the report needs."""
    options = dict(cwd=ROOT, check=False, **PYTHON)
    done = run('bash', TOOLS / 'gpu_report.sh', '--wheels', tmp_path, '--out', tmp_path / 'out', **options)
    assert done.returncode == 2 and f'--wheels {tmp_path}/wheels: there are no wheels' in done.stderr
    (tmp_path / 'torch.py').write_text('raise ImportError("no torch here")')
    done = run('bash', TOOLS / 'gpu_report.sh', '--out', tmp_path / 'out', **options, PYTHONPATH=tmp_path)
    assert done.returncode == 2 and 'no torch here' in done.stderr and '--wheels' in done.stderr
