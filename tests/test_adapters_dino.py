"""A step of a small DINO and of a Mask2Former head has the losses and gradients of the plain model."""

import copy
import functools
import inspect
import types
from pathlib import Path
from unittest import mock

import mmdet
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.layers.transformer import dino_layers
from mmdet.models.layers.transformer.dino_layers import CdnQueryGenerator
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from oracles import DEVICE
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.memory import saved_bytes

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
def test_dino(in_fp64):
    """In a whole step, losses and gradients agree apart from rounding, with half of the bytes."""
    init_default_scope('mmdet')
    configs = Path(mmdet.__file__).parent / '.mim/configs'
    cfg = Config.fromfile(configs / 'dino/dino-4scale_r50_8xb2-12e_coco.py')
    cfg.merge_from_dict({f'model.{key}': value for key, value in DINO.items()})
    cfg.model.backbone = dict(type='ResNet', depth=18, base_channels=8, out_indices=(1, 2, 3), frozen_stages=1)
    cfg.model.bbox_head.embed_dims = 32
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()  # the stock class leaves its level_embed in memory that nobody has written
    model.double().to(DEVICE).train()
    batch = model.data_preprocessor(demo_mm_inputs(2, [[3, 96, 128], [3, 128, 96]], num_classes=2), True)
    expected = detector_step(model, batch)
    report = apply_lean(model, preset='exact')
    actual = detector_step(model, batch)
    assert {name for name in report.changed if name.startswith('encoder')} == {'encoder.layers.0', 'encoder.layers.1'}
    assert actual.losses == pytest.approx(expected.losses, rel=1e-11)
    assert (actual.gradient - expected.gradient).norm() <= 1e-10 * expected.gradient.norm()
    assert actual.bytes <= 0.5 * expected.bytes


def crowded_queries(boxes):
    """Return the attention mask of DINO's queries for two images, of which one has ``boxes`` boxes and the other has
    one."""
    generator = CdnQueryGenerator(
        num_classes=3, embed_dims=16, num_matching_queries=20, group_cfg=dict(num_dn_queries=10)
    )
    samples = []
    for number in (boxes, 1):
        sample = DetDataSample(metainfo=dict(img_shape=(64, 64)))
        corners = torch.rand(number, 2) * 30
        sample.gt_instances = InstanceData(
            bboxes=torch.cat([corners, corners + 20], 1), labels=torch.zeros(number, dtype=torch.long)
        )
        samples.append(sample)
    return generator(samples)[2]


def test_self_attention_of_a_crowded_image_stores_no_map():
    """Stored bytes grow with the number of queries, where plain attention stores a map of its square.

    DINO has two denoising queries for each box of the most crowded image.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(MultiheadAttention(16, 4, batch_first=True)).double()
    lean, stored = copy.deepcopy(plain), {}
    apply_lean(lean, verify=False)
    for boxes in (100, 200):
        mask = crowded_queries(boxes)
        assert mask.shape == (20 + 2 * boxes,) * 2 and mask.any()
        x = torch.randn(2, len(mask), 16, dtype=torch.float64, requires_grad=True)
        found = []
        for model in (plain, lean):
            run = functools.partial(model[0], x, attn_mask=mask)
            stored[model, boxes] = saved_bytes(run, exclude=[mask, *model.parameters()])
            (model[0](x, attn_mask=mask) ** 2).sum().backward()
            found.append(torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in model.parameters())]))
            x.grad = None
            model.zero_grad()
        assert (found[1] - found[0]).norm() <= 1e-11 * found[0].norm()
    assert stored[plain, 200] > 3 * stored[plain, 100]
    assert stored[lean, 200] < 2.1 * stored[lean, 100]
    assert 10 * stored[lean, 200] < stored[plain, 200]


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


class Mask2Former(nn.Module):
    """Small Mask2Former head. Its attention masks are given, because they come from a threshold that rounding could
    cross."""

    def __init__(self):
        super().__init__()
        init_default_scope('mmdet')
        model = get_config('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py').model
        attention, ffn = dict(embed_dims=32, num_heads=4), dict(embed_dims=32, feedforward_channels=64)
        sizes = dict(in_channels=[8, 16, 24, 32], feat_channels=32, out_channels=32, num_queries=10)
        pixels = dict(layer_cfg=dict(self_attn_cfg=attention, ffn_cfg=ffn), num_layers=2)
        queries = dict(layer_cfg=dict(self_attn_cfg=attention, cross_attn_cfg=attention, ffn_cfg=ffn), num_layers=3)
        model.panoptic_head.merge(dict(sizes, positional_encoding=dict(num_feats=16), transformer_decoder=queries))
        pixels = dict(norm_cfg=dict(num_groups=4), positional_encoding=dict(num_feats=16), encoder=pixels)
        model.panoptic_head.pixel_decoder.merge(pixels)
        self.head, self.masks = MODELS.build(model.panoptic_head), []
        self.head.init_weights()
        for name, p in self.head.named_parameters():
            if 'sampling_offsets.weight' in name or 'attention_weights' in name:
                nn.init.normal_(p, 0, 0.1)

    def forward(self, **maps):
        """Return class scores and masks of all layers."""
        given = iter(self.masks)

        def forward_head(*args):
            *out, mask = type(self.head)._forward_head(self.head, *args)
            new.append(next(given, mask))
            return *out, new[-1]

        new = []
        with mock.patch.object(self.head, '_forward_head', forward_head):
            found = self.head([*maps.values()], [None, None])
        self.masks = new
        return [*found[0], *found[1]]


def maps(dtype=None):
    """Return feature maps like those of a backbone."""
    return {f'm{i}': torch.randn(2, 8 + 8 * i, 24 >> i, 32 >> i, dtype=dtype) for i in range(4)}


def test_mask2former():
    plain, given = Mask2Former().double(), maps(torch.float64)
    lean = copy.deepcopy(plain)
    report = apply_lean(lean, preset='exact')
    kinds = {name.split('.')[1] for name in report.changed}
    assert kinds == {'pixel_decoder', 'transformer_decoder'}
    results = []
    for model in (plain, lean):
        outs = model(**given)
        weights = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o) for o in outs]
        gradients = torch.autograd.grad(outs, [*model.parameters()], weights, allow_unused=True)
        results.append(outs + [g for g in gradients if g is not None])
    assert all(map(torch.equal, plain.masks, lean.masks))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * b.abs().max().item())
