"""Convolution, norm, residual and activation as one autograd node, which saves one feature map.

    z = conv(x, W) + b,   u = norm(z) + residual,   y = act(u)

A batch norm in evaluation mode ('fixed') is a factor k = norm_weight / sqrt(running_var + eps) and a shift for each
channel. It is folded into the convolution, norm(conv(x, W) + b) = conv(x, k W) + k (b - running_mean) + norm_bias, so z
is not needed. Norms with statistics of the map ('batch', 'group') need z; from z and the statistics, u is recomputed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.activations import Activation
from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.batch_and_group_norms import Statistics, affine_of_norm, normalise, normalise_backward, zero_of
from .common.fixed_norms import Factors, FixedNorms, gradients_of_fixed
from .common.folded_convolution import convolve, convolve_backward, weight_needed
from .common.kept_maps import KeptMap, keep, keep_input, keep_term
from .common.precision import cast
from .common.shared_maps import mark_as_made_here, share_map
from .common.weight_standardisation import standardise

__all__ = [
    'ConvNormGradients',
    'ConvNormSettings',
    'ConvNormTensors',
    'conv_norm',
]

NORMS = ('none', 'fixed', 'batch', 'group')
_IMAGE = 4  # most channels of an image, which is in memory anyway, so that eight bits would be a second copy


@dataclasses.dataclass(frozen=True)
class ConvNormSettings:
    """Settings of :func:`conv_norm`.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        stride, padding, dilation (tuple[int, int]): Geometry of the convolution, in pixels. Default: (1, 1), (0, 0),
            (1, 1).
        groups (int): Number of groups of the convolution. Default: 1.
        norm (str): 'none', 'fixed' (batch norm in evaluation mode), 'batch' (batch norm in training mode) or 'group'.
            Default: 'none'.
        eps (float): Added to the variance. Default: 1e-5.
        momentum (float): Share of the new batch in the running statistics. Default: 0.1.
        num_groups (int): Number of groups of the group norm. Default: 1.
        process_group (Any): Process group that shares the statistics of 'batch' (SyncBN). If ``None``, each process
            has its own. Default: None.
        activation (Activation | None): Activation. If ``None``, there is none. Default: None.
        dtype (torch.dtype | None): Precision of the convolution. If ``None``, that of autocast, or of ``x``. Default:
            None.
        recompute (bool): Whether the convolution's output is recomputed for the norm, and not saved. Only without an
            activation. Default: False.
        border (tuple[int, int, int, int]): Further zeros on the left, right, upper and lower side of the input, for
            padding that differs between opposite sides. Default: (0, 0, 0, 0).
        standardise (float | None): Number added to the deviation in :mod:`.weight_standardisation`. If ``None``, the
            weight is not standardised. Default: None.

    Raises:
        ValueError: If ``norm`` is unknown, or ``recompute`` is set with an activation.
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
    recompute: bool = False
    border: tuple[int, int, int, int] = (0, 0, 0, 0)
    standardise: float | None = None

    @functools.cached_property
    def without_stride(self) -> 'ConvNormSettings':
        """Return these settings with stride 1."""
        return dataclasses.replace(self, stride=(1, 1))

    def __post_init__(self):
        if self.recompute and self.activation is not None:
            raise ValueError(f'recompute={self.recompute} needs activation=None, because the output is not saved')
        if self.norm not in NORMS:
            raise ValueError(f'norm={self.norm!r} is unknown; choose one of {", ".join(NORMS)}')


