"""Mask heads with ``exact`` store no map behind the upsampling, and have the gradients of their own code in fp64."""

import copy

import pytest
import torch
from test_chunked_heads import NUMBER, compare, head_of, maps, step
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters.mask_head import LeanMaskHead
from sbp_mmdet.plan.memory import SavedByPart

FROZEN = {
    'nothing': [],
    'upsampling': ['upsample'],
    'logits': ['conv_logits'],
    'both': ['upsample', 'conv_logits'],
    'convolutions': ['convs'],
}


def changed(plain, preset='exact'):
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    return lean


@pytest.mark.parametrize('frozen', FROZEN)
@pytest.mark.parametrize('name', ['mask', 'mask, group norm'])
@pytest.mark.parametrize('number', [NUMBER, 64, 5])
def test_gradients_are_those_of_the_heads_own_code(name, number, frozen):
    plain = head_of(name)
    for part in FROZEN[frozen]:
        plain.get_submodule(part).requires_grad_(False)
    lean = changed(plain)
    assert isinstance(lean, LeanMaskHead) and lean.runs_lean()
    for needs_x in (True, False):
        compare(step(lean, maps(name, number), needs_x), step(plain, maps(name, number), needs_x))


def stored(head, x):
    """Returns bytes that are saved for the backward pass, without parameters and the input."""
    saved = SavedByPart()
    with saved.hooks():
        out = head(x.clone().requires_grad_())  # noqa: F841  keeps the graph
    return sum(saved.count([x, *head.parameters()]).values())


def test_stored_bytes():
    """Plain stores x, an output of each convolution, and that of the upsampling with four times as many places."""
    plain, x = head_of('mask').float(), maps('mask').float()
    assert stored(plain, x) / x.nbytes == 1 + 2 + 4
    assert stored(changed(plain), x) / x.nbytes == 1 + 2


def test_autocast():
    plain, x = head_of('mask').float(), maps('mask').float()
    lean = changed(plain)
    with torch.autocast('cpu', torch.bfloat16):
        (expected, own), (found, ours) = step(plain, x), step(lean, x)
    assert torch.equal(found[0], expected[0])
    for name, grad in own.items():
        assert ours[name].dtype == grad.dtype == torch.float32
        assert (ours[name] - grad).norm() <= 0.02 * grad.norm(), name


@pytest.mark.parametrize('late', [False, True])
@pytest.mark.parametrize('part', ['upsample', 'relu', 'conv_logits'])
def test_hooks_run_once(part, late):
    plain, calls = head_of('mask'), []

    def hook(module, args, out):
        calls.append(len(out))
        return out * 0.5

    if not late:
        plain.get_submodule(part).register_forward_hook(hook)
    lean = changed(plain)
    if late:
        step(lean, maps('mask'))
        for model in (plain, lean):
            model.get_submodule(part).register_forward_hook(hook)
    found = step(lean, maps('mask'))
    assert calls == [NUMBER]
    compare(found, step(plain, maps('mask')))


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
    plain = head_of('mask')
    change(plain)
    compare(step(changed(plain), maps('mask')), step(plain, maps('mask')))
