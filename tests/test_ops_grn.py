"""ConvNeXt V2's channel MLP, exact and lean, against plain torch in fp64."""

import pytest
import torch
import torch.nn.functional as F
from ops_cases import differentiate
from oracles import image, small_backbone

from sbp_mmdet import SBPConvNeXt, ops
from sbp_mmdet.analysis.memory import saved_bytes

C, D = 6, 10


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(affine=True, gamma=True):
    shapes = dict(x=(2, C, 5, 4), shortcut=(2, C, 5, 4), norm_weight=(C,), norm_bias=(C,), weight1=(D, C), bias1=(D,))
    shapes |= dict(grn_weight=(D,), grn_bias=(D,), weight2=(C, D), bias2=(C,), gamma=(C,))
    tensors = {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    if not affine:
        tensors |= dict(norm_weight=None, norm_bias=None)
    return tensors if gamma else tensors | dict(gamma=None)


def plain(x, shortcut, norm_weight, norm_bias, weight1, bias1, grn_weight, grn_bias, weight2, bias2, gamma, factor):
    x = F.layer_norm(x.permute(0, 2, 3, 1), (C,), norm_weight, norm_bias, 1e-6)
    a = F.gelu(F.linear(x, weight1, bias1))
    norm = a.norm(dim=(1, 2), keepdim=True)  # its derivative at zero is zero
    a = (1 + grn_weight * norm / (norm.mean(-1, keepdim=True) + 1e-6)) * a + grn_bias
    out = F.linear(a, weight2, bias2).permute(0, 3, 1, 2)
    out = out if gamma is None else out * gamma[:, None, None]
    return shortcut + (out if factor is None else out * factor[:, None, None, None])


@pytest.mark.parametrize('options', [{}, dict(affine=False), dict(gamma=False)], ids=str)
@pytest.mark.parametrize('chunk', [None, 3 * D])
@pytest.mark.parametrize('factor', [None, torch.tensor([0.0, 1.7], dtype=torch.float64)])
def test_gradients(options, chunk, factor):
    tensors = inputs(**options)
    settings = ops.GRNSettings(chunk=chunk)
    found = differentiate(lambda **t: ops.grn_mlp(settings, ops.GRNTensors(**t, factor=factor)), tensors)
    expected = differentiate(lambda **t: plain(**t, factor=factor), tensors)
    for name, value in expected.items():
        if value is not None:
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f'{name}: {text}')


def dead(dtype=torch.float64):
    """Hidden channels whose GELU is zero at all positions, and nearly so."""
    tensors = inputs()
    tensors['bias1'][:3] = torch.tensor([-40.0, -8.0, -5.0])
    tensors['weight1'][:3] *= 0.1
    return {name: value.to(dtype) for name, value in tensors.items()}


def test_a_hidden_channel_that_is_zero():
    found = differentiate(lambda **t: ops.grn_mlp(ops.GRNSettings(), ops.GRNTensors(**t)), dead())
    expected = differentiate(lambda **t: plain(**t, factor=None), dead())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f'{name}: {text}')


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('loss_scale', [1.0, 64.0, 256.0])
def test_a_hidden_channel_that_is_zero_in_half_precision(dtype, loss_scale):
    tensors = {name: value.requires_grad_() for name, value in dead(torch.float32).items()}
    with torch.autocast('cpu', dtype):
        out = ops.grn_mlp(ops.GRNSettings(), ops.GRNTensors(**tensors))
    (out * loss_scale).sum().backward()
    for name, value in tensors.items():
        assert value.grad.isfinite().all(), name


def test_what_is_stored():
    tensors = {name: t.requires_grad_() for name, t in inputs().items()}
    found = saved_bytes(lambda: ops.grn_mlp(ops.GRNSettings(), ops.GRNTensors(**tensors)), list(tensors.values()))
    assert found == 8 * 2 * (20 * (C + 1) + D)  # x-hat and its deviation; G


@pytest.mark.parametrize(
    'cfg', [dict(recompute=True), dict(recompute='block'), dict(implementation='reference')], ids=str
)
def test_backbone(cfg):
    options = dict(use_grn=True, layer_scale_init_value=0.0, drop_path_rate=0.4)
    found = []
    for sbp_cfg in (None, dict(keep_ratio=1.0, **cfg)):
        model = small_backbone(sbp_cfg, **options)
        torch.manual_seed(0)
        sum(out.cos().sum() for out in model(image())).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, msg=lambda text, name=name: f'{name}: {text}')


def test_backbone_stores_less():
    options = dict(use_grn=True, layer_scale_init_value=0.0)
    settings = [None, dict(keep_ratio=1.0, recompute=True), dict(keep_ratio=1.0, recompute='block')]
    models = [small_backbone(cfg, **options) for cfg in settings]
    plain, lean, leanest = (saved_bytes(lambda m=m: m(image()), m.parameters()) for m in models)
    assert leanest < lean < 0.5 * plain


@pytest.mark.parametrize(
    ('cfg', 'text'),
    [
        ({}, r'use_grn=True cannot be used with sbp_cfg that drops.*keep_ratio=1.0, recompute=True'),
        (dict(keep_ratio=1.0), 'use_grn=True needs sbp_cfg with recompute=True'),
    ],
)
def test_what_cannot_be_done(cfg, text):
    with pytest.raises(ValueError, match=text):
        SBPConvNeXt('atto', use_grn=True, sbp_cfg=cfg)
