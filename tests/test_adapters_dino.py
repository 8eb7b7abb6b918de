"""A whole step of a small DINO: losses, gradients and stored bytes of the stock detector."""

import copy
import inspect
import types
from pathlib import Path

import mmdet
import pytest
import torch
from mmdet.models.layers.transformer import dino_layers
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.registry import init_default_scope

from sbp_mmdet import apply_lean

DINO = {
    'neck.in_channels': [16, 32, 64],
    'neck.out_channels': 32,
    'neck.norm_cfg.num_groups': 4,
    'encoder.num_layers': 2,
    'encoder.layer_cfg.self_attn_cfg.embed_dims': 32,
    'encoder.layer_cfg.ffn_cfg.embed_dims': 32,
    'encoder.layer_cfg.ffn_cfg.feedforward_channels': 128,
    'decoder.num_layers': 2,
    'decoder.layer_cfg.self_attn_cfg.embed_dims': 32,
    'decoder.layer_cfg.cross_attn_cfg.embed_dims': 32,
    'decoder.layer_cfg.ffn_cfg.embed_dims': 32,
    'decoder.layer_cfg.ffn_cfg.feedforward_channels': 128,
    'positional_encoding.num_feats': 16,
    'num_queries': 20,
    'dn_cfg.group_cfg.num_dn_queries': 10,
}


@pytest.mark.skipif(
    'num_feats' not in inspect.getsource(dino_layers), reason='the DINO of this mmdet has 256 channels, no fewer'
)
def test_dino():
    """A whole step, in fp32: losses and gradients to rounding, and half of the bytes."""
    init_default_scope('mmdet')
    configs = Path(mmdet.__file__).parent / '.mim/configs'
    cfg = Config.fromfile(configs / 'dino/dino-4scale_r50_8xb2-12e_coco.py')
    cfg.merge_from_dict({f'model.{key}': value for key, value in DINO.items()})
    cfg.model.backbone = dict(type='ResNet', depth=18, base_channels=8, out_indices=(1, 2, 3), frozen_stages=1)
    cfg.model.bbox_head.embed_dims = 32
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()  # the stock class leaves its level_embed in memory that nobody has written
    model.train()
    batch = model.data_preprocessor(demo_mm_inputs(2, [[3, 96, 128], [3, 128, 96]], num_classes=2), True)
    expected = detector_step(model, batch)
    report = apply_lean(model, preset='exact')
    found = detector_step(model, batch)
    assert {name for name in report.changed if name.startswith('encoder')} == {'encoder.layers.0', 'encoder.layers.1'}
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert (found.gradient - expected.gradient).norm() <= 1e-3 * expected.gradient.norm()
    assert found.bytes <= 0.5 * expected.bytes


def detector_step(model, batch):
    seen, known = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        losses = model.loss(batch['inputs'], copy.deepcopy(batch['data_samples']))
    sum(losses.values()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    values = {name: loss.item() for name, loss in losses.items()}
    return types.SimpleNamespace(losses=values, gradient=gradient, bytes=sum(seen.values()))
