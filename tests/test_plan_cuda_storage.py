"""Counts agree with the tensors that mmcv's CUDA functions save, summed by hand."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import FFN
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack, MultiScaleDeformableAttention, RoIAlign, RoIPool
from mmcv.ops.carafe import carafe
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from mmdet.models.losses import FocalLoss
from mmdet.models.task_modules.assigners import MaxIoUAssigner
from torch import nn

from sbp_mmdet.library_code import replaced_code
from sbp_mmdet.plan.cuda_rules import autocast, cuda_kernels
from sbp_mmdet.plan.cuda_storage import cuda_storage
from sbp_mmdet.plan.detector import assignment_on_cpu, measure_detector
from sbp_mmdet.plan.memory import LiveBytes, saved_bytes
from sbp_mmdet.plan.variants import load_config, make_plain

HALF, FLOAT, LONG = 2, 4, 8


def count_stored_bytes(fn, exclude=(), **how):
    with cuda_storage(LiveBytes(), **how):
        return saved_bytes(fn, exclude)


def attention(channels=32, heads=4, levels=2, points=4):
    layer = MultiScaleDeformableAttention(channels, heads, levels, points, dropout=0.0, batch_first=True)
    shapes = torch.tensor([[8, 8], [4, 4]])
    query = torch.randn(2, 80, channels)
    given = dict(reference_points=torch.rand(2, 80, levels, 2), spatial_shapes=shapes)
    return layer, query, lambda: layer(query, **given, level_start_index=torch.tensor([0, 64]))


def test_deformable_attention_stores_values_places_and_weights():
    layer, query, forward = attention()
    rows, samples = 2 * 80, 4 * 2 * 4  # heads, levels, points
    # Values, places, weights as softmax and as the kernel keep them (one storage), and what the output layer reads;
    # the offsets are divided by sizes (2 levels of 2 whole numbers).
    expected = rows * (32 + 2 * samples + samples + 32) * FLOAT
    actual = count_stored_bytes(forward, [query, *layer.parameters()])
    assert 0 <= actual - expected <= 200
    assert saved_bytes(forward, [query, *layer.parameters()]) > 1.8 * expected  # every sampled value
    assert count_stored_bytes(forward, [query, *layer.parameters()], bfloat16=True) > 1.8 * expected


def test_an_encoder_layer_in_mixed_precision():
    """Summed from the lists in ATen/autocast_mode.h: products in half precision, softmax and layer norm in fp32.

    Whoever multiplies an fp32 input casts it anew, so it is stored three times: for values, offsets and weights. The
    kernel has places and weights in half precision, and the softmax keeps its own result in fp32.
    """
    channels, hidden, samples, rows = 32, 64, 4 * 2 * 4, 2 * 80
    kind = dict(embed_dims=channels, num_heads=4, num_levels=2, num_points=4, dropout=0.0, batch_first=True)
    layer = DeformableDetrTransformerEncoderLayer(
        self_attn_cfg=kind, ffn_cfg=dict(embed_dims=channels, feedforward_channels=hidden, ffn_drop=0.0)
    )
    # Parameters are cast once in a region of autocast, and products keep the casts.
    weights = 2 * channels * channels + 3 * channels * samples + 2 * channels * hidden
    half = 3 * channels + channels + 3 * samples + channels + channels + hidden
    full = samples + 2 * (channels + 2)  # softmax; inputs, means and deviations of two norms
    expected = (rows * half + weights) * HALF + rows * full * FLOAT
    query = torch.randn(2, 80, channels, requires_grad=True)
    given = dict(reference_points=torch.rand(2, 80, 2, 2), spatial_shapes=torch.tensor([[8, 8], [4, 4]]))
    given |= dict(query_pos=torch.randn(2, 80, channels), key_padding_mask=None)

    def forward():
        with autocast('cpu', torch.bfloat16):
            return layer(query, **given, level_start_index=torch.tensor([0, 64]))

    actual = count_stored_bytes(forward, [query, *layer.parameters()])
    assert 0 <= actual - expected <= 200, (actual, expected)


@pytest.mark.parametrize('kind', [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_deformable_convolutions(kind):
    layer, x = kind(8, 6, 3, padding=1, bias=False), torch.randn(2, 8, 10, 12, requires_grad=True)
    plain_bytes, shape = saved_bytes(lambda: layer(x)), layer(x).shape
    with cuda_storage(counter := LiveBytes()):
        assert saved_bytes(lambda: layer(x)) == plain_bytes and layer(x).shape == shape
        with counter:
            out = layer(x)
            before = counter.live
            del out
        # Columns of one image, or of both, are there while the kernel runs.
        columns = 8 * 9 * 10 * 12 * (2 if kind is DeformConv2dPack else 1) * FLOAT
        assert counter.peak >= before + columns - 8 * 10 * 12 * 2 * FLOAT
        layer(x).sum().backward()
    assert x.grad.shape == x.shape


def test_operators_without_a_cpu_kernel_put_out_the_right_shapes():
    x = torch.randn(2, 8, 5, 6, requires_grad=True)
    masks = torch.rand(2, 25, 10, 12, requires_grad=True)
    with cuda_storage(LiveBytes()):
        out = carafe(x, masks, 5, 1, 2)
        assert out.shape == (2, 8, 10, 12)
        # What it reads, and the features once more in another order.
        assert saved_bytes(lambda: carafe(x, masks, 5, 1, 2)) == (2 * x.numel() + masks.numel()) * FLOAT
        out.sum().backward()
        assert RoIPool(7, 1.0)(x, torch.tensor([[0.0, 0, 0, 4, 4]])).shape == (1, 8, 7, 7)
    assert masks.grad.shape == masks.shape


def test_focal_loss_keeps_its_value_and_stores_logits_and_labels():
    loss, logits = FocalLoss(), torch.randn(50, 7, requires_grad=True)
    labels, weight = torch.randint(0, 8, (50,)), torch.rand(50)
    with cuda_storage(LiveBytes()):
        torch.testing.assert_close(loss(logits, labels), FocalLoss.forward(loss, logits, labels))
        value = loss(logits, labels, weight)
    torch.testing.assert_close(value, loss(logits, labels, weight))
    assert count_stored_bytes(lambda: loss(logits, labels, None, None, 'sum'), [logits]) <= 50 * LONG + 64
    one_hot = F.one_hot(labels, 8)[:, :7].float()
    assert count_stored_bytes(lambda: loss(logits, one_hot)) == saved_bytes(lambda: loss(logits, one_hot))


def test_dropout_stores_a_byte_an_element():
    x, layer = torch.randn(100, requires_grad=True), nn.Dropout(0.5)
    assert count_stored_bytes(lambda: layer(x)) == 100 and saved_bytes(lambda: layer(x)) == 100 * FLOAT
    assert count_stored_bytes(lambda: layer.eval()(x)) == 0


def test_stand_ins_of_kernels_are_no_foreign_code():
    """A changed module is counted in its changed form, even while CUDA's kernels are replaced."""
    counter, kinds = LiveBytes(), (FocalLoss, nn.Dropout, nn.Conv2d, RoIAlign, FFN, MultiScaleDeformableAttention)
    with cuda_kernels(counter, False), cuda_storage(counter), assignment_on_cpu(counter):
        assert {kind: replaced_code(kind) for kind in kinds} == dict.fromkeys(kinds)
        assert replaced_code(MaxIoUAssigner, 'assign') is None
    with mock.patch.object(F, 'dropout', lambda x, *_: x):
        assert replaced_code(nn.Dropout)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        'carafe/faster-rcnn_r50_fpn-carafe_1x_coco.py',
        'tood/tood_r50_fpn_1x_coco.py',
        'gcnet/mask-rcnn_r50-gcb-r4-c3-c5_fpn_1x_coco.py',
        'gcnet/mask-rcnn_r50-syncbn_fpn_1x_coco.py',
        'queryinst/queryinst_r50_fpn_1x_coco.py',
        'guided_anchoring/ga-retinanet_r50-caffe_fpn_1x_coco.py',
        'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
        'detectors/detectors_htc-r50_1x_coco.py',
    ],
)
def test_families_get_an_answer(name):
    config = make_plain(load_config(f'mmdet::{name}'))
    if 'deformable_detr' in name:
        config.model.encoder.num_layers = config.model.decoder.num_layers = 2
    row = measure_detector(config, batch=1, height=128, width=128, boxes=3)
    assert row['peak'] > row['parameters'] > 50e6
