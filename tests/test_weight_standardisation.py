"""Layers with standardised weights have the gradients of their own code, and store no copy of a weight."""

import pytest
import torch
from cases import count_model_bytes
from mmcv.cnn.bricks.conv_ws import ConvWS2d
from test_residual_chain import BN, GN, WS, assert_plain, build_lean_and_plain, random_map

from sbp_mmdet.ops.common.weight_standardisation import standardise, standardise_backward


@pytest.mark.parametrize('shape', [(6, 4, 3, 3), (6, 4, 1, 1), (6, 1, 5, 5)], ids=str)
def test_gradients_are_those_of_mmcvs_convolution(shape):
    """One filter is constant: its deviation is zero, which torch gives no gradient."""
    torch.manual_seed(0)
    conv = ConvWS2d(shape[1], shape[0], shape[2:], bias=False).double()
    with torch.no_grad():
        conv.weight[2] = 0.5
    x = torch.randn(2, shape[1], 8, 8, dtype=torch.float64)
    weight = standardise(conv.weight.detach(), conv.eps).requires_grad_()
    torch.testing.assert_close(torch.conv2d(x, weight), conv(x), rtol=0, atol=0)
    torch.conv2d(x, weight).sin().sum().backward()
    conv(x).sin().sum().backward()
    torch.testing.assert_close(
        standardise_backward(conv.weight.detach(), conv.eps, weight.grad), conv.weight.grad, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_standardised_weights_with_fixed_norms(preset):
    lean, plain = build_lean_and_plain(options=dict(conv_cfg=WS), blocks=2, preset=preset)
    assert_plain(lean, plain)


@pytest.mark.parametrize('norm', [BN, GN])
def test_no_copy_of_a_standardised_weight_is_stored(norm):
    """Layers with standardised weights store what those without store."""
    given = [dict(norm_cfg=norm), dict(norm_cfg=norm, conv_cfg=WS)]
    models = [build_lean_and_plain(options=options, blocks=3)[0].float() for options in given]
    x = random_map((8, 8)).float()
    plain, standardised = (count_model_bytes(model, x) for model in models)
    assert standardised == plain
