"""Pure Python configs, whose types are classes, as in mmdet/configs: each command takes them as it takes others."""

import sys
from pathlib import Path

import mmdet.registry
import pytest
from helpers import TOOLS, make_project, run_forked
from mmengine.config import Config
from mmengine.registry import Registry

from sbp_mmdet.plan import command

sys.path.insert(0, str(TOOLS))
import preflight  # noqa: E402
from preflight import PreflightError  # noqa: E402

CHILD = 'from mmengine.config import read_base\nwith read_base():\n    from .parent import *\n'
LEAN = f"{CHILD}from sbp_mmdet import LeanHook\ncustom_hooks = [dict(type=LeanHook, preset='exact')]\n"
SWIN = f'{CHILD}from sbp_mmdet import SBPSwinTransformer\nmodel.%s(dict(backbone=dict(%stype=SBPSwinTransformer)))\n'


class Name:
    """A name in a program that is written."""

    def __init__(self, kind: type):
        self.name = kind.__name__

    def __repr__(self):
        return self.name


def write_in_new_style(config: Config, path: Path):
    """Write a config as a program in which every ``type`` is a class that it imports."""
    registries = [value for value in vars(mmdet.registry).values() if isinstance(value, Registry)]
    registries = [registry for registry in registries if registry.scope == 'mmdet']
    imports = set()

    def convert(node):
        if isinstance(node, (list, tuple)):
            return type(node)(map(convert, node))
        if not isinstance(node, dict):
            return node
        node = {key: convert(value) for key, value in node.items()}
        kinds = [found for registry in registries if (found := registry.get(str(node.get('type')))) is not None]
        if isinstance(node.get('type'), str) and kinds:
            imports.add(f'from {kinds[0].__module__} import {kinds[0].__name__}\n')
            node['type'] = Name(kinds[0])
        return node

    values = ''.join(f'{key} = {convert(value)!r}\n' for key, value in config._cfg_dict.to_dict().items())
    path.write_text(''.join(sorted(imports)) + values)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Return a folder with the parent of all configs, a plain detector without a scope."""
    folder = tmp_path_factory.mktemp('new_style')
    config = Config.fromfile(make_project(folder, train=2, val=2))
    config.merge_from_dict({'model.backbone.sbp_cfg': None, 'train_cfg.max_epochs': 1, 'train_cfg.val_interval': 2})
    config.default_scope = None
    del config._cfg_dict['custom_imports']
    write_in_new_style(config, folder / 'parent.py')
    (folder / '__init__.py').touch()
    return folder


@pytest.fixture
def write(folder, monkeypatch):
    """Return a function that writes a config and returns its name in the working directory."""
    monkeypatch.chdir(folder)

    def write(text):
        (folder / 'child.py').write_text(text)
        return 'child.py'

    return write


@pytest.mark.slow
def test_training(write, folder):
    done = run_forked(TOOLS / 'train.py', write(LEAN), cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "LeanHook: preset='exact': " in done.stdout and 'against their own code' in done.stdout


@pytest.mark.slow
def test_a_name_that_cannot_be_imported(write, folder):
    text = LEAN.replace('import LeanHook', 'import LeenHook').replace('type=LeanHook', 'type=LeenHook')
    done = run_forked(TOOLS / 'train.py', write(text), cwd=folder)
    assert done.returncode == 1 and 'Traceback' not in done.stdout, done.stdout[-3000:]
    assert 'error: config file child.py: Failed to import LeenHook from sbp_mmdet in child.py, line 4' in done.stdout


@pytest.mark.parametrize('words', [('report',), ('plan', '--budget', '8GiB'), ('verify',)], ids=str)
def test_commands(words, write, capsys):
    command.main([words[0], write(LEAN), *words[1:]])
    said = capsys.readouterr().out
    assert dict(report='exact, stores less', plan='as it is', verify='against their own code')[words[0]] in said


def check(text, write):
    preflight.check_config(preflight.load_config(write(text)), ('train', 'val'))


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (f"{CHILD}val_evaluator.update(ann_file='none.json')\n", 'val_evaluator.ann_file.*none.json'),
        (
            f'{CHILD}from mmengine.optim import AmpOptimWrapper\noptim_wrapper.update(type=AmpOptimWrapper)\n',
            'AmpOptimWrapper .*needs a GPU',
        ),
        (f'{CHILD}model.backbone.update(depth=50)\n', "model.backbone: .*'depth'; remove it"),
        (SWIN % ('update', '_delete_=True, '), r'write model.merge\(dict\(...\)\)'),
        (SWIN % ('merge', '_delete_=True, '), 'model.neck: in_channels='),
    ],
    ids=['annotations', 'mixed precision', 'argument', 'update', 'merge'],
)
def test_mistakes(text, message, write, monkeypatch):
    monkeypatch.setattr(preflight, 'get_device', lambda: 'cpu')
    check(CHILD, write)
    with pytest.raises(PreflightError, match=message):
        check(text, write)
