"""Arguments of the fused operations, the same operations by the definition of SBP, and by Algorithm 1."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from oracles import where_sbp

from sbp_mmdet import ops, sbp
from sbp_mmdet.analysis import saved_bytes
from sbp_mmdet.masks import positions
from sbp_mmdet.ops.storage import store

MLP = ('x', 'shortcut', 'norm_weight', 'norm_bias', 'weight1', 'bias1', 'weight2', 'bias2', 'gamma')
DOWNSAMPLE = ('x', 'norm_weight', 'norm_bias', 'weight', 'bias')
MAPS = ('x', 'shortcut')
KINDS = st.sampled_from(['empty', 'full', 'few', 'half', 'half', None])


def mlp_inputs(seed=0, n=2, c=8, d=20, height=5, width=6, *, affine=True, gamma=1.0, dtype=torch.float64):
    """Arguments of channel_mlp by name, and the convolution that its x comes from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, mean=0.0, std=1.0):
        return (mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    conv = ops.Conv(
        store(normal(n, c, height, width, std=2.0), 'native', (2, 3)),
        *(normal(c, 1, 7, 7, std=1 / 7), normal(c)),
        ops.ConvSettings((1, 1), (3, 3), (1, 1), c, dtype),
    )
    tensors = dict(
        x=conv.run(),
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


def plain_mlp(x, shortcut, norm_weight, norm_bias, w1, b1, w2, b2, gamma, *, mask, factor=None, approximate='none'):
    """The definition; under autocast with the norm in fp32, as CUDA has it."""

    def branch(x):
        x = plain_norm(x.permute(0, 2, 3, 1), norm_weight, norm_bias)
        x = F.linear(F.gelu(F.linear(x, w1, b1), approximate=approximate), w2, b2)
        x = x if gamma is None else x * gamma
        x = x if factor is None else x * factor[:, None, None, None]
        return x.permute(0, 3, 1, 2)

    return shortcut + where_sbp(branch, x, mask)


def plain_norm(x, weight, bias):
    with torch.autocast('cpu', enabled=False):
        return F.layer_norm(x if x.dtype == torch.float64 else x.float(), x.shape[-1:], weight, bias, 1e-6)


def algorithm1_mlp(x, shortcut, norm_weight, norm_bias, w1, b1, w2, b2, gamma, *, keep, factor, approximate):
    def f(x):
        x = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, 1e-6)
        x = F.linear(F.gelu(F.linear(x, w1, b1), approximate=approximate), w2, b2)
        return x if gamma is None else x * gamma

    branch = sbp(f, x.flatten(2).transpose(1, 2), keep).transpose(1, 2).view(shortcut.shape)
    return shortcut + (branch if factor is None else branch * factor[:, None, None, None])


def downsample_inputs(seed=0, n=2, c=6, c_out=9, height=8, width=6, *, affine=True, dtype=torch.float64):
    tensors, _ = mlp_inputs(seed, n, c, c_out, height, width, affine=affine, dtype=dtype)
    weight = torch.cat([tensors['weight1'].roll(i, 1)[:, :, None] * (1 + i) for i in range(4)], 2) / 4
    inputs = {name: tensors[name] for name in ('x', 'norm_weight', 'norm_bias')}
    return inputs | dict(weight=weight.view(c_out, c, 2, 2), bias=tensors['bias1'])


def plain_norm2d(x, weight, bias):
    return plain_norm(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def plain_downsample(x, norm_weight, norm_bias, weight, bias, *, mask):
    def f(x):
        return F.conv2d(plain_norm2d(x, norm_weight, norm_bias), weight, bias, stride=2)

    return where_sbp(f, x, mask)


def differentiate(f, tensors, trainable=None):
    """Output of f(**tensors) and the gradients of the trainable ones; a missing tensor has gradient None."""
    trainable = [name for name, t in tensors.items() if t is not None and (trainable is None or name in trainable)]
    leaves = {name: t if t is None else t.detach().requires_grad_(name in trainable) for name, t in tensors.items()}
    out = f(**leaves)
    weight = torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, [leaves[name] for name in trainable], weight, materialize_grads=True)
    return dict.fromkeys(tensors) | {'out': out.detach()} | dict(zip(trainable, grads, strict=True))


def cast(tensors, dtype):
    return {name: t if t is None else t.to(dtype) for name, t in tensors.items()}


def plain(f, **options):
    """An oracle as a function of named tensors."""
    return lambda **tensors: f(*tensors.values(), **options)


def fused_mlp(positions, recompute, conv=None, *, factor=None, **settings):
    """channel_mlp as a function of named tensors; recompute 'conv' runs the convolution again, too."""
    settings = ops.MLPSettings(recompute=bool(recompute), **dict(dropped=_by_default(positions)) | settings)
    given = dict(factor=factor, positions=positions, conv=conv if recompute == 'conv' else None)
    return lambda **tensors: ops.channel_mlp(settings, ops.MLPTensors(**tensors, **given))


def fused_norm(conv=None, **settings):
    """layer_norm as a function of named tensors."""
    settings = ops.NormSettings(**settings)
    return lambda x, norm_weight, norm_bias: ops.layer_norm(settings, ops.NormTensors(x, norm_weight, norm_bias, conv))


def fused_downsample(positions=None, **settings):
    """downsample as a function of named tensors."""
    settings = ops.NormLinearSettings(**dict(dropped=_by_default(positions)) | settings)
    return lambda **tensors: ops.norm_linear(settings, ops.NormLinearTensors(**tensors, positions=positions))


def _by_default(positions):
    """Positions with neighbours are there for 'nearest', if nothing else is asked for."""
    return 'zero' if positions is None or positions.nearest is None else 'nearest'


def autocast(f, dtype):
    def run(**tensors):
        with torch.autocast('cpu', dtype):
            return f(**tensors)

    return run


def half(f, dtype):
    """f under autocast, on an x that a convolution under autocast made."""
    return autocast(lambda x, **tensors: f(x=x.to(dtype), **tensors), dtype)


def stored(f, tensors, trainable=None, extra=()):
    """Bytes that f saves for the backward pass, parameters and what is stored anyway excepted."""
    leaves = {
        n: t if t is None else t.detach().requires_grad_(trainable is None or n in trainable)
        for n, t in tensors.items()
    }
    return saved_bytes(lambda: f(**leaves), exclude=[*(t for n, t in leaves.items() if n not in MAPS), *extra])


def keep_mask(kind, height, width, seed=0):
    """A mask by name; None: no mask, that is everything."""
    share = {'empty': 0.0, 'full': 1.1, None: 1.1, 'few': 0.2, 'half': 0.5}[kind]
    return torch.rand(height, width, generator=torch.Generator().manual_seed(seed)) < share


def keep_of(kind, mask):
    return None if kind is None else positions(mask)
