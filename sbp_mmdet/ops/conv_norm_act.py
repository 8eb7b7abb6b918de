"""Convolution, norm, residual and activation, which store one map (see :func:`conv_norm`)."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .common.activations import Activation
from .common.autograd_function import Form, Operation, gradients_of, in_precision
from .common.handed_maps import hand_on, made_here
from .common.kept_maps import KeptMap, addend, keep, kept
from .common.layouts import memory_format
from .common.precision import accumulator, multiplied

__all__ = ['ConvNormSettings', 'ConvNormTensors', 'conv_norm']

aten = torch.ops.aten
NORMS = ('none', 'fixed', 'batch', 'group')
# Least factor of gradients in fp16, see `_convolve_backward`: dW' may be 128 times as large as fp16's numbers then, and
# gradients of 1e-5 still have digits.
_LEAST_FACTOR = 2.0**-7
_IMAGE = 4  # channels, at the most, of an image: it is in memory anyway, and eight bits would be a copy of it


@dataclasses.dataclass(frozen=True)
class ConvNormSettings:
    """Of :func:`conv_norm`.

    Attributes:
        form (Form): How it stores; ``dropped`` has no meaning here. Default: ``Form()``.
        stride, padding, dilation (tuple[int, int]): Of the convolution. Default: 1, 0, 1.
        groups (int): Of the convolution. Default: 1.
        norm (str): 'none'; 'fixed': batch norm in evaluation mode; 'batch': in training mode; 'group'. Default: 'none'.
        eps (float): Added to the variance. Default: 1e-5.
        momentum (float): Share of the new batch in the running statistics. Default: 0.1.
        num_groups (int): Of the group norm. Default: 1.
        process_group (Any): Who shares the statistics of 'batch' (SyncBN). None: nobody. Default: None.
        activation (Activation | None): None: none. Default: None.
        dtype (torch.dtype | None): What the convolution runs in. None: autocast's, or as ``x`` is. Default: None.

    Raises:
        ValueError: For an unknown norm.
    """

    form: Form = Form()
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    norm: str = 'none'
    eps: float = 1e-5
    momentum: float = 0.1
    num_groups: int = 1
    process_group: Any = None
    activation: Activation | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.norm not in NORMS:
            raise ValueError(f'norm={self.norm!r} is unknown; choose one of {", ".join(NORMS)}')


class ConvNormTensors(NamedTuple):
    """What :func:`conv_norm` works on.

    Attributes:
        x (Tensor): Shape (N, C, H, W).
        weight (Tensor): Shape (D, C / groups, ...).
        bias (Tensor | None): Of the convolution, shape (D,). Default: None.
        norm_weight, norm_bias (Tensor | None): Of the norm, shape (D,). Default: None.
        running_mean, running_var (Tensor | None): Of the batch norm, shape (D,); written to by 'batch'. Default: None.
        residual (Tensor | None): Added before the activation; shape of the output. Default: None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    residual: Tensor | None = None


ConvNormGradients = gradients_of(ConvNormTensors, 'running_mean', 'running_var')


class Statistics(NamedTuple):
    """Of a norm: mean and reciprocal deviation, shape (D,), of a group norm (N, num_groups)."""

    mean: Tensor
    rstd: Tensor


class Factors(NamedTuple):
    """Of a fixed norm, for each channel: its factor and its reciprocal deviation, in full precision."""

    scale: Tensor
    rstd: Tensor


class ConvNormSaved(NamedTuple):
    """What the backward pass needs.

    Attributes:
        tensors (ConvNormTensors): Parameters; of the maps nothing.
        shape (tuple[int, ...]): Of ``x``.
        dtypes (tuple[torch.dtype, torch.dtype | None]): Of ``x`` and of the residual.
        input (KeptMap | None): ``x``, where a gradient of a weight needs it.
        normed (KeptMap | None): What the norm was applied to, but for 'fixed'.
        active (KeptMap | None): What the activation was applied to. None: ``normed`` says it.
        statistics (Statistics | None): Of the norm.
        factors (Factors | None): Of 'fixed'. They take less than it takes to make them again.
        count (Tensor | None): Positions that the statistics of a SyncBN are over.
    """

    tensors: ConvNormTensors
    shape: tuple[int, ...]
    dtypes: tuple
    input: KeptMap | None
    normed: KeptMap | None
    active: KeptMap | None
    statistics: Statistics | None
    factors: Factors | None
    count: Tensor | None


