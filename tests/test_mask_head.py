"""Mask heads with ``exact`` store no map behind the upsampling, and have the gradients of their own code in fp64."""

import pytest
import torch
from cases import make_lean_copy
from test_chunked_heads import NUMBER, assert_same, build_head, random_maps, run_step, sum_over_chunks
from torch import nn

from sbp_mmdet.adapters.mask_head import LeanMaskHead
from sbp_mmdet.plan.memory import SavedByPart

FROZEN = {
    'nothing': [],
    'upsampling': ['upsample'],
    'logits': ['conv_logits'],
    'both': ['upsample', 'conv_logits'],
    'convolutions': ['convs'],
}


@pytest.mark.parametrize('frozen', FROZEN)
@pytest.mark.parametrize('name', ['mask', 'mask, group norm'])
@pytest.mark.parametrize('number', [NUMBER, 64, 5])
def test_gradients_are_those_of_the_heads_own_code(name, number, frozen):
    plain = build_head(name)
    for part in FROZEN[frozen]:
        plain.get_submodule(part).requires_grad_(False)
    lean = make_lean_copy(plain)
    assert isinstance(lean, LeanMaskHead) and lean.runs_lean()
    for needs_x in (True, False):
        assert_same(
            run_step(lean, random_maps(name, number), needs_x), run_step(plain, random_maps(name, number), needs_x)
        )


def count_stored_bytes(head, x):
    """Return the bytes that are saved for the backward pass, without parameters and the input."""
    saved = SavedByPart()
    with saved.hooks():
        out = head(x.clone().requires_grad_())  # noqa: F841  keeps the graph
    return sum(saved.count([x, *head.parameters()]).values())


def test_stored_bytes():
    """The plain head stores x, the output of each convolution, and that of the upsampling with four times as many
    positions."""
    plain, x = build_head('mask').float(), random_maps('mask').float()
    assert count_stored_bytes(plain, x) / x.nbytes == 1 + 2 + 4
    assert count_stored_bytes(make_lean_copy(plain), x) / x.nbytes == 1 + 2


def test_autocast():
    """Two weights get gradients in chunks of RoIs, the others of all. In bfloat16, CPUs sum these differently.

    With torch 2.1, the plain head's biases are further from those in fp32 than ours are.
    """
    plain, x = build_head('mask').float(), random_maps('mask').float()
    lean, full = make_lean_copy(plain), run_step(plain, x)[1]
    with torch.autocast('cpu', torch.bfloat16):
        (expected, own), (actual, ours) = run_step(plain, x), run_step(lean, x)
        in_chunks = sum_over_chunks(plain, x)[1]
    assert torch.equal(actual[0], expected[0])
    for name, grad in own.items():
        assert ours[name].dtype == grad.dtype == torch.float32
        reference = in_chunks[name] if name in ('upsample.weight', 'conv_logits.weight') else grad
        is_nearer = (ours[name] - full[name]).norm() <= 0.7 * (grad - full[name]).norm()
        assert is_nearer or (ours[name] - reference).norm() <= 0.01 * reference.norm(), name


@pytest.mark.parametrize('late', [False, True])
@pytest.mark.parametrize('part', ['upsample', 'relu', 'conv_logits'])
def test_hooks_run_once(part, late):
    plain, calls = build_head('mask'), []

    def hook(module, args, out):
        calls.append(len(out))
        return out * 0.5

    if not late:
        plain.get_submodule(part).register_forward_hook(hook)
    lean = make_lean_copy(plain)
    if late:
        run_step(lean, random_maps('mask'))
        for model in (plain, lean):
            model.get_submodule(part).register_forward_hook(hook)
    result = run_step(lean, random_maps('mask'))
    assert calls == [NUMBER]
    assert_same(result, run_step(plain, random_maps('mask')))


class _Half(nn.ConvTranspose2d):
    def forward(self, x):
        return super().forward(x) * 0.5


def _subclass(head):
    head.upsample.__class__ = _Half


def _bilinear(head):
    head.upsample, head.upsample_method = nn.Upsample(scale_factor=2, mode='bilinear'), 'bilinear'


def _other_activation(head):
    head.relu = nn.Tanh()


@pytest.mark.parametrize('change', [_subclass, _bilinear, _other_activation])
def test_other_layers_run_their_own_code(change):
    plain = build_head('mask')
    change(plain)
    assert_same(run_step(make_lean_copy(plain), random_maps('mask')), run_step(plain, random_maps('mask')))
