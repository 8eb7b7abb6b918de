"""A family that nothing else knows of: one record, and planner, memory lab, block benchmark and study run on it."""

import json
import sys

import pytest
import torch
import torch.utils.checkpoint as cp
from helpers import TOOLS, make_project
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from mmengine.model import BaseModule
from torch import nn

from sbp_mmdet.analysis.parts import part_of
from sbp_mmdet.analysis.planner import candidates, snippet
from sbp_mmdet.analysis.variants import applicable, load_config
from sbp_mmdet.draws import Draws
from sbp_mmdet.families import (
    FAMILIES,
    Family,
    Layer,
    Tap,
    Unit,
    family_of,
    layer_of,
    locate,
    register_family,
    require,
)
from sbp_mmdet.functional import sbp
from sbp_mmdet.models.convnext import SBPConvNeXt
from sbp_mmdet.settings import SBPSettings
from sbp_mmdet.study.measures import parts_of

sys.path[:0] = [str(TOOLS), str(TOOLS / 'analysis_tools')]
import benchmark_block  # noqa: E402
import benchmark_memory  # noqa: E402
import gradient_study  # noqa: E402
import plan_memory  # noqa: E402

WIDTHS = [8, 16, 32, 64]


class ToyBlock(nn.Module):
    """A depthwise convolution, then a channel MLP with its residual connection."""

    def __init__(self, width, with_cp):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.with_cp = with_cp

    def forward(self, x, keep=None):
        if self.with_cp and torch.is_grad_enabled():
            return cp.checkpoint(self.run, x, keep, use_reentrant=False)
        return self.run(x, keep)

    def run(self, x, keep):
        tokens = self.spatial(x).flatten(2).transpose(1, 2)
        out = self.mlp(tokens) if keep is None else sbp(self.mlp, tokens, keep)
        return x + out.transpose(1, 2).view_as(x)

    def mlp(self, tokens):
        return self.narrow(self.widen(tokens).relu())