def conv_norm(settings: ConvNormSettings, tensors: ConvNormTensors) -> Tensor:
    """act(norm(conv(x)) + residual).

    The fused form folds 'fixed' into the convolution, and again in the backward pass. It scales the map instead where
    the weight is larger, and in half precision's forward pass. It stores its input where a weight needs a gradient,
    which is what the layer before has stored already, and

    - behind 'none' and 'fixed' nothing, for ReLU the output, for another activation what it was applied to;
    - behind 'batch' and 'group' the convolution's output, with two numbers a channel. Norm and activation run again.
      With residuals the output is stored too in every third layer, in eight bits in each.

    With int8 these are rounded to eight bits. The forward pass stays as it is, and behind 'none' and 'fixed' with ReLU
    or no activation so do the gradients of ``x``, the residual and the biases.

    Args:
        settings (ConvNormSettings): See there.
        tensors (ConvNormTensors): See there.

    Returns:
        Tensor: Shape (N, D, H', W').
    """
    if settings.form.implementation == 'reference':
        return _reference(settings, tensors)
    return _conv_norm(in_precision(settings, tensors.x), tensors)


def _reference(settings, tensors):
    x, weight, bias, norm_weight, norm_bias, mean, var, residual = tensors
    x = F.conv2d(x, weight, bias, settings.stride, settings.padding, settings.dilation, settings.groups)
    if settings.norm == 'group':
        x = F.group_norm(x, settings.num_groups, norm_weight, norm_bias, settings.eps)
    elif settings.norm != 'none':
        train = settings.norm == 'batch'
        x = F.batch_norm(x, mean, var, norm_weight, norm_bias, train, settings.momentum, settings.eps)
    if residual is not None:
        x = x + residual
    return x if settings.activation is None else settings.activation(x)


def forward(settings: ConvNormSettings, tensors: ConvNormTensors, needs) -> tuple[Tensor, ConvNormSaved]:
    """See :mod:`sbp_mmdet.ops.common.autograd_function`."""
    s, t = settings, tensors
    x = t.x.to(s.dtype)
    storage = 'native' if x.shape[1] <= _IMAGE else s.form.storage
    source = kept(t.x, x, storage) if _weight_needed(s, needs) else None
    full = x.dtype == accumulator(x)
    factors = factors_of_fixed(s, t) if s.norm == 'fixed' and (full or any(needs)) else None
    z = convolve(s, t, x, factors)
    u, statistics, count = z, None, None
    if s.norm in ('batch', 'group'):
        u, statistics, count = normalise(s, t, z)
    if t.residual is not None:
        u = u.add_(t.residual)
    if any(needs):
        y, normed, active = _activate(s, t, z, u, statistics)
    else:
        y, normed, active = u if s.activation is None else s.activation(u, inplace=True), None, None
        made_here(y)
    parameters = t._replace(x=None, residual=None, running_var=None)
    parameters = parameters if factors else parameters._replace(running_mean=None)
    dtypes = t.x.dtype, None if t.residual is None else t.residual.dtype
    return y, ConvNormSaved(parameters, t.x.shape, dtypes, source, normed, active, statistics, factors, count)


def _weight_needed(s, needs):
    """Whether the convolution's weight, folded or not, needs a gradient."""
    return needs.weight or (s.norm == 'fixed' and needs.norm_weight)


def factors_of_fixed(s, t):
    rstd = (t.running_var.to(accumulator(t.running_var)) + s.eps).rsqrt()
    return Factors(rstd if t.norm_weight is None else rstd * t.norm_weight, rstd)


