"""What one layer hands to the next within a forward pass is gone when it ends, and known code alone hands it on."""

import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import count_model_bytes, make_lean_copy
from mmcv.cnn import ConvModule
from mmdet.models.backbones import CSPNeXt
from mmdet.models.layers import CSPLayer
from mmdet.models.necks import FPN
from mmengine.registry import init_default_scope
from oracles import relative_error
from pass_models import build_convs, compute_gradients, random_images
from stand_ins import define_in_module
from torch import nn
from torch.utils.checkpoint import checkpoint

from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.kept_maps import add
from sbp_mmdet.ops.common.shared_maps import Scope
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm


class HiddenWrite(nn.Module):
    """Module of a user that writes to a feature map in a way that autograd does not notice."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == 'data':
            x.data.clamp_(max=0.5)
        elif self.how == 'new data':
            x.data = x.data.clamp(max=0.5)
        elif self.how == 'numpy':
            x.detach().numpy().clip(max=0.5, out=x.detach().numpy())
        elif self.how == 'dlpack':
            torch.from_dlpack(x.detach()).data.clamp_(max=0.5)
        elif self.how == 'view':
            x.view(-1).data.clamp_(max=0.5)
        return x


HOWS = ['data', 'new data', 'numpy', 'dlpack', 'view']


@pytest.mark.parametrize('how', HOWS)
@pytest.mark.parametrize('place', ['module', 'hook', 'pre-hook', 'forward', 'global hook', 'later'])
def test_what_is_written_past_autograd_is_seen(how, place):
    """User code between two layers may write to the map; the gradients are those of torch."""
    plain, write = build_convs(), HiddenWrite(how)
    if place == 'module':
        plain.insert(1, write)

    def interfere(model):
        if place in ('hook', 'later'):
            model[0].register_forward_hook(lambda module, args, out: write(out))
        elif place == 'pre-hook':
            model[1].register_forward_pre_hook(lambda module, args: (write(args[0]),))
        elif place == 'forward':
            own = model[0].forward
            model[0].forward = lambda x: write(own(x))

    if place != 'later':
        interfere(plain)
    changed = make_lean_copy(plain)
    if place == 'forward':
        del changed[0].forward  # a copy of the model would call the original
        interfere(changed)
    if place == 'later':
        compute_gradients(changed, random_images())
        compute_gradients(plain, random_images())
        interfere(plain), interfere(changed)
    handle = None
    if place == 'global hook':
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: write(out) if isinstance(module, ConvModule) else None
        )
    try:
        assert (
            relative_error(compute_gradients(changed, random_images()), compute_gradients(plain, random_images()))
            < 1e-10
        )
    finally:
        if handle is not None:
            handle.remove()


class Users(nn.Module):
    """A user's class with layers of torch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = build_convs(2), build_convs(1)
        self.second[0] = ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='BN'), act_cfg=dict(type='SiLU')).double()

    def forward(self, x):
        x = self.first(x)
        x.data.mul_(2)
        return self.second(x)


def test_a_users_class_ends_the_sharing_of_maps():
    plain = Users().train()
    assert (
        relative_error(
            compute_gradients(make_lean_copy(plain), random_images()), compute_gradients(plain, random_images())
        )
        < 1e-10
    )


def test_known_code_shares_maps_and_a_hook_ends_it_until_it_is_removed():
    """The second of two layers with SiLU reads its input from the map that the first one saves, so one map less is
    stored."""
    model, x = make_lean_copy(build_convs(2)), random_images()
    one_map = 2 * 8 * 32 * 32 * 8
    least = count_model_bytes(model, x)
    hook = model[0].register_forward_hook(lambda *args: None)
    assert count_model_bytes(model, x) - least >= one_map
    hook.remove()
    assert count_model_bytes(model, x) == least


@pytest.mark.parametrize('how', ['numpy', 'data', 'copy_'])
@pytest.mark.parametrize('preset', ['exact', 'int8'])
def test_an_input_buffer_that_is_filled_again(how, preset):
    plain = build_convs(1)
    model, buffer = make_lean_copy(plain, preset), torch.zeros(2, 3, 32, 32)
    for step in range(2):
        images = random_images(seed=step, dtype=torch.float32)
        if how == 'numpy':
            buffer.numpy()[:] = images.numpy()
        else:
            (buffer.data if how == 'data' else buffer).copy_(images)
        with torch.autocast('cpu', torch.bfloat16):
            actual, expected = (
                compute_gradients(m, buffer, lambda x, m=m: m.float()(x).float()) for m in (model, plain)
            )
        assert relative_error(actual, expected) < 0.02


def test_nothing_hangs_on_tensors():
    model, x = make_lean_copy(build_convs()), random_images()
    before = set(dir(x))
    out = model(x)
    assert set(dir(x)) == before and set(dir(out.detach())) == set(dir(out))
    assert not vars(out) and not vars(x)
    assert torch.equal(pickle.loads(pickle.dumps(out.detach())), out)


@pytest.mark.parametrize('place', ['forward', 'backbone'])
def test_an_exception_leaves_nothing(place):
    """The maps of earlier layers are freed, and the next pass works as usual."""
    plain = CSPNeXt('P5', widen_factor=0.125, deepen_factor=0.167).double()
    plain.train()
    model, x = make_lean_copy(plain), random_images(2, 3, 64, 64)
    alive = []

    def fail(module, args, out):
        alive.append(weakref.ref(args[0]))
        raise KeyboardInterrupt

    hook = model.stage4.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(x) if place == 'forward' else model.forward(x)
    hook.remove()
    gc.collect()
    assert all(ref() is None for ref in alive)
    model.load_state_dict(plain.state_dict())
    assert relative_error(compute_gradients(model, x), compute_gradients(plain, x)) < 1e-10


