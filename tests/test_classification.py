"""Configs for classification are valid, as far as that can be tested without mmpretrain."""

import copy
import re
import subprocess
import sys

import pytest
import torch
from helpers import CONFIGS, make_environment
from mmdet.registry import MODELS
from mmengine.config import Config

import sbp_mmdet  # noqa: F401  registers the backbones

FOLDER = CONFIGS / 'classification'
NAMES = [f'{family}-{arch}' for family in ('vit', 'convnext') for arch in ('tiny', 'base')]
# Appendix "Experimental Settings": stochastic depth without and with SBP.
RATES = {'vit-tiny': (0.0, 0.0), 'vit-base': (0.5, 0.3), 'convnext-tiny': (0.1, 0.1), 'convnext-base': (0.5, 0.3)}
# Table 1: images on a GPU, then memory (MB, here in units of 1024 MB) and accuracy without and with SBP.
PAPER = {
    'vit-tiny': (256, '8.1', '73.68', '5.5', '73.09'),
    'vit-base': (64, '9.8', '81.22', '7.3', '80.62'),
    'convnext-tiny': (128, '11.8', '82.10', '6.9', '81.61'),
    'convnext-base': (64, '13.8', '83.80', '8.6', '83.27'),
}
CHANNELS = {'vit-tiny': 192, 'vit-base': 768, 'convnext-tiny': 768, 'convnext-base': 1024}
# Values of mmpretrain's configs that these configs change.
PARENT = """
model = dict(
    type='ImageClassifier',
    backbone=dict(type='ConvNeXt', arch='{arch}', drop_path_rate={rate}),
    head=dict(type='LinearClsHead', num_classes=1000, in_channels={channels}),
)
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=4e-3), paramwise_cfg=dict(custom_keys=dict()))
"""


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Read a config with made-up stand-ins for mmpretrain's parts."""
    own = Config._get_cfg_path

    def path_of(cfg_path, filename):
        match = re.fullmatch(r'mmpretrain::convnext/convnext-(tiny|base)_32xb128_in1k\.py', cfg_path)
        if not match:
            return own(cfg_path, filename)
        arch = match[1]
        name = f'convnext-{arch}'
        parent = tmp_path / f'{name}.py'
        parent.write_text(PARENT.format(arch=arch, rate=RATES[name][0], channels=CHANNELS[name]))
        return str(parent), 'mmpretrain'

    monkeypatch.setattr(Config, '_get_cfg_path', staticmethod(path_of))
    return lambda name: Config.fromfile(FOLDER / f'{name}_in1k.py')


@pytest.mark.parametrize('name', NAMES)
def test_configs_are_the_papers(load, name):
    plain, sbp = load(name), load(f'sbp-{name}')
    for config, rate in zip((plain, sbp), RATES[name], strict=True):
        with torch.device('meta'):
            backbone = MODELS.build({k: v for k, v in config.model.backbone.items() if k != '_scope_'})
        assert config.model.backbone.drop_path_rate == rate
        channels = backbone.channels if name.startswith('vit') else backbone.channels[-1]
        assert config.model.head.in_channels == CHANNELS[name] == channels
        assert config.train_dataloader.batch_size == PAPER[name][0]
        assert config.custom_imports == dict(imports=['sbp_mmdet'], allow_failed_imports=False)
    a, b = plain.to_dict(), copy.deepcopy(sbp.to_dict())
    assert b['model']['backbone'].pop('sbp_cfg') == dict(preset='sbp')
    assert a['model']['backbone'].pop('drop_path_rate') >= b['model']['backbone'].pop('drop_path_rate')
    assert a == b


@pytest.mark.parametrize('name', NAMES)
def test_readme_gives_the_papers_figures(name):
    _, *figures = PAPER[name]
    rows = (FOLDER / 'README.md').read_text().splitlines()
    for prefix, cells in (('', figures[:2]), ('sbp-', figures[2:])):
        (row,) = (row for row in rows if f'({prefix}{name}_in1k.py)' in row)
        assert [cell.strip() for cell in row.split('|')[2:-1]] == cells


WITH_MMPRETRAIN = """
import sys, types, importlib.machinery
class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (), {})
for name in ('torchvision', 'torchvision.transforms', 'torchvision.transforms.functional',
             'torchvision.transforms.transforms', 'torchvision.ops', 'torchvision.ops.boxes', 'torchvision.utils'):
    try:
        __import__(name)
    except ImportError:
        sys.modules[name] = Stub(name)
        sys.modules[name].__path__ = []
        sys.modules[name].__version__ = '0.0'
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmpretrain.registry import MODELS
import mmpretrain.models
config = Config.fromfile(sys.argv[1])
init_default_scope('mmpretrain')
config.model.backbone.arch = (
    dict(num_layers=2, embed_dims=24, num_heads=3) if 'ViT' in config.model.backbone.type
    else dict(depths=[1, 1, 1, 1], channels=[8, 8, 8, 24]))
config.model.head.update(in_channels=24, num_classes=5)
config.model.train_cfg = None
model = MODELS.build(config.model)
model.init_weights()
from mmpretrain.structures import DataSample
samples = [DataSample().set_gt_label(i % 5) for i in range(4)]
loss = model(torch.randn(4, 3, 64, 64), samples, mode='loss')['loss']
loss.backward()
print('loss', loss.item(), type(model.backbone).__name__, type(model.head).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize('name', [f'{prefix}{name}' for name in NAMES for prefix in ('', 'sbp-')])
def test_with_mmpretrain(name):
    """Where mmpretrain is installed, with or without torchvision, the config is unchanged except for sizes."""
    words = [sys.executable, '-c', WITH_MMPRETRAIN, str(FOLDER / f'{name}_in1k.py')]
    process = subprocess.run([sys.executable, '-c', 'import mmpretrain.version'], env=make_environment(), check=False)
    if process.returncode:
        pytest.skip('mmpretrain is not installed')
    done = subprocess.run(words, env=make_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and 'LinearClsHead' in done.stdout, done.stderr[-2000:]