@MODELS.register_module()
class ToyNet(BaseModule):
    """Four levels of one block; each halves the map that it gets."""

    depths = (1, 1, 1, 1)

    def __init__(self, widths=WIDTHS, sbp_cfg=None, with_cp=False, init_cfg=None):
        super().__init__(init_cfg)
        self.sbp = None if sbp_cfg is None else SBPSettings.parse(sbp_cfg, self.depths)
        self.shrinks = nn.ModuleList(
            nn.Conv2d(a, b, 4 if a == 3 else 2, stride=4 if a == 3 else 2)
            for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.levels = nn.ModuleList(ToyBlock(width, with_cp) for width in widths)
        self._draws = Draws()

    def keep_ratios(self):
        blocks = [] if self.sbp is None else [i for i, number in enumerate(self.sbp.blocks) if number]
        return {(i, 0): r for i, r in zip(blocks, self.sbp.keep_ratio if blocks else [], strict=True) if r != 1}

    def stage_sizes(self, height, width):
        return [(height // 4 // 2**i, width // 4 // 2**i) for i in range(4)]

    def draw(self, x, again=False):
        return self._draws.of(self, x, again=again)

    def forward(self, x):
        keep = self.draw(x).positions if self.sbp and self.training else {}
        outs = []
        for i, (shrink, block) in enumerate(zip(self.shrinks, self.levels, strict=True)):
            x = block(shrink(x), keep.get((i, 0)))
            outs.append(x)
        return tuple(outs)


def build_unit(unit, arch, stage, shape, device, sbp_cfg, with_cp):
    model = ToyNet(sbp_cfg=sbp_cfg, with_cp=with_cp).to(device).train()
    if unit == 'backbone':
        return Unit(model, model, reads_image=True)
    block = model.levels[stage]
    if unit == 'mlp':
        block.spatial = nn.Identity()
    keep = model.draw(torch.empty(1, 3, *(side * 4 * 2**stage for side in shape[2:]))).positions.get((stage, 0))
    return Unit(block, lambda x: block(x, keep), reads_image=False)


def stage_shape(arch, stage, batch, height, width):
    return batch, WIDTHS[stage], height // 4 // 2**stage, width // 4 // 2**stage


_LEVEL = r'levels\.(?P<stage>\d+)\.'

TOY = Family(
    name='Toy',
    backbone='ToyNet',
    stock=(),
    parts=((r'shrinks\.0', 'stem'), (r'(?:shrinks|levels)\.(?P<from0>\d)', 'stage {}')),
    layers={
        r'levels\.(?P<stage>\d+)\.widen': 'first',
        r'levels\.(?P<stage>\d+)\.narrow': 'second',
    },
    archs=('toy',),
    stage_shape=lambda arch, stage, batch, height, width: (
        batch,
        WIDTHS[stage],
        height >> 2 + stage,
        width >> 2 + stage,
    ),
    build_unit=build_unit,
    presets=('none', 'with_cp', 'reference', 'fused'),
    times={'fused': 0.9},
    tap=lambda backbone, layer: Tap(f'levels.{layer[0]}', backbone.levels[layer[0]].spatial, at_output=True),
)


@pytest.fixture(scope='module')
def family():
    yield register_family(TOY)
    del FAMILIES['Toy']


@pytest.fixture(scope='module')
def project(tmp_path_factory, family):
    """A folder with a config of a detector with this backbone."""
    folder = tmp_path_factory.mktemp('project')
    make_project(folder)
    config = load_config(str(folder / 'tiny.py'))
    config.model.backbone = ConfigDict(type='ToyNet', init_cfg=None)
    config.train_dataloader.dataset.data_root = f'{folder}/data/shapes/'
    config.dump(folder / 'toy.py')
    return folder


def typed(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, 'argv', [tool.__file__, *map(str, arguments)])
    tool.main()


def test_planner(project, monkeypatch, capsys):
    config = load_config(str(project / 'toy.py'))
    variants = candidates(config)
    assert {variant.split('+')[0] for variant in variants} == {'reference', 'fused'}
    assert variants[0] == 'reference'  # 'fused' takes longer here, says the record
    assert {variant.split('+')[0] for variant in candidates(config, 'exact')} == {'none', 'with_cp'}
    assert candidates(config, 'nearest') == []
    assert "type='ToyNet', sbp_cfg=dict(keep_ratio=0.5)" in snippet(config, 'fused')
    good, bad = applicable(config, ['fused', 'nearest'])
    assert good == ['fused'] and 'Toy has no such preset' in bad['nearest']
    typed(monkeypatch, plan_memory, project / 'toy.py', '--budget', '8GiB', '--size', '64x64', '--batch', 1)
    assert 'The fastest that fits: reference' in capsys.readouterr().out


def test_memory_lab(project, monkeypatch, tmp_path):
    out = tmp_path / 'rows.json'
    words = ['--variants', 'none', 'fused', '--size', '64x64', '--boxes', 2, '--batch', 1, '--device', 'cpu']
    typed(monkeypatch, benchmark_memory, project / 'toy.py', *words, '--json', out, '--plot', tmp_path / 'bars.png')
    none, fused = (row['saved'] for row in json.loads(out.read_text())['rows'])
    assert {'stem', 'stage 1', 'stage 4'} <= set(none)
    assert fused['stage 1'] < none['stage 1'] and fused['stage 4'] == none['stage 4']


@pytest.mark.parametrize('unit', ['mlp', 'block', 'backbone'])
def test_block_benchmark(unit, family, monkeypatch, tmp_path):
    out = tmp_path / 'rows.json'
    words = ['--family', 'Toy', '--unit', unit, '--size', 64, 64, '--rounds', 1, '--gradients', '--device', 'cpu']
    words += [] if unit == 'backbone' else ['--stage', 1]
    typed(monkeypatch, benchmark_block, *words, '--json', out)
    rows = {row['preset']: row for row in json.loads(out.read_text())['rows']}
    assert list(rows) == list(TOY.presets)
    assert rows['fused']['saved_bytes'] < rows['none']['saved_bytes']
    assert rows['with_cp']['relative_error'] == 0 < rows['fused']['relative_error']


def test_gradient_study(project, monkeypatch, tmp_path):
    out = tmp_path / 'study.json'
    words = ['--group', 'blocks', '--setting', 'mine: keep_ratio=0.25', '--batches', 1, '--device', 'cpu']
    typed(monkeypatch, gradient_study, project / 'toy.py', *words, '--json', out, '--plot', tmp_path / 'study.png')
    found = json.loads(out.read_text())
    cosine = {part: row['cosine']['mean'] for part, row in found['results']['blocks 1-0-0-0'].items()}
    assert cosine['stage 4'] == pytest.approx(1, abs=1e-4)
    assert cosine['stage 1'] < 0.999 and cosine['levels.0.widen'] < 0.999
    assert found['kept']['mine']['layer'] == 'levels.2'
    assert found['kept']['mine']['error'] < 1e-4 and found['kept']['mine']['dropped'] == 0


def test_names(family):
    assert part_of('backbone.shrinks.0.weight', family) == 'stem'
    assert part_of('backbone.levels.3.widen.bias') == 'stage 4'  # found by its name
    assert parts_of('backbone.shrinks.0.weight') == ['network', 'backbone', 'stage 1', 'shrinks.0']
    assert parts_of('backbone.anything.weight') == ['network', 'backbone', 'anything']
    assert parts_of('backbone.layer2.0.conv1.weight') == ['network', 'backbone', 'stage 2', 'layer2.0.conv1']
    assert locate(TOY.parts, 'elsewhere') is None
    assert layer_of('stages.1.2.pointwise_conv1') == Layer(1, 2, 'PW 1') and layer_of('stages.1.2.norm') is None


def test_the_family_of_a_backbone(family):
    assert family_of(dict(type='ToyNet')) is family_of(ToyNet()) is family_of(dict(type=ToyNet)) is family
    convnext = FAMILIES['ConvNeXt']
    for kind in ('ConvNeXt', 'mmpretrain.ConvNeXt', 'SBPConvNeXt', 'mmdet.SBPConvNeXt', SBPConvNeXt):
        assert family_of(dict(type=kind)) is convnext
    for backbone in (None, {}, dict(type='ResNet'), dict(type='other.ConvNeXt'), nn.Identity()):
        assert family_of(backbone) is None
    with pytest.raises(ValueError, match="type='ResNet': SBP does not apply to it; it applies to SBPConvNeXt"):
        require(dict(type='ResNet'))


def test_records_that_cannot_be(family):
    def changed(**values):
        return Family(**{**{key: getattr(TOY, key) for key in TOY.__dataclass_fields__}, **values})

    with pytest.raises(ValueError, match="'Toy' is already registered, for ToyNet"):
        register_family(changed(backbone='OtherNet'))
    with pytest.raises(ValueError, match="preset 'fastest' is unknown"):
        register_family(changed(presets=('none', 'fastest')))