def convolve(s, t, x, factors):
    """The convolution, with the fixed norm."""
    geometry, fixed = (s.stride, s.padding, s.dilation, s.groups), s.norm == 'fixed'
    # In half precision the fold would round the shift, which is the same at all positions, and CUDA adds a bias in a
    # pass of its own anyway.
    half = x.dtype != accumulator(x)
    if not fixed or half or not _folds(t.weight, x.numel() // (x.shape[1] * s.stride[0] * s.stride[1])):
        z = F.conv2d(x, t.weight.to(s.dtype), None if t.bias is None else t.bias.to(s.dtype), *geometry)
        norm = t.running_mean, t.running_var, t.norm_weight, t.norm_bias
        return F.batch_norm(z, *norm, eps=s.eps) if fixed else z
    scale = factors.scale
    before = torch.zeros_like(scale) if t.norm_bias is None else t.norm_bias
    before = before if t.bias is None else torch.addcmul(before, t.bias, scale)
    shift = torch.addcmul(before, t.running_mean, scale, value=-1).to(s.dtype)
    return F.conv2d(x, multiplied(t.weight, scale.view(-1, 1, 1, 1), s.dtype), shift, *geometry)


def _folds(weight, positions):
    """Whether it costs less to scale a weight than the map that it makes."""
    return weight.numel() <= positions * len(weight)


def _activate(s, t, z, u, statistics):
    """The output, and what is kept of z and of u; may write to u."""
    act, storage, normed = s.activation, s.form.storage, None
    if statistics is not None:
        scale, shift = affine_of_norm(s, t, statistics, z.shape[1])
        # In eight bits the sum's sign, which is the mask, would not be that of what is read.
        residual = addend(t.residual, storage) if t.residual is not None and storage == 'native' else None
        by_sign = t.residual is None and act is not None and act.by_sign
        normed = keep(z, storage, (-shift / scale).nan_to_num(0) if by_sign else None)
        if t.residual is None or residual is not None:
            normed = normed._replace(scale=scale, shift=shift, activation=act, residual=residual)
            y = u if act is None else act(u, inplace=True)
            hand_on(y, normed)
            return y, normed, None
    if act is None:
        return u, normed, None
    if act.name == 'relu':  # its output has the signs, and the next layer needs it
        y = act(u, inplace=True)
        active = keep(y, storage, positive=True)._replace(activation=act)
        if active.values is y:
            return y, normed, active
    else:
        y = act(u)
        active = keep(u, storage, threshold=0 if act.by_sign else None)._replace(activation=act)
    hand_on(y, active)
    return y, normed, active


def backward(settings: ConvNormSettings, saved: ConvNormSaved, grad: Tensor, needs):
    """See :mod:`sbp_mmdet.ops.common.autograd_function`."""
    s, found = settings, {}
    if s.activation is not None:
        grad = (saved.active or saved.normed).activation_backward(grad)
    if needs.residual:
        found['residual'] = grad.to(saved.dtypes[1])
    if saved.statistics is not None:
        grad, found['norm_weight'], found['norm_bias'] = normalise_backward(s, saved, grad, needs)
    return ConvNormGradients(**found, **convolve_backward(s, saved, grad, needs))


def convolve_backward(s, saved, grad, needs):
    """Returns the gradients of the input and of all that is folded into the convolution, by name.

    With a fixed norm y = k * conv(x, W) + shift, k = norm_weight * rstd for each channel, the products are

        dx = conv^T(dy, k W)   and   dW' = dy^T x,   from which   dW = k dW'   and   dk = sum(W * dW') - mean * sum(dy).

    One map less is computed where k is multiplied with the weight and not with dy. In fp16, dW' may be infinite where
    k is small and plain code's k dW' is not, and k W has no digits left where all k are small. So dy is multiplied by
    k there, as in plain code, or by a small constant c where k is smaller, and the weight by k / max(k, c).
    """
    t, fixed = saved.tensors, s.norm == 'fixed'
    grad = grad.to(s.dtype)
    needs_weight = _weight_needed(s, needs)
    needs_bias = needs.bias or (fixed and (needs.norm_weight or needs.norm_bias))
    x = grad.new_empty(1).expand(saved.shape) if saved.input is None else saved.input.load(grad.dtype)
    scale = saved.factors.scale if fixed else None
    folds = fixed and _folds(t.weight, grad.numel() // max(grad.shape[1], 1))
    factor, rest = None, scale  # of dy in both products, and what is left of k
    if fixed and grad.dtype == torch.float16:
        factor = scale.clamp_min(_LEAST_FACTOR)
        rest, folds = scale / factor, True
    rows = grad if factor is None else multiplied(grad, factor.view(-1, 1, 1), s.dtype)
    weight = multiplied(t.weight, rest.view(-1, 1, 1, 1), s.dtype) if folds else t.weight.to(s.dtype)
    scaled = multiplied(grad, scale.view(-1, 1, 1), s.dtype) if fixed and not folds else rows
    sums = needs_bias and needs_weight and grad.dtype == accumulator(grad)  # with the weight's gradient, in one pass
    geometry = s.stride, s.padding, s.dilation, False, [0, 0], s.groups
    which, sizes = [needs.x and scaled is rows, needs_weight, sums], [len(weight)] if sums else None
    dx, dweight, dbias = aten.convolution_backward(rows, x, weight, sizes, *geometry, which)
    if needs.x and scaled is not rows:
        dx, _, _ = aten.convolution_backward(scaled, x, weight, None, *geometry, [True, False, False])
    if needs_bias and not sums:
        dbias = grad.sum((0, 2, 3), dtype=accumulator(grad))
    found = dict(x=dx.to(saved.dtypes[0]) if needs.x else None)
    if fixed:
        return found | _fixed_gradients(saved, needs, dweight, dbias, factor, rest)
    if needs.weight:
        found['weight'] = dweight.to(t.weight.dtype)
    if needs.bias:
        found['bias'] = dbias.to(t.bias.dtype)
    return found


def _fixed_gradients(saved, needs, dweight, dbias, factor, rest):
    """Returns the gradients of convolution and fixed norm from ``factor`` * dW' and the sums of dy."""
    t, (scale, rstd), found = saved.tensors, saved.factors, {}
    if needs.norm_weight:
        # Products of two precisions are in the higher one, without a copy.
        dscale = (dweight * t.weight).sum((1, 2, 3), dtype=scale.dtype)
        dscale = dscale if factor is None else dscale.div_(factor)
        dscale = torch.addcmul(dscale, dbias, t.running_mean, value=-1)
        dscale = dscale if t.bias is None else dscale.addcmul_(dbias, t.bias)
        found['norm_weight'] = dscale.mul_(rstd).to(t.norm_weight.dtype)
    if needs.norm_bias:
        found['norm_bias'] = dbias.to(t.norm_bias.dtype)
    if needs.weight:
        rest = rest.view(-1, 1, 1, 1)
        found['weight'] = (dweight.mul_(rest) if dweight.dtype == rest.dtype else dweight * rest).to(t.weight.dtype)
    if needs.bias:
        found['bias'] = (dbias * scale).to(t.bias.dtype)
    return found


def normalise(s, t, z):
    """The normalised map, in memory of its own, the statistics, and what a SyncBN's are over."""
    if s.norm == 'group':
        # CUDA's kernel takes one precision, and its autocast runs group norm in full.
        z = _for_group_norm(z if t.norm_weight is None or not z.is_cuda else z.to(t.norm_weight.dtype))
        sizes = *z.shape[:2], z.shape[2] * z.shape[3]
        out, mean, rstd = torch.native_group_norm(z, t.norm_weight, t.norm_bias, *sizes, s.num_groups, s.eps)
        return out, Statistics(mean, rstd), None
    if s.process_group is not None:
        return _normalise_together(s, t, z)
    if z.numel() == z.shape[1]:
        raise ValueError(f'Expected more than 1 value per channel when training, got input size {z.shape}')
    running = t.running_mean, t.running_var
    out, mean, rstd = torch.native_batch_norm(z, t.norm_weight, t.norm_bias, *running, True, s.momentum, s.eps)
    return out, Statistics(mean, rstd), None


def _for_group_norm(z):
    """The layouts that torch's kernel takes."""
    return z.contiguous(memory_format=memory_format(z)) if z.device.type == 'cpu' else z.contiguous()


def affine_of_norm(s, t, statistics, channels):
    """Scale and shift of a norm with these statistics, broadcastable."""
    mean, scale = (n.to(accumulator(n)) for n in statistics)
    if s.norm == 'group':
        mean, scale = (n.repeat_interleave(channels // s.num_groups, 1) for n in (mean, scale))
    if t.norm_weight is not None:
        scale = scale * t.norm_weight
    shift = -mean * scale if t.norm_bias is None else t.norm_bias - mean * scale
    return scale.view(-1, channels, 1, 1), shift.view(-1, channels, 1, 1)


def normalise_backward(s, saved, grad, needs):
    """Gradients of a norm's input, weight and bias."""
    t, (mean, rstd) = saved.tensors, saved.statistics
    z = saved.normed.before_norm(grad.dtype)
    which = [True, needs.norm_weight, needs.norm_bias]
    if s.norm == 'group':
        z = _for_group_norm(z)
        grad = grad.contiguous(memory_format=memory_format(z))
        sizes = *z.shape[:2], z.shape[2] * z.shape[3], s.num_groups
        return aten.native_group_norm_backward(grad, z, mean, rstd, t.norm_weight, *sizes, which)
    if s.process_group is not None:
        return _normalise_together_backward(s, saved, z, grad)
    return aten.native_batch_norm_backward(grad, z, t.norm_weight, None, None, mean, rstd, True, s.eps, which)


def _normalise_together(s, t, z):
    """Batch norm with the statistics of all processes; one of them may have no image."""
    full, channels = accumulator(z), z.shape[1]
    var, mean = torch.var_mean(z.to(full), (0, 2, 3), correction=0)
    count = torch.full_like(mean[:1], z.numel() // channels)
    mine = torch.cat([mean.nan_to_num(0), var.nan_to_num(0), count])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(s.process_group))]
    dist.all_gather(every, mine, s.process_group)
    means, variances, counts = torch.stack(every).split([channels, channels, 1], 1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    if t.running_mean is not None:
        t.running_mean.lerp_(mean.to(t.running_mean.dtype), s.momentum)
        t.running_var.lerp_((var * count / (count - 1)).to(t.running_var.dtype), s.momentum)
    statistics = Statistics(mean, (var + s.eps).rsqrt())
    scale, shift = affine_of_norm(s, t, statistics, channels)
    return torch.addcmul(shift, z, scale).to(z.dtype), statistics, count


def _normalise_together_backward(s, saved, z, grad):
    """As :func:`normalise_backward`; gradients of the parameters are this process's own."""
    t, (mean, rstd) = saved.tensors, (n.view(1, -1, 1, 1) for n in saved.statistics)
    full = grad.to(rstd.dtype)
    xhat = (z - mean) * rstd
    sums = torch.stack([(full * xhat).sum((0, 2, 3)), full.sum((0, 2, 3))])
    dweight, dbias = sums.clone()
    dist.all_reduce(sums, group=s.process_group)
    sums = (sums / saved.count).view(2, 1, -1, 1, 1)
    dz = (full - sums[1] - xhat * sums[0]) * rstd
    dz = dz if t.norm_weight is None else dz * t.norm_weight.view(1, -1, 1, 1)
    return dz.to(grad.dtype), dweight if t.norm_weight is not None else None, dbias if t.norm_bias is not None else None


_conv_norm = Operation('ConvNorm', forward, backward, ConvNormGradients)
