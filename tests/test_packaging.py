"""What is installed, what it asks for, and what is said where the mm stack is missing."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest
from helpers import ROOT


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Built from a copy: building leaves folders behind."""
    folder = tmp_path_factory.mktemp('source')
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / 'sbp_mmdet', folder / 'sbp_mmdet', ignore=shutil.ignore_patterns('__pycache__'))
    pip = [sys.executable, '-m', 'pip', 'wheel', '.', '--no-deps', '--no-build-isolation', '--no-index', '-w', 'dist']
    subprocess.run(pip, cwd=folder, check=True, capture_output=True)
    (path,) = (folder / 'dist').glob('*.whl')
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_package_and_the_licence(wheel):
    names = [name for name in wheel.namelist() if '.dist-info/' not in name]
    assert sorted(names) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'sbp_mmdet').rglob('*.py'))
    (licence,) = (name for name in wheel.namelist() if name.endswith('LICENSE'))
    assert b'Apache License' in wheel.read(licence)


def test_pip_has_no_reason_to_touch_the_mm_stack(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith('.dist-info/METADATA'))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needs = [need for need in metadata.get_all('Requires-Dist') if 'extra ==' not in need]
    assert [re.split('[<>=]', need)[0] for need in needs] == ['torch']
    assert set(metadata.get_all('Provides-Extra')) >= {'onedl', 'upstream', 'test'}
    assert re.search(r'mmdet\S*; extra == .upstream', '\n'.join(metadata.get_all('Requires-Dist')))


@pytest.mark.parametrize(
    ('present', 'missing'),
    [((), 'needs torch, mmengine, mmcv, mmdet'), (('torch', 'mmengine'), 'needs mmcv, mmdet')],
)
def test_import_without_the_mm_stack_says_how_to_get_it(tmp_path, present, missing):
    for name in present:
        (tmp_path / f'{name}.py').touch()
    code = f'import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import sbp_mmdet'
    # -I and -S: a python without site-packages
    done = subprocess.run([sys.executable, '-I', '-S', '-c', code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith('ImportError: sbp_mmdet ') and missing in last
    assert '.[onedl]' in last and 'tools/setup_env.sh' in last
