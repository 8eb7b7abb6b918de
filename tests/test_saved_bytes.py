"""The memory line of the first step counts what a training pass saves."""

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from torch import nn

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.checkpointing import checkpoint_modules
from sbp_mmdet.plan.memory import SavedByPart
from sbp_mmdet.verify.checks import verify_modules

BACKBONES = {
    'Swin': dict(
        type='SwinTransformer', drop_path_rate=0.0, embed_dims=24, depths=[2, 2, 2, 2], num_heads=[3, 6, 12, 24]
    ),
    'Res2Net': dict(type='Res2Net', depth=50, base_channels=16, scales=4, base_width=4),
    'ResNeSt': dict(type='ResNeSt', depth=50, base_channels=16, radix=2, avg_down_stride=True),
}


class Holding(nn.Module):
    """Model with a backbone."""

    def __init__(self, cfg):
        super().__init__()
        init_default_scope('mmdet')
        torch.manual_seed(0)
        self.backbone = MODELS.build(cfg)
        self.train()

    def forward(self, x):
        return self.backbone(x)


def verify(model, x):
    names = [name for name, module in model.named_modules() if isinstance(module, LeanModule)]
    return verify_modules(model, names, lambda model: model(x))


def test_what_the_user_checkpoints_counts_as_before():
    """A stage that the user checkpoints counts as saving nothing, with ``exact_min`` inside of it and without."""
    model, x = Holding(BACKBONES['Swin']), torch.randn(2, 3, 64, 64)
    checkpoint_modules(model, ['backbone.stages.0'])
    apply_lean(model, 'exact_min', modules=['backbone.stages.0'], verify=False)
    assert verify(model, x).stored == dict(now=0, before=0, with_cp=0)


def count_saved(model, x):
    """Return the bytes that a training pass of the model saves, without parameters and buffers."""
    saved = SavedByPart(lambda: '')
    with saved.hooks():
        outs = model(x)
    assert outs is not None
    return sum(saved.count([*model.parameters(), *model.buffers()]).values())


@pytest.mark.parametrize('kind', ['Swin', 'Res2Net', 'ResNeSt'])
def test_the_first_step_counts_what_recomputed_blocks_save(kind):
    """Their inputs, and as unchanged bytes all of their own code, as a pass of the model shows."""
    model, x = Holding(BACKBONES[kind]), torch.randn(2, 3, 64, 64)
    before = count_saved(model, x)
    apply_lean(model, 'exact_min', verify=False)
    findings = verify(model, x)
    outside = before - findings.stored['before']
    assert sum(call.bytes['now'] for call in findings.recomputed) > 0 and 0 <= outside < 0.2 * before
    assert findings.stored['now'] == pytest.approx(count_saved(model, x) - outside, rel=0.2)


class WithBoxHead(Holding):
    """Model with a frozen stage, and a box head of linear layers that saves little more than its large input."""

    def __init__(self):
        super().__init__(dict(type='ResNet', depth=18, base_channels=8, frozen_stages=1))
        coder = dict(type='DeltaXYWHBBoxCoder')
        head = dict(type='Shared2FCBBoxHead', in_channels=8, fc_out_channels=32, num_classes=2, bbox_coder=coder)
        layer = dict(type='RoIAlign', output_size=7)
        rois = dict(type='SingleRoIExtractor', roi_layer=layer, out_channels=8, featmap_strides=[4])
        self.roi_head = MODELS.build(dict(type='StandardRoIHead', bbox_roi_extractor=rois, bbox_head=head))
        self.train()

    def forward(self, x):
        outs = self.backbone(x)
        maps = outs[0].unfold(2, 7, 1).unfold(3, 7, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return outs, self.roi_head.bbox_head(maps.contiguous())


class WithNeck(Holding):
    """Model with a neck that is recomputed as a whole, and holds blocks that checkpointing recomputes one by one."""

    def __init__(self):
        super().__init__(dict(type='CSPDarknet', deepen_factor=0.33, widen_factor=0.125))
        self.neck = MODELS.build(dict(type='YOLOXPAFPN', in_channels=[32, 64, 128], out_channels=32, num_csp_blocks=2))
        self.train()

    def forward(self, x):
        return self.neck(self.backbone(x))


@pytest.mark.parametrize('kind', [WithBoxHead, WithNeck])
def test_all_counts_are_of_the_same_modules(kind):
    """Counts of all presets leave out the same bytes: those that modules outside of the count save."""
    model, x = kind(), torch.randn(2, 3, 96, 96)
    oracle = {}
    for key, preset in dict(before='none', with_cp='with_cp', now='exact_min').items():
        remove_lean(model)
        apply_lean(model, preset, verify=False)
        oracle[key] = count_saved(model, x)
    if kind is WithNeck:
        oracle['now'] += x.nbytes  # its recomputed stem keeps the image, which needs no gradient, in no saved tensor
    findings = verify(model, x)
    assert not findings.skipped
    outside = oracle['before'] - findings.stored['before']
    assert 0 <= outside < 0.05 * oracle['before']
    for key, count in findings.stored.items():
        assert count == pytest.approx(oracle[key] - outside, rel=0.05), key