class ConvNormTensors(NamedTuple):
    """Inputs of :func:`conv_norm`.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
        weight (Tensor): Weight of the convolution, shape (D, C / groups, kernel height, kernel width).
        bias (Tensor | None): Bias of the convolution, shape (D,). Default: None.
        norm_weight, norm_bias (Tensor | None): Affine part of the norm, shape (D,). Default: None.
        running_mean, running_var (Tensor | None): Running statistics of the batch norm, shape (D,). With 'batch' they
            are updated in place. Default: None.
        residual (Tensor | None): Feature map that is added before the activation, of the output's shape. Default: None.
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


class ConvNormSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        tensors (ConvNormTensors): Parameters, without the feature maps.
        shape (tuple[int, ...]): Shape of ``x``.
        dtypes (tuple[torch.dtype, torch.dtype | None]): Precision of ``x`` and of the residual.
        input (KeptMap | None): ``x``, if the gradient of a weight needs it.
        normed (KeptMap | None): Input z of the norm, for 'batch' and 'group'.
        active (KeptMap | None): Input u of the activation, or the output of a ReLU. If ``None``, u is read from
            ``normed``.
        statistics (Statistics | None): Mean and reciprocal deviation, for 'batch' and 'group'.
        factors (Factors | None): Numbers of a 'fixed' norm.
        extra (Tensor | None): What else the norm's backward pass needs, see :func:`.normalise`.
    """

    tensors: ConvNormTensors
    shape: tuple[int, ...]
    dtypes: tuple
    input: KeptMap | None
    normed: KeptMap | None
    active: KeptMap | None
    statistics: Statistics | None
    factors: Factors | None
    extra: Tensor | None


def conv_norm(settings: ConvNormSettings, tensors: ConvNormTensors) -> Tensor:
    """Compute ``act(norm(conv(x)) + residual)``.

    The fused form folds a 'fixed' norm into the convolution, and folds it again in the backward pass. Where the weight
    is larger than the output, and in the forward pass in half precision, it scales the output instead.

    If a weight needs a gradient, the input is saved, which the layer in front usually saves already. In addition,

    - with the norms 'none' and 'fixed', nothing is saved without an activation, the output for ReLU, and the input of
      the activation for any other activation;
    - with 'batch' and 'group', the convolution's output (unless ``recompute``) and two numbers for each channel are
      saved. Norm and activation are recomputed. With residuals, the output (or the activation's input) of every third
      layer is saved too, or of every layer if storage is 'int8'.

    With storage 'int8' these maps are rounded to eight bits. The output stays exact. So do, with 'none' and 'fixed' and
    ReLU or no activation, the gradients of ``x``, of the residual and of the biases.

    Args:
        settings (ConvNormSettings): Settings.
        tensors (ConvNormTensors): Inputs.

    Returns:
        Tensor: Shape (N, D, H', W').

    Example:
        >>> settings = ConvNormSettings(padding=(1, 1), norm='fixed', activation=Activation('relu'))
        >>> norm = bn.weight, bn.bias, bn.running_mean, bn.running_var
        >>> y = conv_norm(settings, ConvNormTensors(x, conv.weight, None, *norm))
    """
    if settings.form.implementation == 'reference':
        return _reference(settings, tensors)
    return _conv_norm(with_dtype(settings, tensors.x), tensors)


def _reference(settings, tensors):
    x, weight, bias, norm_weight, norm_bias, mean, var, residual = tensors
    x = _bordered(settings, x)
    weight = weight if settings.standardise is None else standardise(weight, settings.standardise)
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
    """Run the forward pass of :func:`conv_norm`, see :mod:`sbp_mmdet.ops.common.autograd_function`."""
    s, t = settings, tensors
    x, storage = cast(t.x, s.dtype), 'native' if t.x.shape[1] <= _IMAGE else s.form.storage
    source = keep_input(t.x, x, storage) if weight_needed(s, needs) or (s.recompute and any(needs)) else None
    x = _bordered(s, x)
    norms = FixedNorms([(s, t)]) if s.norm == 'fixed' else None
    z = convolve(s, t, x, norms)
    factors = norms.factors._replace(shift=None) if norms and any(needs) else None
    u, statistics, extra = z, None, None
    if s.norm in ('batch', 'group'):
        u, statistics, extra = normalise(s, t, z)
    if t.residual is not None:
        u = u.add_(t.residual)
    if s.recompute:
        y, normed, active = u, None, None
    elif any(needs):
        y, normed, active = _activate(s, t, z, u, statistics)
    else:
        y, normed, active = u if s.activation is None else s.activation(u, inplace=True), None, None
        mark_as_made_here(y)
    parameters = ConvNormTensors(None, *t[1:5], t.running_mean if factors else None)
    dtypes = t.x.dtype, None if t.residual is None else t.residual.dtype
    return y, ConvNormSaved(parameters, t.x.shape, dtypes, source, normed, active, statistics, factors, extra)


