"""A convolution that the norm after it is folded into, and whose weight may be standardised: both passes.

Settings and tensors are those of :mod:`..conv_norm_act`.
"""

import torch

from .fixed_norms import NO_GRADIENTS, FixedGradients, row_products
from .precision import FULL, accumulator, cast, multiply
from .weight_standardisation import standardise, standardise_backward

__all__ = ['convolve', 'convolve_backward', 'weight_needed']

_convolution_backward = torch.ops.aten.convolution_backward.default


def weight_needed(s, needs) -> bool:
    """Return whether the convolution's weight, folded or not, needs a gradient.

    Args:
        s (ConvNormSettings): Settings.
        needs (ConvNormGradients): Which gradients are needed.
    """
    return needs.weight or (s.norm == 'fixed' and needs.norm_weight)


def convolve(s, t, x, norms=None, number=0):
    """Compute the convolution and, if the norm is fixed, the norm: y = k * (conv(x, W) + b - mean) + norm_bias.

    A fixed norm is folded, so that both are one convolution with the weight k W, or it follows the convolution.

    Args:
        s (ConvNormSettings): Settings with a dtype.
        t (ConvNormTensors): Parameters and buffers.
        x (Tensor): Input, shape (N, C, H, W), in the dtype of the settings.
        norms (FixedNorms | None): Fixed norms. If ``None``, the norm is none of them. Default: None.
        number (int): Number of the layer among them. Default: 0.

    Returns:
        Tensor: Shape (N, C', H', W').
    """
    geometry = s.stride, s.padding, s.dilation, s.groups
    given = t.weight if s.standardise is None else standardise(t.weight, s.standardise)
    # In half precision the fold would round the shift, which is the same at all positions, and CUDA adds a bias in a
    # pass of its own anyway.
    if s.norm == 'fixed' and x.dtype in FULL and _is_no_larger(given, x, s.stride):
        return torch.conv2d(x, norms.fold(number, given, s.dtype), norms.shifts[number], *geometry)
    weight = given if given.dtype is s.dtype else given.to(s.dtype)
    z = torch.conv2d(x, weight, None if t.bias is None else cast(t.bias, s.dtype), *geometry)
    if s.norm != 'fixed':
        return z
    norm = t.norm_weight, t.norm_bias, t.running_mean, t.running_var
    return torch.batch_norm(z, *norm, False, 0.1, s.eps, z.is_cuda and torch.backends.cudnn.enabled)


def _is_no_larger(weight, x, stride):
    """Return whether a weight is no larger than the convolution's output, so that it costs less to scale."""
    n, _, height, width = x.shape
    shape = weight.shape
    return shape.numel() <= n * height * width // (stride[0] * stride[1]) * shape[0]


def convolve_backward(s, t, x, grad, needs, norms=None, number=0, split_factor=None):
    """Compute the backward pass of a convolution and of the fixed norm that is folded into it.

    With a fixed norm y = k * conv(x, W) + shift, k = norm_weight * rstd for each channel, the products are

        dx = conv^T(dy, k W)   and   dW' = dy^T x,   from which   dW = k dW'   and   dk = sum(W * dW') - mean * sum(dy).

    The weight is multiplied with k, and not the map.

    Args:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters and buffers.
        x (Tensor): The input. Its values are not read if no gradient of a weight is needed.
        grad (Tensor): Gradient of the output.
        needs (ConvNormGradients): Which gradients are needed.
        norms (FixedNorms | None): Fixed norms. If ``None``, the norm of the layer is none of them. Default: None.
        number (int): Number of the layer among them. Default: 0.
        split_factor (tuple[Tensor, Tensor] | None): In fp16, the factors of the gradient and of the weight that k is
            split into, see :meth:`.FixedNorms.split_factors`. If ``None``, 1 and k. Default: None.

    Returns:
        tuple[Tensor | None, FixedGradients | dict]: Gradient of the input, and the gradients of the parameters by name.
        With a fixed norm, the second item is what :func:`.gradients_of_fixed` computes them from.
    """
    fixed, grad = norms is not None, grad if grad.dtype is s.dtype else grad.to(s.dtype)
    needs_weight = needs.weight or (fixed and needs.norm_weight)
    # A batch norm subtracts the mean, and so the bias. With statistics of several processes this holds for their sum.
    is_subtracted = s.norm == 'batch' and s.process_group is None
    needs_bias = (needs.bias and not is_subtracted) or (fixed and (needs.norm_weight or needs.norm_bias))
    factor, column = split_factor or (None, norms.columns[number] if fixed else None)
    given = t.weight if s.standardise is None else standardise(t.weight, s.standardise)
    rows = grad if factor is None else multiply(grad, factor.view(-1, 1, 1), s.dtype)
    if not fixed:
        weight = cast(given, s.dtype)
    elif factor is None:
        weight = norms.fold(number, given, s.dtype, last=True)
    else:
        weight = multiply(given, column, s.dtype)
    sums = needs_bias and needs_weight and grad.dtype in FULL  # with the weight's gradient, in one pass
    geometry = s.stride, s.padding, s.dilation, False, (0, 0), s.groups
    which, sizes = (needs.x, needs_weight, sums), weight.shape[:1] if sums else None
    dx, dweight, dbias = _convolution_backward(rows, x, weight, sizes, *geometry, which)
    if needs_bias and not sums:
        dbias = grad.sum((0, 2, 3), dtype=accumulator(grad))
    if fixed:
        bias, products = dbias * norms.columns[number].view(-1) if needs.bias else None, None
        # In full precision the product waits for those of the other layers, unless it is needed for its sums alone.
        together = needs.weight and dweight.dtype is column.dtype and s.standardise is None
        if needs.norm_weight and not together:
            (products,) = row_products([(dweight, given)])
        if not together:
            dweight, column = dweight * column if needs.weight else None, None
    if needs.weight and s.standardise is not None:
        dweight = standardise_backward(t.weight, s.standardise, dweight)
    if fixed:
        return dx, FixedGradients(needs, number, given, dweight, products, column, bias, dbias, factor)
    gradients = dict(NO_GRADIENTS)
    if needs.weight:
        gradients['weight'] = dweight
    if needs.bias:
        gradients['bias'] = torch.zeros_like(t.bias) if is_subtracted else dbias
    return dx, gradients