def test_a_checkpoint_of_the_user_within_the_model():
    """The recomputation in the backward pass stores as much as the first run."""
    plain = CSPLayer(8, 8, num_blocks=2, use_cspnext_block=True).double().train()
    model, x, found = make_lean_copy(plain), random_images(2, 8, 16, 16), []
    for m in (model, plain):
        block = m.blocks[1]
        block.forward = lambda x, own=block.forward: checkpoint(own, x, use_reentrant=False)
        found.append(compute_gradients(m, x))
    assert relative_error(*found) < 1e-10


@pytest.mark.parametrize('reentrant', [True, False])
def test_a_checkpoint_around_the_model(reentrant):
    plain = CSPLayer(8, 8, num_blocks=2, use_cspnext_block=True).double().train()
    model, x = make_lean_copy(plain), random_images(2, 8, 16, 16).requires_grad_()
    gradients = compute_gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert relative_error(gradients, compute_gradients(plain, x)) < 1e-10


def test_a_known_block_with_a_checkpoint_of_its_own():
    """A block without an adapter uses mmdet's with_cp; its convolutions are changed and run in a checkpoint."""
    from mmdet.models.layers.csp_layer import ChannelAttention

    class Checkpointing(ChannelAttention):
        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    define_in_module(ChannelAttention.__module__, Checkpointing)
    block = Checkpointing(8)
    block.inner = nn.Sequential(*list(build_convs(3))[1:])
    plain = nn.Sequential(build_convs(1)[0], block, *list(build_convs(2))[1:]).double().train()
    model = make_lean_copy(plain)
    assert relative_error(compute_gradients(model, random_images()), compute_gradients(plain, random_images())) < 1e-10


class Pyramid(nn.Module):
    """Pyramid of two maps of equal size with a layer on each, and a layer on the first map and a coordinate."""

    def __init__(self):
        super().__init__()
        init_default_scope('mmdet')
        self.first, self.last = build_convs(1)[0], ConvModule(9, 8, 1, act_cfg=dict(type='SiLU'))
        self.neck = FPN([8, 8], 8, num_outs=2)
        self.layers = nn.ModuleList(ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='BN')) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        p, q = self.neck((x, x.flip(3)))
        coordinate = torch.linspace(-1, 1, p.shape[3], dtype=p.dtype).expand_as(p[:, :1])
        return self.layers[0](p) + self.layers[1](q), self.last(torch.cat([p, coordinate], 1))


@pytest.mark.parametrize(('preset', 'most'), [('exact', 1e-10), ('exact_min', 1e-10), ('int8', 0.01)])
def test_outputs_of_one_node_are_told_apart(preset, most):
    """The levels of a feature pyramid are outputs of one node of the graph."""
    define_in_module(CSPLayer.__module__, Pyramid)
    plain = Pyramid().double().train()
    model = make_lean_copy(plain, preset)
    assert relative_error(compute_gradients(model, random_images()), compute_gradients(plain, random_images())) < most


def test_two_models_in_turns_and_one_inside_of_another():
    plain = [build_convs(3), build_convs(3, act=dict(type='ReLU'))]
    models, x = [make_lean_copy(m) for m in plain], random_images()
    for both in (models, plain):
        both[0][1].register_forward_hook(lambda module, args, out, other=both[1]: out + other(x))
    for _ in range(2):
        assert relative_error(compute_gradients(models[0], x), compute_gradients(plain[0], x)) < 1e-10
        assert relative_error(compute_gradients(models[1], x), compute_gradients(plain[1], x)) < 1e-10


def test_a_graph_that_is_kept():
    """A second backward pass through the same graph follows other passes of the same model."""
    plain = CSPLayer(8, 8, num_blocks=2, use_cspnext_block=True).double().train()
    model, x, found = make_lean_copy(plain), random_images(2, 8, 16, 16), []
    for m in (model, plain):
        loss = m(x).square().sum()
        m(x + 1)
        for _ in range(2):
            loss.backward(retain_graph=True)
        found.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
    assert relative_error(*found) < 1e-10


@pytest.mark.parametrize('what', ['shortcut', 'x', 'sum'])
def test_writes_between_a_sum_and_the_next_layer(what):
    """The next layer uses the sum of the forward pass, even if it was written to afterwards."""
    first, second = (
        random_images(4, 4, 1, 1, seed=1),
        random_images(4, 4, 1, 1, seed=2).requires_grad_(),
    )  # the first one is frozen
    gradients = []
    for run in ('lean', 'plain'):
        base = random_images(2, 4, 8, 8, seed=3).requires_grad_() * 1
        with Scope():
            if run == 'lean':
                x = conv_norm(ConvNormSettings(activation=Activation('silu')), ConvNormTensors(base, first))
                out = add(x, base, 'native')
            else:
                x = F.silu(F.conv2d(base, first))
                out = x + base
            dict(shortcut=base, x=x, sum=out)[what].detach().mul_(3)
            out = (
                conv_norm(ConvNormSettings(), ConvNormTensors(out, second)) if run == 'lean' else F.conv2d(out, second)
            )
        gradients.append(torch.autograd.grad(out.square().sum(), second)[0])
    assert relative_error(*gradients) < 1e-12


def test_compiled_blocks_with_shortcuts():
    plain = CSPLayer(8, 8, num_blocks=1, use_cspnext_block=True).double().train()
    model, x = make_lean_copy(plain), random_images(2, 8, 16, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend='eager')
    for _ in range(2):
        assert relative_error(compute_gradients(model, x, compiled), compute_gradients(plain, x)) < 1e-10
