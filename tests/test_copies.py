"""Copies of mmdet's classes in other projects are recognised by their code."""

import copy
import importlib
import inspect
import sys

import pytest
import torch
from mmdet.models.backbones import hrnet, regnet, resnet, resnext, swin
from oracles import DEVICE, assert_near, compute_loss, randomize
from torch import nn

from sbp_mmdet import apply_lean

NARROW = dict(base_channels=8, stem_channels=8, norm_eval=False)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Return a function that writes a module of mmdet under another name, with changes, and imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source, name, *changes):
        text = inspect.getsource(source)
        own = (('@MODELS.register_module()\n', ''), ('from ..layers ', 'from mmdet.models.layers '))
        for old, new in own:
            text = text.replace(old, new)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        folders = name.split('.')[:-1]
        for i in range(1, len(folders) + 1):
            tmp_path.joinpath(*folders[:i]).mkdir(exist_ok=True)
            tmp_path.joinpath(*folders[:i], '__init__.py').touch()
        tmp_path.joinpath(*name.split('.')).with_suffix('.py').write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in [name for name in sys.modules if name.partition('.')[0] in ('mmpretrain', 'mmseg', 'mmpose')]:
        del sys.modules[name]


# What mmpretrain's blocks have and mmdet's have not.
DEPTH = ('            out += identity\n', '            out = self.drop_path(out)\n            out += identity\n')
HOLDER = ('self.downsample = downsample\n', 'self.downsample = downsample; self.drop_path = nn.Identity()\n')
DOUBLED = ('            out += identity\n', '            out += 2 * identity\n')
SHIFTED_PROPERTY = ('getattr(self, self.norm1_name)', 'getattr(self, self.norm1_name) if self.training else nn.ReLU()')


def run_step(module, x):
    outs, leaves = module(x), {'input': x, **{n: p for n, p in module.named_parameters() if p.requires_grad}}
    gradients = torch.autograd.grad(compute_loss(outs), [*leaves.values()])
    return {f'output {i}': o.detach() for i, o in enumerate(outs)} | dict(zip(leaves, gradients, strict=True))


def assert_exact(module, size=64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()
    lean = copy.deepcopy(module)
    report = apply_lean(lean, verify=False)
    assert_near(run_step(lean, x), run_step(module, x), 1e-10)
    return report


@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.parametrize('project', ['mmpretrain', 'mmseg', 'mmpose'])
def test_a_resnet_of_another_project_is_changed_as_mmdets(copied, project, depth):
    changes = (DEPTH, HOLDER) if project == 'mmpretrain' else ()
    kind = copied(resnet, f'{project}.models.backbones.resnet', *changes).ResNet
    report = assert_exact(randomize(kind(depth, **NARROW)))
    expected = apply_lean(resnet.ResNet(depth, **NARROW), verify=False)
    assert [*report.changed] == [*expected.changed] and {'', 'layer1', 'layer4'} <= {*report.changed}


def test_stochastic_depth_in_a_copy_runs_its_own_code(copied):
    kind = copied(resnet, 'mmpretrain.models.backbones.resnet', DEPTH, HOLDER).ResNet
    backbone, found = randomize(kind(18, **NARROW)), []
    backbone.layer2[1].drop_path = nn.Dropout(0.5)
    lean = copy.deepcopy(backbone)
    report = apply_lean(lean, verify=False)
    assert 'drop_path' in report.left['layer2.1'] and 'layer2.0' not in report.left
    for model in (lean, backbone):
        torch.manual_seed(0)
        found.append(run_step(model, torch.ones(2, 3, 64, 64, dtype=torch.float64, device=DEVICE, requires_grad=True)))
    assert_near(*found, 1e-10)


@pytest.mark.parametrize('change', [DOUBLED, SHIFTED_PROPERTY], ids=['forward', 'property'])
def test_a_class_of_the_name_with_other_code_keeps_it(copied, change):
    kind = copied(resnet, 'mmseg.models.backbones.resnet', change).ResNet
    assert 'layer1.0' not in assert_exact(randomize(kind(18, **NARROW))).changed


def test_a_class_whose_globals_mean_something_else_keeps_its_code(copied):
    change = ('import torch.utils.checkpoint as cp', 'import types\ncp = types.SimpleNamespace()')
    kind = copied(resnet, 'mmseg.models.backbones.resnet', change).ResNet
    assert 'layer1.0' not in assert_exact(randomize(kind(18, **NARROW))).changed


def test_a_class_without_source_keeps_its_code(copied, tmp_path):
    kind = copied(resnet, 'mmseg.models.backbones.resnet').ResNet
    (tmp_path / 'mmseg/models/backbones/resnet.py').unlink()
    assert 'layer1.0' not in assert_exact(randomize(kind(18, **NARROW))).changed


@pytest.mark.parametrize('plugged', [False, True])
def test_plugins_of_a_copy_run_its_own_code(copied, plugged):
    changes = [('out = getattr(self, name)(out)', 'out = getattr(self, name)(x)')]  # as in mmseg
    kind = copied(resnet, 'mmseg.models.backbones.resnet', *changes).Bottleneck
    plugins = [dict(cfg=dict(type='ContextBlock', ratio=0.25), position='after_conv2')] if plugged else None
    stage = nn.Sequential(randomize(kind(3, 8, downsample=nn.Conv2d(3, 32, 1), plugins=plugins)))
    report = assert_exact(nn.ModuleList([stage])[0], 16)
    assert ('0' in report.changed or '' in report.changed) is not plugged


@pytest.mark.parametrize(
    'file, name, keys',
    [
        ('resnext', 'ResNeXt', dict(depth=50, groups=4, base_width=4, base_channels=8)),
        ('regnet', 'RegNet', dict(arch='regnetx_400mf')),
    ],
)
def test_a_relative_of_resnet_in_another_project(copied, file, name, keys):
    copied(resnet, 'mmpose.models.backbones.resnet')
    copied(resnext, 'mmpose.models.backbones.resnext')
    kind = getattr(copied(dict(resnext=resnext, regnet=regnet)[file], f'mmpose.models.backbones.{file}'), name)
    report = assert_exact(randomize(kind(norm_eval=False, **keys)))
    assert {'', 'layer1', 'layer4'} <= {*report.changed}


def test_hrnet_of_another_project(copied):
    blocks = dict(num_modules=1, num_blocks=(1,) * 4, block='BASIC')
    extra = {f'stage{i}': dict(blocks, num_branches=i, num_blocks=(1,) * i, num_channels=(8,) * i) for i in (2, 3, 4)}
    extra['stage1'] = dict(num_modules=1, num_branches=1, block='BOTTLENECK', num_blocks=(1,), num_channels=(8,))
    copied(resnet, 'mmseg.models.backbones.resnet')
    backbone = randomize(copied(hrnet, 'mmseg.models.backbones.hrnet').HRNet(extra, norm_eval=False))
    assert {'', 'layer1', 'stage2.0.branches.0'} <= {*assert_exact(backbone).changed}


def test_swin_of_another_project_thins_as_mmdets(copied):
    kind = copied(swin, 'mmseg.models.backbones.swin').SwinTransformer
    backbone = randomize(
        kind(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4), window_size=3, mlp_ratio=2, drop_path_rate=0)
    )
    report = assert_exact(backbone)
    assert 'stages.2.blocks.1' in report.changed and not report.left
    assert 'stages.0.blocks.0' in apply_lean(backbone, preset='sbp', keep_ratio=0.5, verify=False).changed
