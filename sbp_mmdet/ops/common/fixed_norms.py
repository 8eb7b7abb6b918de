"""Batch norms in evaluation mode, whose norm is 'fixed': a factor and a shift for each channel.

With k = norm_weight * rstd and rstd = 1 / sqrt(running_var + eps), such a norm is

    y = k * (z - running_mean) + norm_bias.

Numbers for each channel are small, so those of all layers of a pass are computed in the same few calls.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import FULL, accumulator, cast, multiply

__all__ = ['NO_GRADIENTS', 'Factors', 'FixedGradients', 'FixedNorms', 'gradients_of_fixed', 'row_products']

# Least factor of gradients in fp16, see `FixedNorms.split_factors`: dW' may be 128 times as large as fp16's numbers
# then, and gradients of 1e-5 still have digits.
_LEAST_FACTOR = 2.0**-7
_LARGEST_FACTOR = 2.0**10  # its product with gradients of 60 is still in the range of fp16
# Most elements of weights that are multiplied in one call, if they are not those of one layer: 4 MB in fp32.
_GROUP = 2**20
# Gradients of the parameters of a convolution with norm, where none is needed.
NO_GRADIENTS = dict(weight=None, bias=None, norm_weight=None, norm_bias=None)


class Factors(NamedTuple):
    """Numbers of fixed norms, shape (D,) with the channels D of all layers, one layer after the other.

    Attributes:
        scale (Tensor): The factors k, in full precision.
        rstd (Tensor): The reciprocal deviations.
        shift (Tensor | None): The biases of the convolutions that the norms are folded into. ``None`` in half
            precision, where norms are not folded, and where the backward pass does not read them.
    """

    scale: Tensor
    rstd: Tensor
    shift: Tensor | None


class FixedGradients(NamedTuple):
    """Intermediate results that the gradients of a layer with a fixed norm are computed from.

    Attributes:
        needs (NamedTuple): Which gradients are needed, by name.
        number (int): Number of the layer in its :class:`FixedNorms`.
        weight (Tensor): Weight W of the convolution, shape (D, ...).
        outer (Tensor | None): The product dW' * ``factor``, of the same shape, or dW if there is no ``column``.
            ``None`` if the weight needs no gradient.
        products (Tensor | None): Sums of W * ``outer`` for each channel, shape (D,), in full precision. If ``None``,
            they are not computed yet, or not needed.
        column (Tensor | None): What ``outer`` is to be multiplied by for dW, shape (D, 1, 1, 1). If ``None``, 1.
        bias (Tensor | None): Gradient of the convolution's bias, if it is needed.
        sums (Tensor | None): Sums of dy, shape (D,), in full precision.
        factor (Tensor | None): Factor of dy in ``outer``, shape (D,). If ``None``, 1.
    """

    needs: NamedTuple
    number: int
    weight: Tensor
    outer: Tensor | None
    products: Tensor | None
    column: Tensor | None
    bias: Tensor | None
    sums: Tensor | None
    factor: Tensor | None


class FixedNorms:
    """The fixed norms of all layers in a pass, whose numbers are computed together when the first layer asks.

    Args:
        layers (Sequence[tuple]): Settings and tensors of each layer, with a fixed norm or another.
        factors (Factors | None): Numbers of all fixed norms, if they are known from the forward pass. Default: None.

    Attributes:
        numbers (list[int]): Numbers of the layers with a fixed norm.
        keeps_folded (bool): Whether :meth:`fold` keeps its results until their last use: in a backward pass, if the
            gradient of a recomputed layer's input follows soon. Initially False.
    """

    def __init__(self, layers: Sequence[tuple], factors: Factors | None = None):
        self.keeps_folded, self._folded = False, {}
        self.numbers = [i for i, (s, _) in enumerate(layers) if s.norm == 'fixed']
        self._layers = [layers[i] for i in self.numbers]
        self._sizes = [t.weight.shape[0] for _, t in self._layers]
        if factors is not None:
            self.factors = factors

    @functools.cached_property
    def factors(self) -> Factors:
        """Numbers of all fixed norms."""
        return _factors(self._layers)

    @functools.cached_property
    def columns(self) -> dict[int, Tensor]:
        """Factor of each layer as weights are multiplied by it, shape (D, 1, 1, 1), by the layer's number."""
        return self._by_number(self.factors.scale.view(-1, 1, 1, 1))

    @functools.cached_property
    def shifts(self) -> dict[int, Tensor]:
        """Bias of the convolution that each layer's norm is folded into, by the layer's number."""
        return self._by_number(self.factors.shift)

    def fold(self, number: int, weight: Tensor, dtype: torch.dtype, last: bool = False) -> Tensor:
        """Return the weight of a layer times the factor of its norm.

        Args:
            number (int): Number of the layer.
            weight (Tensor): Its weight.
            dtype (torch.dtype): Precision of the result.
            last (bool): Whether this is the last use: a result that was kept is returned, and kept no longer. Default:
                False.
        """
        folded = self._folded.pop(number, None) if last else None
        if folded is None:
            folded = multiply(weight, self.columns[number], dtype)
            if self.keeps_folded and not last:
                self._folded[number] = folded
        return folded

    def statistics(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return centres (see :func:`_centre`) and reciprocal deviations of some layers, one layer after the other.

        Args:
            numbers (list[int]): Numbers of the layers in their order.
        """
        rstd, layers = self.factors.rstd, self._layers
        if len(numbers) < len(self.numbers):
            parts, of_numbers = self._by_number(rstd), dict(zip(self.numbers, layers, strict=True))
            rstd, layers = _join([parts[i] for i in numbers]), [of_numbers[i] for i in numbers]
        return _centre([t for _, t in layers]), rstd

    def split_factors(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Split the factor k of each norm into a factor of the output's gradient and a factor of the weight, for fp16.

        With the whole of k on the weight, the product dW' = dy^T x may overflow where k is small, although dW = k dW'
        does not; and k W underflows where all k are small. So dy is multiplied by k, limited to the range of
        `_LEAST_FACTOR` to `_LARGEST_FACTOR` and rounded to fp16, because a GPU multiplies maps of one data type faster,
        and the weight by the rest of k.

        Returns:
            dict[int, tuple[Tensor, Tensor]]: Both factors by the layer's number, shapes (D,) and (D, 1, 1, 1).
        """
        scale = self.factors.scale
        of_gradient = scale.clamp(_LEAST_FACTOR, _LARGEST_FACTOR).half()
        of_weight = self._by_number((scale / of_gradient).view(-1, 1, 1, 1))
        return {i: (factor, of_weight[i]) for i, factor in self._by_number(of_gradient).items()}

    def _by_number(self, joined):
        return dict(zip(self.numbers, _split(joined, self._sizes), strict=True))


def _factors(layers):
    given = [t for _, t in layers]
    variances = _join([t.running_var for t in given])
    variances = cast(variances, accumulator(variances))
    epsilons = [s.eps for s, _ in layers]
    if len({*epsilons}) > 1:
        epsilons = [variances.new_full(t.running_var.shape, eps) for t, eps in zip(given, epsilons, strict=True)]
        rstd = variances + torch.cat(epsilons)
    else:
        rstd = variances + epsilons[0]
    rstd = scale = rstd.rsqrt_()
    if any([t.norm_weight is not None for t in given]):
        ones = [torch.ones_like(t.running_var) if t.norm_weight is None else t.norm_weight for t in given]
        scale = rstd * _join(ones)
    dtype = layers[0][0].dtype
    return Factors(scale, rstd, _shift(given, scale, dtype) if dtype in FULL else None)


def _shift(given, scale, dtype):
    before = _join([torch.zeros_like(t.running_mean) if t.norm_bias is None else t.norm_bias for t in given])
    return cast(torch.addcmul(before, _centre(given), scale, value=-1), dtype)


def _centre(given):
    """Return the means of the convolutions' outputs without bias, running_mean - bias, in full precision."""
    means = _join([t.running_mean if t.bias is None else t.running_mean - t.bias for t in given])
    return cast(means, accumulator(means))


def _join(tensors):
    """Return numbers for each channel of several layers, one layer after the other."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _split(joined, sizes):
    """Reverse :func:`_join`, given the number of channels of each layer."""
    return (joined,) if len(sizes) == 1 else torch.split_with_sizes(joined, sizes)


def gradients_of_fixed(layers: Sequence[FixedGradients], norms: FixedNorms) -> list[dict[str, Tensor | None]]:
    """Compute the gradients of the parameters of convolutions with fixed norms.

    Args:
        layers (Sequence[FixedGradients]): Intermediate results of each layer. The products dW' may be multiplied in
            place.
        norms (FixedNorms): Their norms.

    Returns:
        list[dict[str, Tensor | None]]: For each layer the gradients by name, ``None`` where they are not needed.
    """
    normed = [layer for layer in layers if layer.needs.norm_weight]
    if normed:
        # dk = sum(W * dW') - mean * sum(dy), and the gradient of the norm's weight is rstd * dk.
        given = [(layer.outer, layer.weight) for layer in normed if layer.products is None]
        missing = iter(row_products(given))
        products = _join([next(missing) if layer.products is None else layer.products for layer in normed])
        if normed[0].factor is not None:
            products = products / _join([layer.factor for layer in normed])
        centres, rstd = norms.statistics([layer.number for layer in normed])
        products = torch.addcmul(products, _join([layer.sums for layer in normed]), centres, value=-1).mul_(rstd)
        products = iter(_split(products, [layer.sums.shape[0] for layer in normed]))
    if unscaled := [(layer.outer, layer.column) for layer in layers if layer.column is not None]:
        torch._foreach_mul_(*map(list, zip(*unscaled, strict=True)))
    return [
        dict(
            weight=layer.outer,
            bias=layer.bias,
            norm_weight=next(products) if layer.needs.norm_weight else None,
            norm_bias=layer.sums if layer.needs.norm_bias else None,
        )
        for layer in layers
    ]


def row_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Sum a * b over all dimensions but the first, in full precision, for each pair (a, b).

    Args:
        pairs (Sequence[tuple[Tensor, Tensor]]): Tensors of four dimensions and of one shape in each pair.

    Returns:
        list[Tensor]: The sums, shape (D,).
    """
    if not pairs:
        return []
    dtype = accumulator(pairs[0][0])
    if pairs[0][0].dtype is not pairs[0][1].dtype:  # which a GPU multiplies one by one in any case
        return [(a * b).sum((1, 2, 3), dtype=dtype) for a, b in pairs]
    groups, size = [[]], 0
    for pair in pairs:
        size += pair[0].numel()
        if size > _GROUP and groups[-1]:
            groups.append([])
            size = pair[0].numel()
        groups[-1].append(pair)
    sums = []
    for group in groups:
        together = torch._foreach_mul(*map(list, zip(*group, strict=True)))
        sums += [x.sum((1, 2, 3), dtype=dtype) for x in together]
        del together  # otherwise it exists beside that of the next group
    return sums
