"""Table of the operations for the tests: their inputs, the operation, and its definition in plain torch.

The definition of what drops positions is that of SBP: ``torch.where(kept, f(x), f(x).detach())``.
"""

from collections.abc import Callable
from typing import NamedTuple

import all_ops as ops
import torch
import torch.nn.functional as F
from cases import count_stored_bytes
from hypothesis import strategies as st
from mmdet.models.backbones.swin import ShiftWindowMSA
from oracles import apply_sbp

from sbp_mmdet.ops.common.precision import store
from sbp_mmdet.stochastic_backprop.masks import Positions, positions, token_positions

Form = ops.Form
HEADS, WINDOW = 3, 3
HEIGHT, WIDTH = 5, 6  # default size of maps; inputs of downsampling are twice as large
MAPS = ('x', 'shortcut')
GIVEN = ('factor', 'positions', 'conv', 'heads', 'index')  # arguments of the operation that get no gradient
KINDS = st.sampled_from(['empty', 'full', 'few', 'half', 'half', None])


def seeded_normal(seed, dtype):
    """Return a function that makes tensors of normal numbers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, mean=0.0, std=1.0):
        return (mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    return normal


def mlp_inputs(
    seed=0, n=2, c=8, d=20, height=HEIGHT, width=WIDTH, *, affine=True, gamma=1.0, dtype=torch.float64, half=None
):
    """Return the tensors of channel_mlp by name, and the convolution that computes their x.

    ``half`` is the data type in which the convolution runs. If ``None``, it runs in ``dtype``.
    """
    normal, kind = seeded_normal(seed, dtype), half or dtype
    conv = ops.Conv(
        store(normal(n, c, height, width, std=2.0).to(kind), 'native'),
        *(normal(c, 1, 7, 7, std=1 / 7), normal(c)),
        ops.ConvSettings((1, 1), (3, 3), (1, 1), c, kind),
    )
    tensors = dict(
        x=conv.run().to(dtype),
        shortcut=normal(n, c, height, width),
        norm_weight=normal(c, mean=1.0, std=0.3) if affine else None,
        norm_bias=normal(c, std=0.3) if affine else None,
        weight1=normal(d, c, std=c**-0.5),
        bias1=normal(d, std=0.1),
        weight2=normal(c, d, std=d**-0.5),
        bias2=normal(c, std=0.1),
        gamma=None if gamma is None else normal(c, mean=gamma, std=0.3 * gamma),
    )
    return tensors, conv


def tokens_of_mlp(**sizes):
    tensors, _ = mlp_inputs(**sizes)
    return tensors | {name: tensors[name].flatten(2).mT.contiguous() for name in MAPS}


def grn_inputs(seed=0, d=20, **sizes):
    tensors, normal = mlp_inputs(seed, d=d, **sizes)[0], seeded_normal(seed + 1, sizes.get('dtype', torch.float64))
    return tensors | dict(grn_weight=normal(d), grn_bias=normal(d))


def downsample_inputs(seed=0, n=2, c=6, d=9, height=2 * HEIGHT, width=2 * WIDTH, **sizes):
    tensors, _ = mlp_inputs(seed, n, c, d, height, width, **sizes)
    weight = torch.cat([tensors['weight1'].roll(i, 1)[:, :, None] * (1 + i) for i in range(4)], 2) / 4
    inputs = {name: tensors[name] for name in ('x', 'norm_weight', 'norm_bias')}
    return inputs | dict(weight=weight.view(d, c, 2, 2), bias=tensors['bias1'])


def norm_linear_inputs(*, bias=True, **sizes):
    tensors = tokens_of_mlp(**sizes)
    return {name: tensors[name] for name in ('x', 'norm_weight', 'norm_bias')} | dict(
        weight=tensors['weight1'], bias=tensors['bias1'] if bias else None
    )


def norm_inputs(**sizes):
    tensors, _ = mlp_inputs(**sizes)
    return dict(x=tensors['x'], weight=tensors['norm_weight'], bias=tensors['norm_bias'])


def attention_inputs(
    seed=0, n=2, c=12, height=HEIGHT, width=WIDTH, *, prefix=1, dtype=torch.float64, bias=True, affine=True, gamma=1.0
):
    """Return the tensors of an attention layer with three heads, on ``prefix`` tokens in front of those of a map."""
    normal = seeded_normal(seed, dtype)
    return dict(
        x=normal(n, prefix + height * width, c),
        norm_weight=normal(c, mean=1.0, std=0.3) if affine else None,
        norm_bias=normal(c, std=0.3) if affine else None,
        qkv_weight=normal(3 * c, c, std=1.5 * c**-0.5),
        qkv_bias=normal(3 * c, std=0.3) if bias else None,
        proj_weight=normal(c, c, std=c**-0.5),
        proj_bias=normal(c, std=0.3),
        gamma=normal(c, mean=gamma, std=0.3 * gamma) if gamma else None,
    )


def window_inputs(seed=0, *, dtype=torch.float64, **sizes):
    tensors = attention_inputs(seed, prefix=0, dtype=dtype, **sizes)
    del tensors['gamma']
    return tensors | dict(table=seeded_normal(seed + 1, dtype)((2 * WINDOW - 1) ** 2, HEADS))


# Definitions. Under autocast the norm is in fp32, as CUDA has it.


def plain_norm(x, weight, bias):
    with torch.autocast('cpu', enabled=False):
        return F.layer_norm(x if x.dtype == torch.float64 else x.float(), x.shape[-1:], weight, bias, 1e-6)


def plain_norm2d(x, weight, bias):
    return plain_norm(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def plain_mlp(x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, **options):
    mask, factor, approximate = (options.get(name) for name in ('mask', 'factor', 'approximate'))

    def branch(x):
        x = plain_norm(x, norm_weight, norm_bias)
        x = F.linear(F.gelu(F.linear(x, weight1, bias1), approximate=approximate or 'none'), weight2, bias2)
        return x if gamma is None else x * gamma

    tokens = x if x.dim() == 3 else x.flatten(2).mT
    out = branch(tokens) if mask is None else apply_sbp(branch, tokens, mask.view(-1, 1))
    out = out if factor is None else out * factor[:, None, None]
    return shortcut + (out if x.dim() == 3 else out.mT.reshape(x.shape))


def plain_grn(
    x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, grn_weight, grn_bias, factor=None
):
    a = F.gelu(F.linear(plain_norm2d(x, norm_weight, norm_bias).permute(0, 2, 3, 1), weight1, bias1))
    norm = a.float().norm(dim=(1, 2), keepdim=True) if a.dtype != torch.float64 else a.norm(dim=(1, 2), keepdim=True)
    a = (1 + grn_weight * norm / (norm.mean(-1, keepdim=True) + 1e-6)) * a + grn_bias  # norm's derivative at 0 is 0
    out = F.linear(a, weight2, bias2)
    out = (out if gamma is None else out * gamma).permute(0, 3, 1, 2)
    return shortcut + (out if factor is None else out * factor[:, None, None, None])


def plain_norm_linear(x, norm_weight, norm_bias, weight, bias, mask=None):
    def f(x):
        if x.dim() == 3:
            return F.linear(plain_norm(x, norm_weight, norm_bias), weight, bias)
        return F.conv2d(plain_norm2d(x, norm_weight, norm_bias), weight, bias, stride=2)

    if mask is None:
        return f(x)
    return apply_sbp(f, x, mask if x.dim() == 4 else mask.view(-1, 1))


def plain_attention(
    x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, gamma, *, mode, keep=None, **options
):
    """Compute the appendix's equations literally: dropped entries of the attention map are detached."""
    (_, tokens, c), heads, factor = x.shape, options.get('heads'), options.get('factor')
    kept = torch.ones(tokens, dtype=torch.bool)
    if keep is not None:
        kept = torch.zeros(tokens, dtype=torch.bool).index_fill_(0, keep, True)
    qkv = F.linear(plain_norm(x, norm_weight, norm_bias), qkv_weight, qkv_bias)
    q, k, v = qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / (c // HEADS) ** 0.5
    if mode == 'qkv':
        scores = torch.where(kept, scores, scores.detach())
        v = torch.where(kept[:, None], v, v.detach())
    out = scores.softmax(-1).to(v.dtype) @ v
    parts = torch.einsum('nhtd,chd->nhtc', out, proj_weight.view(c, HEADS, -1).to(out.dtype))
    if gamma is not None:
        parts, proj_bias = parts * gamma, proj_bias * gamma
    if heads is not None:
        chosen = torch.zeros(HEADS, dtype=torch.bool).index_fill_(0, heads, True)
        parts = torch.where(chosen[:, None, None], parts, parts.detach())
    branch = parts.sum(1) + proj_bias
    branch = branch if factor is None else branch * factor[:, None, None]
    return x + torch.where(kept[:, None], branch, branch.detach())


def build_window_attention(shift, bias=True):
    """Return mmdet's attention in windows."""
    drop = dict(type='DropPath', drop_prob=0)
    return ShiftWindowMSA(4 * HEADS, HEADS, WINDOW, shift, qkv_bias=bias, dropout_layer=drop)


INDEX = build_window_attention(0).w_msa.relative_position_index


def plain_windows(
    x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, table, *, size, shift, factor=None, **_
):
    """Run mmdet's module with these tensors in place of its parameters."""
    state = {'qkv.weight': qkv_weight, 'qkv.bias': qkv_bias, 'proj.weight': proj_weight, 'proj.bias': proj_bias}
    state |= {'relative_position_bias_table': table}
    state = {f'w_msa.{name}': t for name, t in state.items() if t is not None}
    normed = plain_norm(x, norm_weight, norm_bias)
    out = torch.func.functional_call(build_window_attention(shift, qkv_bias is not None), state, (normed, size))
    return x + (out if factor is None else out * factor[:, None, None])


# The table.


def make_mask(kind, height=HEIGHT, width=WIDTH, seed=0):
    """Return a mask by its name, or ``None`` if all positions are kept."""
    if kind is None:
        return None
    share = {'empty': 0.0, 'full': 1.1, 'few': 0.2, 'half': 0.5}[kind]
    return torch.rand(height, width, generator=torch.Generator().manual_seed(seed)) < share


def get_positions(mask, prefix=0) -> Positions | None:
    return None if mask is None else token_positions(positions(mask), prefix)


def kept_positions(kind):
    mask = make_mask(kind)
    return dict(positions=get_positions(mask)), dict(mask=mask)


def kept_tokens(kind):
    keep = get_positions(make_mask(kind), prefix=1)
    return dict(positions=keep), dict(keep=None if keep is None else keep.keep)


def kept_heads(kind):
    heads = {None: None, 'full': torch.arange(HEADS), 'few': torch.tensor([1]), 'half': torch.tensor([0, 2])}[kind]
    return dict(heads=heads), dict(heads=heads)


class Case(NamedTuple):
    """Operation under test, with its inputs and its definition.

    Attributes:
        inputs (Callable): Maps sizes and other options to the named tensors, and to more arguments of the operation.
        run (Callable): Maps a form and options to the operation, as a function of named tensors.
        plain (Callable): Maps options to the definition, as a function of named tensors.
        kept (Callable | None): Maps a kind of mask to options of operation and definition. If ``None``, all positions
            are kept.
        reference (bool): Whether the operation has a reference form.
    """

    inputs: Callable
    run: Callable
    plain: Callable
    kept: Callable | None = None
    reference: bool = True

    @property
    def kinds(self):
        """Kinds of masks that the operation supports."""
        return [None] if self.kept is None else [None, 'half', 'few', 'full'] + ['empty'] * (self.kept != kept_heads)

    def both(self, kind=None, form=Form(), given=None, **options):  # noqa: B008
        """Return operation and definition, as functions of named tensors."""
        own, truth = (dict(), dict()) if kind is None else self.kept(kind)
        truth |= {name: value for name, value in options.items() if name in ('factor', 'approximate')}
        return self.run(form, **own, **options, **(given or {})), self.plain(**truth)


def wrap_operation(run, settings, tensors, **fixed):
    """Return an operation as a function of form and options, which returns a function of named tensors."""

    def of_form(form=Form(), **options):  # noqa: B008
        options = fixed | options
        given = {name: options.pop(name) for name in GIVEN if name in options}
        own = settings(form, **options)
        return lambda **named: run(own, tensors(**named, **given))

    return of_form


def wrap_definition(f, **fixed):
    return lambda **options: lambda **named: f(**named, **fixed, **options)


def without_others(inputs):
    return lambda **sizes: (inputs(**sizes), {})


def with_convolution(inputs):
    return lambda **sizes: (inputs(**sizes), dict(conv=mlp_inputs(**sizes)[1]))


channel_mlp = wrap_operation(ops.channel_mlp, ops.MLPSettings, ops.MLPTensors)
grn_mlp = wrap_operation(ops.grn_mlp, ops.GRNSettings, ops.GRNTensors)
norm_linear = wrap_operation(ops.norm_linear, ops.NormLinearSettings, ops.NormLinearTensors)
layer_norm = wrap_operation(ops.layer_norm, ops.NormSettings, ops.NormTensors)


def attention_case(mode, kept):
    run = wrap_operation(ops.attention, ops.AttentionSettings, ops.AttentionTensors, num_heads=HEADS, mode=mode)
    return Case(without_others(attention_inputs), run, wrap_definition(plain_attention, mode=mode), kept)


def window_case(shift, size=(HEIGHT, WIDTH)):
    fixed = dict(num_heads=HEADS, window=WINDOW, scale=0.5, shift=shift, size=size, eps=1e-6, index=INDEX)
    run = wrap_operation(ops.window_attention, ops.WindowSettings, ops.WindowTensors, **fixed)
    return Case(
        without_others(window_inputs), run, wrap_definition(plain_windows, shift=shift, size=size), reference=False
    )


_mlp = dict(run=channel_mlp, plain=wrap_definition(plain_mlp), kept=kept_positions)
_grn = dict(run=grn_mlp, plain=wrap_definition(plain_grn), reference=False)
_linear = dict(run=norm_linear, plain=wrap_definition(plain_norm_linear), kept=kept_positions)
_norm = dict(run=layer_norm, plain=wrap_definition(plain_norm2d))
CASES = {
    'mlp': Case(without_others(lambda **sizes: mlp_inputs(**sizes)[0]), **_mlp),
    'mlp with convolution': Case(with_convolution(lambda **sizes: mlp_inputs(**sizes)[0]), **_mlp),
    'mlp of tokens': Case(without_others(tokens_of_mlp), **_mlp),
    'grn': Case(without_others(grn_inputs), **_grn),
    'grn with convolution': Case(with_convolution(grn_inputs), **_grn),
    'downsample': Case(without_others(downsample_inputs), **_linear),
    'norm_linear': Case(without_others(norm_linear_inputs), **_linear),
    'layer_norm': Case(without_others(norm_inputs), **_norm),
    'layer_norm with convolution': Case(with_convolution(norm_inputs), **_norm),
    'qkv': attention_case('qkv', kept_tokens),
    'query': attention_case('query', kept_tokens),
    'head': attention_case('head', kept_heads),
    'windows': window_case(0),
    'shifted windows': window_case(1),
}
TAKES_FACTOR = [name for name in CASES if name.split()[0] not in ('downsample', 'norm_linear', 'layer_norm')]


def get_fused_mlp(positions=None, conv=None, **options):
    """Return channel_mlp in the fused form, as a function of named tensors."""
    return channel_mlp(Form(), positions=positions, conv=conv, **options)


# Functions that run operations and compare them.


def output_gradient(out):
    """Return a gradient with a different weight for each entry."""
    return torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape).to(out.dtype)


