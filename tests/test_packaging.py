"""The wheel contains what it should, its requirements are right, and a missing mm stack is reported."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import mmdet
import pytest
from helpers import ROOT, make_project, run

import sbp_mmdet
from sbp_mmdet.ops.channel_mlp import channel_mlp
from sbp_mmdet.plan import check, command


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the checkout."""
    folder = tmp_path_factory.mktemp('source')
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'model-index.yml'):
        shutil.copy(ROOT / name, folder)
    for name in ('sbp_mmdet', 'configs', 'tools'):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
    pip = [sys.executable, '-m', 'pip', 'wheel', '.', '--no-deps', '--no-build-isolation', '--no-index', '-w', 'dist']
    subprocess.run(pip, cwd=folder, check=True, capture_output=True)
    (path,) = (folder / 'dist').glob('*.whl')
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_package_and_the_licence(wheel):
    names = {name for name in wheel.namelist() if '.dist-info/' not in name}
    extra = {name.removeprefix('sbp_mmdet/.mim/') for name in names if name.startswith('sbp_mmdet/.mim/')}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / 'sbp_mmdet').rglob('*.py')}
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / 'configs').glob('*/*') if path.is_file()}
    assert names - {f'sbp_mmdet/.mim/{name}' for name in extra} == package
    assert configs | {'model-index.yml', 'tools/train.py', 'tools/slurm_train.sh'} <= extra
    assert not any('quickstart.sh' in name or '__pycache__' in name for name in extra)
    (licence,) = (name for name in wheel.namelist() if name.endswith('LICENSE'))
    assert b'Apache License' in wheel.read(licence)


def test_pip_has_no_reason_to_touch_the_mm_stack(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith('.dist-info/METADATA'))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needs = [need for need in metadata.get_all('Requires-Dist') if 'extra ==' not in need]
    assert [re.split('[<>=]', need)[0] for need in needs] == ['torch']
    assert set(metadata.get_all('Provides-Extra')) >= {'onedl', 'upstream', 'test'}
    assert re.search(r'mmdet\S*; extra == .upstream', '\n'.join(metadata.get_all('Requires-Dist')))


@pytest.fixture(scope='module')
def elsewhere(wheel, tmp_path_factory):
    """Return a project outside of the checkout, and a function that runs code in it with the installed wheel alone."""
    site, folder = tmp_path_factory.mktemp('site'), make_project(tmp_path_factory.mktemp('own')).parent
    wheel.extractall(site)
    return folder, lambda *words: run(sys.executable, *words, cwd=folder, PYTHONPATH=site)


CHILD = "_base_ = __import__('sbp_mmdet').config('sbp_swin/mask-rcnn_sbp-swin-t_fpn_amp-ms-crop-3x_coco.py')\n"
NEW_STYLE = """
from mmengine.config import read_base
with read_base():
    from sbp_mmdet.configs.exact import *
custom_hooks[0].update(preset='int8')
"""
LOOK = """
import sbp_mmdet, sys
from mmengine.config import Config
assert '.mim' in sbp_mmdet.config('nuclei/mask-rcnn_sbp-vit-t_fpn_nuclei.py')
for name in sys.argv[1:]:
    config = Config.fromfile(name)
    kind = config.get('model', {}).get('backbone', {}).get('type')
    print(config.custom_imports.imports, config.get('custom_hooks'), kind)
"""


def test_configs_of_the_wheel_can_be_inherited(elsewhere, monkeypatch):
    folder, python = elsewhere
    (folder / 'child.py').write_text(CHILD)
    (folder / 'new_style.py').write_text(NEW_STYLE)
    said = python('-c', LOOK, 'child.py', 'new_style.py').stdout.splitlines()[-2:]
    assert said[0] == "['sbp_mmdet'] None SBPSwinTransformer"
    assert said[1] == "['sbp_mmdet'] [{'type': 'LeanHook', 'preset': 'int8'}] None"
    with pytest.raises(ValueError, match="config 'no.py' does not exist; choose from .*convnext-tiny_in1k.py"):
        sbp_mmdet.config('no.py')
    monkeypatch.setattr(sbp_mmdet, '__file__', '/there/package.whl/sbp_mmdet/__init__.py')
    with pytest.raises(ValueError, match='no configs beside .*package.whl.*; install the package by pip, not as a zip'):
        sbp_mmdet.config('no.py')


@pytest.mark.slow
def test_a_stock_config_trains_with_one_added_line(elsewhere):
    """A stock config trains with mmdet's own script, as ``mim train mmdet CONFIG`` runs it, on the tests' data."""
    folder, python = elsewhere
    lines = "_base_ = 'tiny.py'\nmodel = dict(backbone=dict(sbp_cfg=None))\ntrain_cfg = dict(max_epochs=1)\n"
    lines += "visualizer = dict(vis_backends=[dict(type='LocalVisBackend')])\n"
    (folder / 'lean.py').write_text(f"{lines}custom_hooks = [dict(type='LeanHook', preset='exact')]\n")
    script = Path(mmdet.__file__).parent / '.mim/tools/train.py'
    done = python(script, 'lean.py', '--launcher', 'none')
    assert "LeanHook: preset='exact': " in done.stderr + done.stdout
    assert 'against their own code' in done.stderr + done.stdout
    (file,) = folder.glob('work_dirs/lean/*/vis_data/scalars.json')
    assert '"lean/stored_mb_before"' in file.read_text().splitlines()[0]


def test_check_has_a_line_for_each_thing(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(['check'])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(('ok', 'FAILED'))]
    assert ended.value.code == 0 and len(lines) == 5 and all(line.startswith('ok ') for line in lines)
    monkeypatch.setattr(
        check, 'packages_distributions', lambda: dict(mmcv=['mmcv', 'onedl-mmcv'], mmengine=['mmengine'])
    )
    monkeypatch.setattr(check, 'version', lambda name: '1.0')
    wrong = 'sbp_mmdet.adapters.bindings.channel_mlp'
    monkeypatch.setattr(wrong, lambda settings, tensors: channel_mlp(settings, tensors) * 1.1)
    with pytest.raises(SystemExit) as ended:
        command.main(['check'])
    said = capsys.readouterr().out
    assert ended.value.code == 1 and 'FAILED  stack: ImportError: mmcv and onedl-mmcv both install mmcv' in said
    assert 'FAILED  verify: ArithmeticError: on cpu' in said and ' 1.0e-01 off' in said


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
