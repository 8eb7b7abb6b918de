"""The report of a GPU: parts, limits, going on where it stopped, and the page; and a rehearsal on a CPU."""

import json
import sys

from helpers import ROOT, TOOLS, run

sys.path[:0] = [str(TOOLS)]
import gpu_report  # noqa: E402
from gpu_report import Part  # noqa: E402


def test_every_part_has_less_than_ten_minutes_and_files_of_its_own():
    for rehearse in (False, True):
        parts = gpu_report.parts_of_report(rehearse)
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            assert 0 < part.minutes < 10
            for script, *_ in part.commands:
                assert script == '-m' or (ROOT / script).is_file()


def typed(monkeypatch, out, *words):
    monkeypatch.setattr(sys, 'argv', ['tool', '--out', str(out), *words])
    gpu_report.main()
    return json.loads((out / 'states.json').read_text())


def test_it_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    flag = tmp_path / 'flag'
    code = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 'not yet')"
    parts = [
        Part('good', 'Good', 1, (('-c', 'print(1)'),)),
        Part('bad', 'Bad', 1, (('-c', code), ('-c', 'print(2)'))),
        Part('slow', 'Slow', 0.02, (('-c', 'import time; time.sleep(60)'),)),
        Part('gpu', 'Of a GPU', 1, (), needs_gpu=True),
    ]
    monkeypatch.setattr(gpu_report, 'parts_of_report', lambda rehearse: parts)
    states = typed(monkeypatch, tmp_path, '--rehearse')
    found = {name: states[name]['state'] for name in ('good', 'bad', 'slow', 'gpu')}
    assert found == dict(good='done', bad='failed', slow='too long', gpu='needs a GPU')
    assert 'run it again for bad, slow' in capsys.readouterr().out
    assert 'not yet' in (tmp_path / 'bad.log').read_text()
    flag.touch()
    good = (tmp_path / 'good.log').stat().st_mtime_ns
    states = typed(monkeypatch, tmp_path, '--rehearse', '--parts', 'good', 'bad')
    assert states['bad']['state'] == 'done' and (tmp_path / 'good.log').stat().st_mtime_ns == good
    assert '## Bad' in (tmp_path / 'report.md').read_text()


def test_rehearsal_of_a_part(tmp_path):
    """The others take the same way; the whole rehearsal is `bash tools/gpu_report.sh --rehearse`."""
    words = '--rehearse', '--out', tmp_path, '--parts', 'backbone_t_fp16'
    run('bash', TOOLS / 'gpu_report.sh', *words, cwd=ROOT, SBP_PYTHON=sys.executable)
    page = (tmp_path / 'report.md').read_text()
    assert '| `recompute` |' in page and '](backbone_t_fp16.png)' in page
