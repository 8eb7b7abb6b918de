"""Beginning and end of forward passes: what is drawn is gone when they end."""

import copy

import pytest
import torch
from cases import make_lean_copy
from oracles import relative_error
from pass_models import build_convs, compute_gradients, random_images
from torch import nn

from sbp_mmdet import SBPConvNeXt, remove_lean
from sbp_mmdet.ops.common.stochastic_depth import run_on_images


def backbone(rate=0.0, **options):
    arch = dict(depths=[1, 1, 2, 1], channels=[8, 12, 16, 20])
    options = dict(out_indices=[3], gap_before_final_norm=False, layer_scale_init_value=1.0) | options
    torch.manual_seed(0)
    return SBPConvNeXt(arch=arch, drop_path_rate=rate, **options).double().train()


@pytest.mark.parametrize(('preset', 'rate', 'sampler'), [('exact', 0.5, 'grid'), ('sbp', 0.0, 'random')])
def test_a_call_past_the_hooks_is_a_pass_of_its_own(preset, rate, sampler):
    """Wrappers call ``backbone.forward(x)``. It draws anew, and draws the same as ``backbone(x)`` would."""
    gradients = []
    for call in ('__call__', 'forward'):
        torch.manual_seed(7)
        model = make_lean_copy(backbone(rate), preset, **(dict(sampler=sampler) if preset == 'sbp' else {}))
        torch.manual_seed(7)
        gradients.append(
            [compute_gradients(model, random_images(4, 3, 64, 64), getattr(model, call)) for _ in range(4)]
        )
    assert all(map(torch.equal, *gradients))
    assert len({g.abs().sum().item() for g in gradients[0]}) == 4


class Takes(nn.Module):
    """A user's backbone whose argument is not the images."""

    def __init__(self, how, **options):
        super().__init__()
        body, self.how = backbone(**options), how
        self.downsample_layers, self.stages, self.gap_before_final_norm = body.downsample_layers, body.stages, True

    def forward(self, batch, metas=None):
        x = dict(dict=lambda: batch['inputs'], list=lambda: batch[1], metas=lambda: metas)[self.how]()
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        return x

    def given(self, x):
        if self.how == 'dict':
            return (dict(mask=torch.ones(len(x), *x.shape[-2:]), inputs=x),)
        return ([[dict(scale=1)], x],) if self.how == 'list' else ('name', x)


@pytest.mark.parametrize('how', ['dict', 'list', 'metas'])
@pytest.mark.parametrize(('preset', 'rate'), [('exact', 0.0), ('exact', 0.5), ('sbp', 0.0)])
def test_images_may_be_any_argument(how, preset, rate):
    model, x = make_lean_copy(Takes(how, rate=rate).train(), preset), random_images(2, 3, 64, 64)
    gradients = compute_gradients(model, x, lambda x: model(*model.given(x)))
    assert gradients.isfinite().all() and gradients.any()
    if preset == 'exact' and not rate:
        plain = Takes(how).train()
        plain.load_state_dict(model.state_dict())
        assert relative_error(gradients, compute_gradients(plain, x, lambda x: plain(*plain.given(x)))) < 1e-10


def test_images_that_nobody_sees_are_an_error_that_says_so():
    model = make_lean_copy(Takes('dict').train(), 'sbp')
    with pytest.raises(ValueError, match='pass the images to it as an argument'):
        model(type('Batch', (), dict(__getitem__=lambda self, key: random_images(2, 3, 64, 64)))())


@pytest.mark.parametrize(('preset', 'rate'), [('exact', 0.5), ('sbp', 0.0)])
def test_a_default_device(preset, rate):
    """Draws are made on the CPU, whatever the default device of new tensors is."""
    model, x = make_lean_copy(backbone(rate), preset), random_images(2, 3, 64, 64)
    torch.manual_seed(3)
    expected = model(x)[0]
    other = make_lean_copy(backbone(rate), preset)
    torch.set_default_device('meta')
    try:
        torch.manual_seed(3)
        actual = other(x)[0]
    finally:
        torch.set_default_device(None)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize('preset', ['exact', 'int8', 'sampled'])
def test_nothing_is_put_around_a_backbone_that_draws_nothing(preset):
    plain = backbone()
    model = make_lean_copy(plain, preset, verify=False)
    assert type(model) is type(plain) and not model._forward_pre_hooks and vars(model).keys() == vars(plain).keys()


@pytest.mark.parametrize('model', [lambda: backbone(0.5), build_convs])
def test_nothing_is_left_when_it_is_removed(model):
    plain = model()
    changed = make_lean_copy(plain)
    compute_gradients(changed, random_images(2, 3, 64, 64))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in changed.modules())
    remove_lean(changed)
    for a, b in zip(changed.modules(), plain.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys()


def test_a_layer_alone_is_refused_and_an_open_pass_ends_with_an_exception():
    model, x = make_lean_copy(backbone(), 'sbp'), random_images(2, 3, 64, 64)
    with pytest.raises(ValueError, match='call the backbone, not the layer'):
        model.stages[0][0](random_images(2, 8, 16, 16))
    hook = model.stages[1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()
    with pytest.raises(ValueError, match='call the backbone, not the layer'):
        model.stages[0][0](random_images(2, 8, 16, 16))
    assert compute_gradients(model, x).any()


def test_a_pass_inside_of_a_pass():
    """The outer pass continues with its own draws."""
    model, x = make_lean_copy(backbone(), 'sbp', sampler='random'), random_images(1, 3, 64, 64)
    torch.manual_seed(2)
    alone = compute_gradients(model, x)
    other = make_lean_copy(backbone(), 'sbp', sampler='random')
    inner = []

    def nested(*args):
        if not inner:
            inner.append(None)
            inner.append(other(x + 1))

    other.stages[1].register_forward_hook(nested)
    torch.manual_seed(2)
    assert relative_error(compute_gradients(other, x), alone) < 1e-12 and len(inner) == 2


@pytest.mark.parametrize('passes', [1, 2])
def test_copies_draw_for_themselves(passes):
    """A copy that runs, as in the verification of the first step, does not affect the draws of the model."""
    found = []
    for check in (False, True):
        torch.manual_seed(5)
        model = make_lean_copy(backbone(), 'sampled')
        torch.manual_seed(5)
        if check:
            compute_gradients(copy.deepcopy(model), random_images(1, 3, 64, 64))
        found.append([compute_gradients(model, random_images(1, 3, 64, 64)) for _ in range(passes)])
    assert all(map(torch.equal, *found))


def test_images_that_pass_by_whatever_the_strides_of_the_gradient():
    block = nn.Conv2d(4, 4, 1).double()
    x, kept = random_images(3, 4, 5, 5).requires_grad_(), torch.tensor([True, False, True])
    for grad in (random_images(3, 4, 5, 5, seed=1), random_images(5, 5, 4, 3, seed=1).permute(3, 2, 0, 1)):
        out = run_on_images(block, x, kept, block.parameters())
        expected = torch.where(kept.view(-1, 1, 1, 1), block(x), x)
        names = (x, *block.parameters())
        for a, b in zip(*(torch.autograd.grad(o, names, grad) for o in (out, expected)), strict=True):
            assert relative_error(a, b) < 1e-12