def differentiate(f, tensors, trainable=None):
    """Return the output of f(**tensors) and the gradients of the trainable tensors."""
    trainable = [name for name, t in tensors.items() if t is not None and (trainable is None or name in trainable)]
    leaves = {name: t if t is None else t.detach().requires_grad_(name in trainable) for name, t in tensors.items()}
    out = f(**leaves)
    grads = torch.autograd.grad(out, [leaves[name] for name in trainable], output_gradient(out), materialize_grads=True)
    return dict.fromkeys(tensors) | {'out': out.detach()} | dict(zip(trainable, grads, strict=True))


def cast_tensors(tensors, dtype):
    return {name: t if t is None else t.to(dtype) for name, t in tensors.items()}


def run_under_autocast(f, dtype):
    def run(**tensors):
        with torch.autocast('cpu', dtype):
            return f(**tensors)

    return run


def run_after_autocast_convolution(f, dtype):
    """Run f under autocast, on an x in half precision, as a convolution under autocast returns it."""
    return run_under_autocast(lambda x, **tensors: f(x=x.to(dtype), **tensors), dtype)


def count_stored_bytes_of(f, tensors, trainable=None, given=None):
    """Return the bytes that f saves for the backward pass, without parameters and tensors that are saved anyway."""
    leaves = {
        n: t if t is None else t.detach().requires_grad_(trainable is None or n in trainable)
        for n, t in tensors.items()
    }
    conv = (given or {}).get('conv')
    known = [*(t for n, t in leaves.items() if n not in MAPS and t is not None), INDEX]
    return count_stored_bytes(
        lambda: f(**leaves), known + ([conv.input.values, conv.weight, conv.bias] if conv else [])
    )
