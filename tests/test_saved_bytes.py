"""The memory line of the first step counts what a training pass saves."""

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from torch import nn

from sbp_mmdet import apply_lean
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
    """What exact_min recomputes inside of it is not counted twice."""
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
    assert findings.recomputed > 0 and 0 <= outside < 0.2 * before
    assert findings.stored['now'] == pytest.approx(count_saved(model, x) - outside, rel=0.2)
