"""What half precision must not change: range, random numbers, data types."""

import pytest
import torch
from helpers import needs_fp16
from oracles import relative_error
from torch import nn

from sbp_mmdet import SBPConvNeXt, SBPViT, ops
from sbp_mmdet.models.convnext_layers import ConvNeXtBlock

TINY = dict(arch=dict(depths=[1, 1, 1, 1], channels=[8, 16, 24, 32]), out_indices=[0, 1, 2, 3])


@needs_fp16
@pytest.mark.parametrize(('gradient', 'gamma'), [(7e4, 1e-6), (200.0, 0.01), (1.0, 1.0), (1e-6, 1.0)])
def test_fp16_keeps_the_range_of_the_plain_block(gradient, gamma):
    """Loss scaling makes the block's gradient large, a small layer scale makes the branch's small again."""
    c, d, size = 8, 32, 64
    x = torch.randn(1, c, size, size)
    grad = gradient * torch.ones(1, c, size, size)
    weights = [torch.randn(d, c), torch.randn(d), torch.randn(c, d) / 8, torch.randn(c), torch.full((c,), gamma)]

    def gradients(dtype, run):
        leaves = [w.detach().to(dtype).requires_grad_() for w in weights]
        with torch.autocast('cpu', dtype=torch.float16, enabled=dtype != torch.float64):
            out = run(x.to(dtype), *leaves)
        out.backward(grad.to(out.dtype))
        return [leaf.grad.double() for leaf in leaves]

    def plain(x, w1, b1, w2, b2, gamma):
        rows = nn.functional.layer_norm(x.permute(0, 2, 3, 1), (c,), eps=1e-6)
        return x + ((nn.functional.gelu(rows @ w1.t() + b1) @ w2.t() + b2) * gamma).permute(0, 3, 1, 2)

    def ours(x, *leaves):
        return ops.channel_mlp(ops.MLPSettings(), ops.MLPTensors(x.half(), x, None, None, *leaves))

    truth = gradients(torch.float64, plain)
    for actual, expected in zip(gradients(torch.float32, ours)[2:], truth[2:], strict=True):
        assert ((actual - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize('gamma', [0.0, 1.0])
def test_stochastic_depth_draws_what_the_plain_block_draws(gamma):
    """Under autocast too, where the first block of a stage gets half precision; and its factor is not rounded."""
    cfg = dict(norm_cfg=dict(type='LN'), act_cfg=dict(type='GELU'), linear_pw_conv=True, use_grn=False)
    cfg |= dict(drop_path_rate=0.7, layer_scale_init_value=gamma, with_cp=False, recompute=False)
    dropped = {}
    x = torch.randn(4096, 8, 1, 1).bfloat16()  # enough for a draw that was rounded to show
    for name in ('plain', 'fused'):
        torch.manual_seed(0)
        block = ConvNeXtBlock(8, fused=name == 'fused', **cfg).train()
        torch.manual_seed(1)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            dropped[name] = [(a == b).all().item() for a, b in zip(block(x), x, strict=True)]
    assert dropped['plain'] == dropped['fused'] and 0 < sum(dropped['plain']) < len(x)

    seen = []
    run = ops.channel_mlp
    try:
        ops.channel_mlp = lambda settings, tensors: seen.append(tensors.factor) or run(settings, tensors)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            block(x)
    finally:
        ops.channel_mlp = run
    torch.testing.assert_close(seen[0].max(), torch.tensor(1 / 0.3))


@pytest.mark.parametrize('drop_path_rate', [0.0, 0.4])
@pytest.mark.parametrize(
    'sbp_cfg', [dict(), dict(recompute=True), dict(recompute='block', skip_dropped_images=True)], ids=str
)
def test_a_model_that_is_bf16_throughout(sbp_cfg, drop_path_rate):
    options = TINY | dict(gap_before_final_norm=False, drop_path_rate=drop_path_rate)
    model = SBPConvNeXt(**options, sbp_cfg=sbp_cfg).bfloat16().train()
    outs = model(torch.randn(2, 3, 64, 64).bfloat16())
    assert {out.dtype for out in outs} == {torch.bfloat16}
    sum(out.sum() for out in outs).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('sbp_cfg', [dict(), dict(implementation='reference')], ids=str)
def test_a_vit_that_is_bf16_throughout(sbp_cfg):
    arch = dict(embed_dims=16, num_layers=3, num_heads=2)
    model = SBPViT(arch, img_size=64, drop_path_rate=0.4, out_indices=(1, 2), sbp_cfg=sbp_cfg).bfloat16().train()
    outs = model(torch.randn(3, 3, 64, 64).bfloat16())
    assert {out.dtype for out in outs} == {torch.bfloat16}
    sum(out.sum() for out in outs).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('scale', [0.0, 1.0, 5000.0])
def test_a_channel_without_gradient_in_fp16_throughout(scale):
    generator = torch.Generator().manual_seed(0)
    shapes = [(8,), (8,), (32, 8), (32,), (8, 32), (8,), (8,)]
    weights = [(0.3 * torch.randn(shape, generator=generator)).half().requires_grad_() for shape in shapes]
    x, shortcut, grad = torch.randn(3, 2, 16, 8, generator=generator).half()
    grad[..., 3] *= scale
    out = ops.channel_mlp(ops.MLPSettings(recompute=True), ops.MLPTensors(x, shortcut, *weights))
    found = torch.autograd.grad(out, weights, grad)
    full = [w.detach().double().requires_grad_() for w in weights]
    plain = ops.MLPSettings(implementation='reference')
    exact = torch.autograd.grad(
        ops.channel_mlp(plain, ops.MLPTensors(x.double(), shortcut.double(), *full)), full, grad.double()
    )
    for value, expected in zip(found, exact, strict=True):
        assert relative_error(value, expected) < 0.02


@pytest.mark.parametrize('recompute', [True, 'block'])
def test_whole_backbone_against_finite_differences(recompute):
    """With every position kept, the gradient of the recomputing backbone is the derivative of its output."""
    arch = dict(depths=[1, 1], channels=[3, 4])
    cfg = dict(keep_ratio=1.0, recompute=recompute)
    model = SBPConvNeXt(arch, out_indices=[0, 1], gap_before_final_norm=False, sbp_cfg=cfg).double().train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 3, 8, 12, dtype=torch.float64)
    names, leaves = zip(*model.named_parameters(), strict=True)

    def run(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_arguments_that_used_to_end_in_other_errors():
    with pytest.raises(ValueError, match='frozen_stages=9 must be a whole number from 0 to 4'):
        SBPConvNeXt(frozen_stages=9)
    with pytest.raises(ValueError, match='arch=None must have "depths"'):
        SBPConvNeXt(arch=None)
    with pytest.raises(ValueError, match='lists 0 ratios'):
        SBPConvNeXt(sbp_cfg=dict(blocks=(0, 0, 0, 0), keep_ratio=[]))
