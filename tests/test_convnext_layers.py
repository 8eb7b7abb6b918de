"""Single layers of the backbone: the chain rule, forms of norm and activation, GRN."""

import pytest
import torch
from oracles import DEVICE, image, loss_of, mask_of, relative_error, small_backbone
from torch import nn

from sbp_mmdet.masks import positions
from sbp_mmdet.models.convnext_layers import GRN, LayerNorm2d, build_norm

IMPLEMENTATIONS = {
    'fused': dict(),
    'recompute': dict(recompute=True),
    'block': dict(recompute='block'),
    'reference': dict(implementation='reference'),
}
EACH_IMPLEMENTATION = pytest.mark.parametrize('sbp_cfg', IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
MASK = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5


def feature_map(channels, size=8):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, channels, size, size, generator=generator, dtype=torch.float64)
    return rows.to(DEVICE).requires_grad_()


def gradients_of_block(sbp_cfg, keep):
    """Gradients of the inputs of the MLP and, through the branch alone, of the block."""
    block = small_backbone(sbp_cfg).stages[1][0]
    x, inner = feature_map(12), []
    block.depthwise_conv.register_forward_hook(lambda module, args, out: inner.append(out))
    out = block(x, keep)
    return torch.autograd.grad(loss_of([out]) - loss_of([x]), [inner[0], x])


@EACH_IMPLEMENTATION
def test_chain_rule(sbp_cfg):
    """Sections 3.2.2 and 3.3: at the MLP's input the gradient of dropped positions is zero and that of kept ones exact;
    behind the 7x7 convolution it is neither, anywhere near a dropped position."""
    at_mlp, at_block = gradients_of_block(sbp_cfg, positions(MASK, DEVICE))
    exact_at_mlp, exact_at_block = gradients_of_block(None, None)
    assert not at_mlp[..., ~MASK].any()
    assert relative_error(at_mlp[..., MASK], exact_at_mlp[..., MASK]) < 1e-12
    assert (at_block - exact_at_block).abs().min() > 1e-6
    assert at_block.abs().min() > 1e-6


@EACH_IMPLEMENTATION
def test_patches_do_not_overlap(sbp_cfg):
    """Section 3.2.2, the case s >= k: the gradient of a 2x2 patch is exact or zero."""
    grads = []
    for cfg, keep in ((sbp_cfg, positions(MASK, DEVICE)), (None, None)):
        x = feature_map(8, 17)
        grads += torch.autograd.grad(loss_of([small_backbone(cfg).downsample_layers[1](x, keep)]), x)
    actual, exact = grads
    kept = torch.zeros(17, 17, dtype=torch.bool)
    kept[:16, :16] = MASK.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert not actual[..., ~kept].any()
    assert relative_error(actual[..., kept], exact[..., kept]) < 1e-12


@EACH_IMPLEMENTATION
def test_identical_drop_sets_stack_without_loss(sbp_cfg):
    """Section 3.3: two pointwise layers that drop at the same positions lose no more than one of them."""
    block = small_backbone(sbp_cfg).stages[1][0]
    with torch.no_grad():
        block.depthwise_conv.weight.zero_()
        block.depthwise_conv.weight[:, :, 3, 3] = 1.0  # now pointwise too
    x = feature_map(12)
    keep = positions(MASK, DEVICE)
    (grad,) = torch.autograd.grad(loss_of([block(block(x, keep), keep)]), x)
    x_exact = feature_map(12)
    (exact,) = torch.autograd.grad(loss_of([block(block(x_exact))]), x_exact)
    assert relative_error(grad[..., MASK], exact[..., MASK]) < 1e-12


@EACH_IMPLEMENTATION
@pytest.mark.parametrize(
    'kwargs',
    [
        dict(act_cfg=dict(type='GELU', approximate='tanh')),
        dict(norm_cfg=dict(type='LN2d', eps=0.1)),
        dict(norm_cfg=dict(type='LN', elementwise_affine=False)),
        dict(norm_cfg=dict(type='LN2d', requires_grad=False)),
    ],
    ids=str,
)
def test_forms_of_norm_and_activation(sbp_cfg, kwargs):
    """With every position kept, values and gradients are those of the plain layers."""
    results = []
    for cfg in (sbp_cfg, None):
        backbone = small_backbone(None if cfg is None else cfg | dict(keep_ratio=1.0), **kwargs)
        x = image(1).requires_grad_()
        outs = backbone(x)
        parameters = [p for p in backbone.parameters() if p.requires_grad]
        results.append([*outs, *torch.autograd.grad(loss_of(outs), [x, *parameters])])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-10


def test_recorded_positions_are_those_used():
    """mask_of, on which other tests rely, is the reverse of positions."""
    assert torch.equal(mask_of(positions(MASK).keep, 8, 8), MASK)


def test_grn_is_its_formula():
    grn = GRN(6).double()
    nn.init.normal_(grn.gamma)
    nn.init.normal_(grn.beta)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    for n in range(2):
        response = torch.stack([x[n, :, :, c].square().sum().sqrt() for c in range(6)])
        for c in range(6):
            relative = response[c] / (response.mean() + 1e-6)
            expected = grn.gamma[c] * x[n, :, :, c] * relative + grn.beta[c] + x[n, :, :, c]
            assert relative_error(grn(x)[n, :, :, c], expected) < 1e-12


def test_build_norm():
    norm = build_norm(dict(type='LN2d', eps=1e-6), 8)
    assert isinstance(norm, LayerNorm2d) and norm.eps == 1e-6 and norm.weight.requires_grad
    assert not build_norm(dict(type='LN', requires_grad=False), 8).weight.requires_grad
    cfg = dict(type='LN2d')
    build_norm(cfg, 8)
    assert cfg == dict(type='LN2d')  # a config stays what it is
    for cfg in (dict(type='BN'), dict(eps=1e-6)):
        with pytest.raises(ValueError, match=f'{cfg.get("type")!r}.*LN2d'):
            build_norm(cfg, 8)
