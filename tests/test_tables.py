"""Tables, result files, and the description of the machine that stands beside each published number."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

import provenance  # isort: skip  (helpers puts research/ on the path)
import tables  # isort: skip
from provenance import commit, describe_machine, output_file, portable, write_json  # isort: skip

from sbp_mmdet import __version__
from sbp_mmdet.plan.tables import Column, format_table

RESULTS = sorted((ROOT / 'docs/results').glob('*.json'))
KEYS = {'date', 'device', 'python', 'torch', 'mmcv', 'mmdet', 'mmengine', 'sbp_mmdet', 'commit', 'dirty', 'command'}
OF_A_MACHINE = re.compile(r'(?<![\w.:/$}~])/(?:work|tmp|root|home|Users|mnt)/')


def test_tables():
    columns = [Column('name', lambda row: row['name']), Column('AP', lambda row: row.get('ap') and f'{row["ap"]:.3f}')]
    records = [dict(name='none', ap=0.25), dict(name='nothing yet')]
    assert format_table(columns, records).splitlines() == ['name            AP', 'none         0.250', 'nothing yet']
    expected = ['| name | AP |', '|---|---|', '| none | 0.250 |', '| nothing yet |  |']
    assert tables.markdown_table(columns, records).splitlines() == expected


def test_what_cannot_be_written_is_refused(tmp_path):
    assert output_file(f'{tmp_path}/new/out.json') == tmp_path / 'new/out.json'
    (tmp_path / 'file').touch()
    for bad, message in ((tmp_path, 'is a folder'), (tmp_path / 'file/out.json', 'is no folder to write in')):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            output_file(str(bad))


def test_an_old_file_is_never_half_written(tmp_path):
    """A hard link to the old file shows what another process would read during the write."""
    file, old = tmp_path / 'new/out.json', tmp_path / 'old'
    write_json(file, dict(a=1))
    os.link(file, old)
    write_json(file, dict(a=f'{ROOT}/configs/a.py', b=['/mnt/disks/shelf/epoch_1.pth']))
    assert json.loads(old.read_text()) == dict(a=1)
    assert json.loads(file.read_text()) == dict(a='configs/a.py', b=['$DATA/epoch_1.pth'])
    assert os.listdir(tmp_path / 'new') == ['out.json']


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (f'python {ROOT}/tools/x.py --json=/mnt/a/b.json', 'python tools/x.py --json=$DATA/b.json'),
        ("'/mnt/my_set/train.json' ['/a/b', '/c/d']", "'$DATA/train.json' ['$DATA/b', '$DATA/d']"),
        ('work_dirs/a/b.pth ../shared/data ~/x/y ./a/b', None),
        ('https://example.org/a/b mmdet::convnext/a.py', None),
        ('1 / 2, AP at 1/2, forward / backward, $DATA/a/b ${X}/a/b', None),
    ],
)
def test_paths(text, expected):
    assert portable(text) == (expected or text)


def test_machine(monkeypatch):
    monkeypatch.setattr(sys, 'argv', [str(ROOT / 'tools/x.py'), '--size', 'a b'])
    machine = describe_machine()
    assert set(machine) == KEYS
    assert machine['command'] == "python tools/x.py --size 'a b'" and machine['sbp_mmdet'] == __version__


def git(folder, *words):
    name = ('-c', 'user.name=x', '-c', 'user.email=x@example.org')
    return subprocess.run(['git', *name, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not shutil.which('git'), reason='no git')
def test_commit(tmp_path, monkeypatch):
    """The commit is that of the checkout that contains the package, and it is marked if files differ from it."""
    file = tmp_path / 'tables.py'
    file.write_text('1')
    (tmp_path / 'other').write_text('1')
    monkeypatch.setattr(provenance, 'CHECKOUT', tmp_path)
    monkeypatch.setattr(provenance, 'PACKAGE', file)

    def found():
        return commit()['commit'], commit()['dirty']

    assert found() == (None, None)
    git(tmp_path, 'init', '-q')
    git(tmp_path, 'add', 'other')
    git(tmp_path, 'commit', '-qm', 'somebody else')
    assert found() == (None, None)
    git(tmp_path, 'add', '.')
    git(tmp_path, 'commit', '-qm', 'the package')
    head = git(tmp_path, 'rev-parse', 'HEAD')
    assert found() == (head, False)
    file.write_text('2')
    assert found() == (head, True)
    monkeypatch.setenv('PATH', str(tmp_path))  # no git
    monkeypatch.setenv('SBP_COMMIT', 'abc')
    assert found() == ('abc', None)


@pytest.mark.parametrize('file', RESULTS, ids=lambda file: file.stem)
def test_every_result_says_where_it_comes_from(file):
    """Files that are older than this rule say that they have no commit."""
    results = json.loads(file.read_text())
    for one in results.get('runs', [results]):
        assert set(one['machine']) in (KEYS, KEYS | {'driver', 'cuda', 'cudnn'})  # on a CPU, on a GPU
        assert one['machine']['commit'] is None or re.fullmatch('[0-9a-f]{40}', one['machine']['commit'])


def test_no_path_of_a_machine_is_published():
    pages = [*ROOT.glob('*.md'), *(ROOT / 'configs').rglob('*'), *(ROOT / 'docs').rglob('*')]
    pages = [page for page in pages if page.suffix in ('.md', '.json', '.py', '.yml')]
    found = [str(page.relative_to(ROOT)) for page in pages if OF_A_MACHINE.search(page.read_text())]
    assert len(pages) > 20 and not found, f'a path of one machine stands in {found}'


def test_benchmark_table():
    row = dict(preset='none', saved_bytes=400e6, peak_bytes=1e9, seconds=2.0, ratio=1.0, ratio_min=1.0, ratio_max=1.0)
    rows = [
        row,
        dict(row, preset='exact', saved_bytes=100e6, ratio=1.23, error=0.01),
        dict(preset='x', reason='no compiler'),
    ]
    lines = tables.benchmark_table(rows, markdown=True).splitlines()
    assert lines[-2] == '| `exact` | 100 MB | 0.250 | 1.00 GB | 1.000 | 2 | 1.23 | 1.00 to 1.00 | 1.0e-02 |  |'
    assert lines[-1] == '| `x` |  |  |  |  |  |  |  |  | no compiler |'
