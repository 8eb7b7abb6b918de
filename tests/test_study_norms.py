"""The study of gradient norms with other backbones than ConvNeXt."""

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config

from sbp_mmdet.study import gradient_norms

SWIN = dict(type='SBPSwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), drop_path_rate=0.0)
VIT = dict(
    type='SBPViT',
    arch=dict(num_layers=3, embed_dims=12, num_heads=2),
    img_size=64,
    layer_scale_init_value=1.0,
)


@pytest.mark.parametrize(
    ('backbone', 'case'),
    [(SWIN, 'disjoint blocks'), (SWIN, 'disjoint pointwise layers'), (VIT, 'disjoint pointwise layers')],
)
def test_a_case_that_a_family_lacks_is_refused_first(backbone, case):
    config = Config(dict(model=dict(type='NotBuilt', backbone=backbone), optim_wrapper={}))
    message = f"setting 'x': {backbone['type'][3:6]}.* has no extreme case {case!r}.*--no-disjoint"
    with pytest.raises(ValueError, match=message):
        gradient_norms.norms_over_training(config, {'x': (dict(), gradient_norms.DISJOINT[case])}, [], 1)


def test_disjoint_blocks_of_vit():
    """Every second block keeps what the others drop, so that its tokens are no longer those of plain SBP."""
    start, x, kept = MODELS.build(VIT).state_dict(), torch.randn(2, 3, 64, 64), []
    for change in (lambda backbone: None, gradient_norms.disjoint_blocks):
        torch.manual_seed(0)
        backbone = MODELS.build(dict(VIT, sbp_cfg=dict(blocks=[3]))).train()
        backbone.load_state_dict(start)
        change(backbone)
        rows = []
        for block in backbone.blocks:
            block.register_forward_pre_hook(lambda module, args, rows=rows: rows.append(args[1].keep.tolist()))
        backbone(x)
        kept.append(rows)
    plain, apart = kept
    tokens = range(1, 17)  # behind the class token, which is always kept
    assert plain[0] == plain[1] == plain[2]
    assert apart[0] == apart[2] == plain[0]
    assert sorted({*apart[0], *apart[1]}) == [0, *tokens] and {*apart[0]} & {*apart[1]} == {0}