def _activate(s, t, z, u, statistics):
    """Apply the activation to the norm's output u, in place where possible.

    Returns:
        tuple[Tensor, KeptMap | None, KeptMap | None]: The output, what is saved of the convolution's output z, and what
        is saved of u.
    """
    act, storage, normed = s.activation, s.form.storage, None
    if statistics is not None:
        scale, shift = affine_of_norm(s, t, statistics, z.shape[1])
        # In eight bits the sum's sign, which is the mask, would not be that of what is read.
        residual = keep_term(t.residual, storage) if t.residual is not None and storage == 'native' else None
        keeps_sign = t.residual is None and act is not None and act.jumps_at_zero
        normed = keep(z, storage, zero_of(scale, shift) if keeps_sign and storage != 'native' else None)
        if t.residual is None or residual is not None:
            normed = KeptMap(normed.values, normed.unit, normed.base, scale, shift, act, residual)
            y = u if act is None else act(u, inplace=True)
            share_map(y, normed)
            return y, normed, None
    if act is None:
        return u, normed, None
    if act.name == 'relu':  # torch's own ReLU saves its output, too, which the next layer needs
        y = act(u, inplace=True)
        active = keep(y, storage, positive=True)._replace(activation=act)
        if active.values is y:
            return y, normed, active
    else:
        y = act(u)
        # Rounding would move values over 6, where ReLU6's derivative jumps too.
        storage = 'native' if act.name == 'relu6' else storage
        active = keep(u, storage, threshold=0 if act.jumps_at_zero else None)._replace(activation=act)
    share_map(y, active)
    return y, normed, active


def backward(settings: ConvNormSettings, saved: ConvNormSaved, grad: Tensor, needs):
    """Run the backward pass of :func:`conv_norm`, see :mod:`sbp_mmdet.ops.common.autograd_function`."""
    s, of_tensors = settings, {}
    if s.activation is not None:  # du = act'(u) dy
        grad = (saved.active or saved.normed).activation_backward(grad)
    if needs.residual:
        of_tensors['residual'] = cast(grad, saved.dtypes[1])
    if saved.statistics is not None:  # dz = norm'(z) du
        if saved.normed is None:
            z = cast(convolve(s, saved.tensors, _bordered(s, saved.input.load(s.dtype))), grad.dtype)
        else:
            z = saved.normed.before_norm(grad.dtype)
        gradients = normalise_backward(s, saved.tensors, saved.statistics, saved.extra, z, grad, needs)
        grad, of_tensors['norm_weight'], of_tensors['norm_bias'] = gradients
    if saved.input is None:  # only the input's shape is read, so one number stands for all of its values
        left, right, top, bottom = s.border
        *images, height, width = saved.shape
        x = grad.new_empty(1, dtype=s.dtype).expand(*images, height + top + bottom, width + left + right)
    else:
        x = _bordered(s, saved.input.load(s.dtype))
    norms = split_factor = None
    if s.norm == 'fixed':
        norms = FixedNorms([(s, saved.tensors)], saved.factors)
        split_factor = norms.split_factors()[0] if s.dtype == torch.float16 else None
    dx, own = convolve_backward(s, saved.tensors, x, grad, needs, norms, 0, split_factor)
    of_tensors = (own if norms is None else gradients_of_fixed([own], norms)[0]) | of_tensors
    return ConvNormGradients(**of_tensors, x=cast(_bordered(s, dx, -1), saved.dtypes[0]) if needs.x else None)


def _bordered(s, x, sign=1):
    """Add the border to a map, or take it away with the sign -1."""
    return F.pad(x, [sign * n for n in s.border]) if any(s.border) else x


_conv_norm = Operation('ConvNorm', forward, backward, ConvNormGradients)
