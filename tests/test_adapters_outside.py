"""Modules of detectors from outside and of Grounding DINO, against their own code in fp64."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from mmdet.models.layers.brick_wrappers import FrozenBatchNorm2d
from mmdet.models.utils.vlfuse_helper import SingleScaleBiAttentionBlock
from oracles import DEVICE, assert_near, loss_of

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.common import layouts
from sbp_mmdet.plan.memory import saved_bytes

TOLERANCE = 1e-11


def filled(module, seed=0, scale=0.4):
    """Gives all parameters ordinary values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale)
    return module.double().to(DEVICE).train()


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


def results(module, inputs, *args, **kwargs):
    """Outputs of a module, and gradients of inputs and parameters, by name."""
    outs = module(*inputs, *args, **kwargs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    leaves = {f'input {i}': x for i, x in enumerate(inputs)} | dict(module.named_parameters())
    gradients = torch.autograd.grad(loss_of(outs), [*leaves.values()], allow_unused=True)
    return {f'output {i}': o.detach() for i, o in enumerate(outs)} | dict(zip(leaves, gradients, strict=True))


def assert_lean_is_exact(module, inputs, *args, **kwargs):
    """Compares a module with its changed copy, which has to store less and name nothing that it left."""
    lean = copy.deepcopy(module)
    report = apply_lean(lean, verify=False)
    assert_near(results(lean, inputs, *args, **kwargs), results(module, inputs, *args, **kwargs), TOLERANCE)
    stored = [
        saved_bytes(lambda m=m: m(*inputs, *args, **kwargs), exclude=[*m.parameters(), *m.buffers(), *inputs])
        for m in (lean, module)
    ]
    return report, stored[0] / stored[1]


# Grounding DINO.


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(layouts.CHUNK, torch.device(DEVICE).type, 1)


def fusion(dropout=0.0, **keys):
    return filled(SingleScaleBiAttentionBlock(16, 16, 32, 4, dropout=dropout, **keys))


@pytest.mark.parametrize('masked', ['image', 'text', 'both', None])
def test_fusion_of_image_and_text_is_exact_in_chunks(small_chunks, masked):
    block, inputs = fusion(), (drawn(2, 1500, 16), drawn(2, 7, 16, seed=1))
    image = torch.rand(2, 1500, generator=torch.Generator().manual_seed(2)) > 0.4
    text = torch.rand(2, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    image[0, :700] = True  # nothing is seen in the first chunk
    masks = dict(attention_mask_v=image.to(DEVICE) if masked in ('image', 'both') else None)
    masks['attention_mask_l'] = text.to(DEVICE) if masked in ('text', 'both') else None
    report, stored = assert_lean_is_exact(block, inputs, **masks)
    assert report.changed and stored < 0.2


def test_fusion_hides_text_by_a_mask_of_numbers(small_chunks):
    block, inputs = fusion(), (drawn(2, 700, 16), drawn(2, 7, 16, seed=1))
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1]], device=DEVICE)
    report, _ = assert_lean_is_exact(block, inputs, attention_mask_l=mask)
    assert report.changed


def test_fusion_clamps_scores_as_its_own_code():
    block, inputs = fusion(), (drawn(1, 40, 16), drawn(1, 7, 16, seed=1))
    with torch.no_grad():  # scores of about 50000, on either side of it
        for layer in (block.attn.v_proj, block.attn.l_proj):
            layer.bias[::8] = (50000 * 8**0.5) ** 0.5
            layer.weight[::8] = 0
        query, key = block.attn.v_proj(block.layer_norm_v(inputs[0])), block.attn.l_proj(block.layer_norm_l(inputs[1]))
        scores = (query.view(1, 40, 4, 8).transpose(1, 2) @ key.view(1, 7, 4, 8).permute(0, 2, 3, 1)) * 8**-0.5
    assert 0.2 < (scores > 50000).double().mean() < 0.8
    lean = copy.deepcopy(block)
    apply_lean(lean, verify=False)
    assert_near(results(lean, inputs), results(block, inputs), 1e-7)  # the scores have lost five digits


@pytest.mark.parametrize('side', [0, 1])
def test_fusion_draws_the_same_dropout_in_the_backward_pass(small_chunks, side):
    block, (x, text) = fusion(dropout=0.3), (drawn(2, 1500, 16), drawn(2, 7, 16, seed=1))
    apply_lean(block, verify=False)

    def loss(x, text):
        torch.manual_seed(5)
        return loss_of(block(x, text)[side : side + 1])

    gradients = torch.autograd.grad(loss(x, text), [x, text])
    for i, gradient in enumerate(gradients):
        step = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(DEVICE)
        ends = [[t + sign * 1e-5 * step if j == i else t for j, t in enumerate((x, text))] for sign in (1, -1)]
        expected = (loss(*ends[0]) - loss(*ends[1])) / 2e-5
        assert (gradient * step).sum().item() == pytest.approx(expected.item(), abs=1e-6 * gradient.norm().item())
    torch.manual_seed(6)
    assert not torch.equal(block(x, text)[side], block(x, text)[side])


def test_fusion_with_stochastic_depth_or_other_widths_keeps_its_own_code():
    for block in (fusion(drop_path=0.5), filled(SingleScaleBiAttentionBlock(16, 24, 32, 4))):
        with pytest.raises(ValueError, match='SingleScaleBiAttentionBlock'):
            apply_lean(block, verify=False)


# Norms.


def test_layer_with_frozen_batch_norm_is_one_operation():
    layer = filled(ConvModule(3, 8, 3, padding=1, norm_cfg=dict(type=FrozenBatchNorm2d), act_cfg=dict(type='ReLU')))
    assert isinstance(layer.norm, FrozenBatchNorm2d)
    for name, buffer in layer.norm.named_buffers():
        buffer.copy_(drawn(8, seed=len(name)).detach().abs() + 0.2)
    report, _ = assert_lean_is_exact(layer, (drawn(2, 3, 9, 11),))
    assert report.changed
