"""What stands beside a number: versions, commit, command; and that no published one lacks it."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, run

from sbp_mmdet import __version__, provenance
from sbp_mmdet.provenance import commit, describe_machine, portable

RESULTS = sorted((ROOT / 'docs/results').glob('*.json'))
KEYS = {'date', 'device', 'python', 'torch', 'mmcv', 'mmdet', 'mmengine', 'sbp_mmdet', 'commit', 'dirty', 'command'}
OF_A_MACHINE = re.compile(r'(?<![\w.:/$}~])/(?:work|tmp|root|home|Users|mnt)/')


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (f'python {ROOT}/tools/x.py --json=/mnt/a/b.json', 'python tools/x.py --json=$DATA/b.json'),
        ("'/mnt/my_set/train.json' ['/a/b', '/c/d']", "'$DATA/train.json' ['$DATA/b', '$DATA/d']"),
        ('work_dirs/a/b.pth ../shared/data ~/x/y ./a/b', None),
        ('https://example.org/a/b mmdet::convnext/a.py', None),
        ('1 / 2, AP at 1/2, forward / backward', None),
        ('$DATA/a/b ${X}/a/b', None),
    ],
)
def test_paths(text, expected):
    assert portable(text) == (expected or text)


def test_paths_of_the_working_folder_and_deep_down(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    node = dict(a=[f'{tmp_path}/runs/x.pth', 1, None], b=(dict(c=f'{tmp_path}/y/z.py'),))
    assert portable(node) == dict(a=['runs/x.pth', 1, None], b=[dict(c='y/z.py')])


def test_machine(monkeypatch):
    monkeypatch.setattr(sys, 'argv', [str(ROOT / 'tools/x.py'), '--size', 'a b'])
    found = describe_machine()
    assert set(found) == KEYS
    assert found['command'] == "python tools/x.py --size 'a b'" and found['sbp_mmdet'] == __version__
    assert found['device'].endswith('threads')


def git(folder, *words):
    name = ('-c', 'user.name=x', '-c', 'user.email=x@example.org')
    return subprocess.run(['git', *name, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not shutil.which('git'), reason='no git')
def test_commit(tmp_path, monkeypatch):
    """Of the checkout that holds the package: not of any other one around it, and whether files differ from it."""
    file = tmp_path / 'sbp_mmdet/provenance.py'
    file.parent.mkdir()
    file.write_text('1')
    (tmp_path / 'other').write_text('1')
    monkeypatch.setattr(provenance, 'CHECKOUT', tmp_path)
    monkeypatch.setattr(provenance, '__file__', str(file))

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
    (tmp_path / 'new').write_text('not tracked')
    assert found() == (head, False)
    file.write_text('2')
    assert found() == (head, True)


def test_without_git(tmp_path):
    code = 'from sbp_mmdet.provenance import commit; print(commit())'
    done = run(sys.executable, '-c', code, cwd=tmp_path, PYTHONPATH=ROOT, PATH=tmp_path)
    assert done.stdout.splitlines()[-1] == "{'commit': None, 'dirty': None}"


@pytest.mark.parametrize('file', RESULTS, ids=lambda file: file.stem)
def test_every_result_says_where_it_comes_from(file):
    """Files of the time before commits were written say that they have none."""
    found = json.loads(file.read_text())
    for one in found.get('runs', [found]):
        machine = one['machine']
        assert set(machine) == KEYS
        assert machine['commit'] is None or re.fullmatch('[0-9a-f]{40}', machine['commit'])


def test_no_path_of_a_machine_is_published():
    pages = [*ROOT.glob('*.md'), *(ROOT / 'configs').rglob('*'), *(ROOT / 'docs').rglob('*')]
    pages = [page for page in pages if page.suffix in ('.md', '.json', '.py', '.yml')]
    assert len(pages) > 20
    found = [str(page.relative_to(ROOT)) for page in pages if OF_A_MACHINE.search(page.read_text())]
    assert not found, f'a path of one machine stands in {found}; write it relative to the checkout'
