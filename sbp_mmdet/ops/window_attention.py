"""The attention layer of a Swin block on tokens, exact and lean.

    x-hat = LN(x) without its affine part,  [Q K V] = x-hat W'^T + b',  y = x + factor * (proj(windows(Q, K, V)))

in windows of the map, shifted in every second block, with a bias for each relative position. Stored are x-hat and its
reciprocal deviation, nothing of three times the channels and no attention map. The windows run again in the backward
pass, some of them at a time.

A map that the windows do not divide is padded behind the norm, with tokens that are zero: their Q, K and V are the bias
of the linear layer alone, without that of the norm, and other tokens see them.
"""

import dataclasses
import functools
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of, in_precision
from .common.precision import Stored, Sum, accumulator, column_sums, store
from .common.row_sampling import CHUNK, Chunk, Incoming, add_branch, draw, fold, normalise, normalise_backward, unfold

__all__ = ['WindowSettings', 'WindowTensors', 'window_attention']

# What is added to the map between tokens that only the shift brought together, as every Swin has it.
_APART = -100.0


@dataclasses.dataclass(frozen=True)
class WindowSettings:
    """Of :func:`window_attention`. Raises ValueError for a shift that is no part of a window."""

    form: Form  # its storage counts: all tokens are kept, and there is no reference but the plain module
    num_heads: int  # h; C = h d
    window: int  # side of a window, in tokens
    shift: int  # by how many tokens the windows are shifted, from 0 to window - 1
    size: tuple[int, int]  # (H, W) of the map of tokens
    scale: float  # what Q K^T is multiplied by, usually 1 / sqrt(d)
    eps: float = 1e-5  # of the layer norm
    chunk: int | None = None  # elements of the windows' largest tensor that exist at a time; None: by the device
    dtype: torch.dtype | None = None  # of matrix products; None: what autocast says, or as x is

    def __post_init__(self):
        if not 0 <= self.shift < self.window:
            raise ValueError(f'shift={self.shift!r} must be from 0 to {self.window - 1}, for windows of {self.window}')


class WindowTensors(NamedTuple):
    """What the layer works on."""

    x: Tensor  # tokens, (N, H * W, C)
    norm_weight: Tensor | None  # affine part of the layer norm, (C,)
    norm_bias: Tensor | None
    qkv_weight: Tensor  # linear layer to Q, K and V, (3 C, C)
    qkv_bias: Tensor | None
    table: Tensor  # bias of each relative position, ((2 window - 1)^2, h)
    proj_weight: Tensor  # projection, (C, C)
    proj_bias: Tensor
    index: Tensor  # int64, (window^2, window^2): the row of the table for each pair of tokens
    factor: Tensor | None = None  # of the branch of each image (stochastic depth), (N,)


WindowGradients = gradients_of(WindowTensors, 'index', 'factor')


class WindowSaved(NamedTuple):
    """x-hat (N, L, C), its reciprocal deviation (N, L, 1), and what was given without the tokens."""

    xhat: Stored
    rstd: Tensor
    given: WindowTensors


def window_attention(settings: WindowSettings, tensors: WindowTensors) -> Tensor:
    """``x + factor * proj(softmax(scale Q K^T + bias) V)`` in windows, with Q, K, V from ``LN(x)``; see this module.

    Args:
        settings (WindowSettings): See there.
        tensors (WindowTensors): See there.

    Returns:
        Tensor: Shape (N, H * W, C).

    Raises:
        ValueError: If the tokens are not those of a map of this size.
    """
    height, width = settings.size
    if tensors.x.shape[1] != height * width:
        raise ValueError(f'{tensors.x.shape[1]} tokens are no map of {height} x {width}')
    return _window_attention(in_precision(settings, tensors.x), tensors)


def _forward(settings, tensors, needs):
    t, layout = tensors, _layout(settings.size, settings.window, settings.shift, tensors.x.device)
    layers = _Layers.folded(settings, t)
    xhat, rstd = normalise(t.x, settings.eps, settings.dtype)
    branch = xhat.new_empty(len(xhat), len(layout.order), xhat.shape[2])  # in the order of the windows
    for chunk in layout.chunks(settings, len(xhat), xhat.shape[2]):
        windows = _Windows.run(settings, layers, layout, xhat, chunk)
        branch[:, chunk] = F.linear(windows.out(), layers.proj_weight, t.proj_bias.to(settings.dtype))
    branch = branch.index_select(1, layout.places)
    out = add_branch(t.x, [(Chunk.whole(branch), branch)], None, t.factor, settings.dtype)
    if not any(needs):
        return out, None
    return out, WindowSaved(store(xhat, settings.form.storage), rstd, t._replace(x=None))


def _backward(settings, saved, grad, needs):
    t, layout = saved.given, _layout(settings.size, settings.window, settings.shift, grad.device)
    layers, sample = _Layers.folded(settings, t), settings.form.sample
    xhat = saved.xhat.load(settings.dtype)
    incoming, sums = Incoming(grad, t.proj_bias, None, t.factor, settings.dtype), _sums(t, layout)
    scaled = incoming.rows(Chunk.whole(grad)).view(grad.shape)
    dxhat = xhat.new_empty(len(xhat), len(layout.order), xhat.shape[2]) if needs.x else None
    for chunk in layout.chunks(settings, len(xhat), xhat.shape[2]):
        windows = _Windows.run(settings, layers, layout, xhat, chunk)
        g = windows.without_padding_(scaled.index_select(1, layout.order[chunk]))
        dqkv = windows.backward(g @ layers.proj_weight, sums.bias)
        drawn = draw(sample, g.flatten(0, 1))
        sums.proj_weight.add_product(drawn.divided(g.flatten(0, 1)), drawn.of(windows.out().flatten(0, 1)))
        if windows.pads is not None:
            sums.pads.add(column_sums((dqkv[:, windows.edge :] * windows.pads).flatten(0, 1)))
        sums.qkv_bias.add(column_sums(windows.without_padding_(dqkv).flatten(0, 1)))
        drawn = draw(sample, dqkv.flatten(0, 1))
        sums.qkv_weight.add_product(drawn.divided(dqkv.flatten(0, 1)), drawn.of(windows.xhat.flatten(0, 1)))
        if needs.x:
            dxhat[:, chunk] = dqkv @ layers.qkv_weight
    found = _parameter_gradients(settings, t, sums)._replace(proj_bias=incoming.total)
    if not needs.x:
        return found
    dx = normalise_backward(dxhat.index_select(1, layout.places), xhat, saved.rstd)
    return found._replace(x=grad + dx.to(grad.dtype))


class _Layout(NamedTuple):
    """Which token stands where, once the map is padded, shifted and cut into windows: P places, window by window.

    Windows at the lower and right edge come last (the last one or two rows and columns): only these have padding, or
    parts that do not see each other.

    Attributes:
        order (Tensor): Shape (P,), the token of each place; any token where the place is padding.
        places (Tensor): Shape (L,), the place of each token.
        simple (int): Places of the windows that are not at the edge.
        pads (Tensor | None): bool, shape (P - simple, 1), where the places behind these are padding; None: nowhere.
        apart (Tensor | None): bool, which tokens of a window at the edge do not see each other, shape
            (n, 1, window^2, window^2); None: all do.
    """

    order: Tensor
    places: Tensor
    simple: int
    pads: Tensor | None
    apart: Tensor | None

    def chunks(self, settings, images, channels):
        """Slices of the places, whole windows, about the same number in each."""
        area = settings.window**2
        budget = settings.chunk or CHUNK.get(self.order.device.type, CHUNK['cuda'])
        most = max(budget // (max(images, 1) * area * max(3 * channels, settings.num_heads * area)), 1)
        windows = len(self.order) // area
        step = -(-windows // -(-windows // most)) * area
        return [slice(i, min(i + step, len(self.order))) for i in range(0, len(self.order), step)]


@functools.lru_cache(maxsize=16)  # two for each stage, which its blocks share: one takes dozens of launches
def _layout(size, side, shift, device):
    height, width = size
    tokens = height * width
    below, right = -height % side, -width % side
    # Windows before these rows and columns hold neither padding nor what the shift brought round.
    down, along = (max(n - shift, 0) // side for n in (height, width))
    simple = down * along * side**2

    def windows_of(x):  # a map
        windows = x.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
        parts = windows[:down, :along], windows[:down, along:], windows[down:]
        return torch.cat([part.reshape(-1) for part in parts])

    numbers = torch.arange(tokens, device=device).view(height, width)
    numbers = F.pad(numbers, (0, right, 0, below), value=tokens)
    order = windows_of(numbers.roll((-shift, -shift), (0, 1)))
    places = order.new_empty(tokens + 1)  # the last one is where padding goes
    places[order] = torch.arange(len(order), device=device)
    pads = (order[simple:, None] == tokens) if below or right else None
    apart = None
    if shift:
        rows, columns = (_bands(n, side, shift, device) for n in (height + below, width + right))
        regions = windows_of(3 * rows[:, None] + columns)[simple:].view(-1, 1, 1, side * side)
        apart = regions != regions.mT
    return _Layout(order.clamp_(max=tokens - 1), places[:-1], simple, pads, apart)


def _bands(length, side, shift, device):
    """Numbers of the three parts that a shift leaves of a row: whole windows, and the last one's two parts."""
    i = torch.arange(length, device=device)
    return (i >= length - side).long() + (i >= length - shift)


class _Layers(NamedTuple):
    """The linear layers in the precision of the matrix products.

    The norm's affine part is folded into the first, and the scale into its parts that make Q and K.
    """

    qkv_weight: Tensor
    qkv_bias: Tensor
    padding: Tensor  # Q, K and V of a token that is zero
    bias: Tensor  # of the maps, (h, window^2, window^2)
    proj_weight: Tensor

    @classmethod
    def folded(cls, settings, t):
        bias = t.qkv_weight.new_zeros(len(t.qkv_weight)) if t.qkv_bias is None else t.qkv_bias
        rows = _scales(settings.scale, len(bias), bias.dtype, bias.device)
        weight, padding = t.qkv_weight * rows[:, None], bias * rows
        folded = fold(weight, padding, t.norm_weight, t.norm_bias, settings.dtype)
        own = t.table.t().index_select(1, t.index.flatten()).view(-1, *t.index.shape)
        return cls(*folded, padding.to(settings.dtype), own, t.proj_weight.to(settings.dtype))


@functools.lru_cache(maxsize=16)
def _scales(scale, channels, dtype, device):
    """What rows of the layer to Q, K and V are multiplied by. Q and K share the scale, so that in half precision
    neither gradient leaves the range before the other."""
    root = abs(scale) ** 0.5
    factors = torch.tensor([scale / root, root, 1], dtype=dtype, device=device)
    return factors.repeat_interleave(channels // 3, output_size=channels)


class _Windows:
    """Some windows: x-hat (N, P', C), Q, K (both scaled), V (N, n, h, window^2, d), and their maps."""

    def __init__(self, xhat, q, k, v, softmax, edge, pads):
        self.xhat, self.q, self.k, self.v = xhat, q, k, v
        self.softmax, self.map = softmax, softmax.to(v.dtype)
        self.edge, self.pads = edge, pads  # where the windows at the edge begin, and their padding

    @classmethod
    def run(cls, settings, layers, layout, xhat, chunk):
        area, edge = settings.window**2, max(layout.simple - chunk.start, 0)
        own = slice(max(chunk.start - layout.simple, 0), chunk.stop - layout.simple)  # of the edge's places
        at_edge = own.stop > own.start
        pads = layout.pads[own] if at_edge and layout.pads is not None else None
        xhat = xhat.index_select(1, layout.order[chunk])
        qkv = F.linear(xhat, layers.qkv_weight, layers.qkv_bias)
        if pads is not None:
            torch.where(pads, layers.padding, qkv[:, edge:], out=qkv[:, edge:])
        qkv = qkv.unflatten(2, (3, settings.num_heads, -1)).unflatten(1, (-1, area))
        # Copied once, into the order of the products, each of which would copy its part otherwise.
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).contiguous()
        scores = (q @ k.mT) + layers.bias
        if at_edge and layout.apart is not None:
            scores[:, edge // area :].add_(layout.apart[own.start // area : own.stop // area], alpha=_APART)
        return cls(xhat, q, k, v, scores.softmax(-1), edge, pads)

    def without_padding_(self, rows):
        """Rows (N, P', ...) with zeros where there is padding, in place."""
        if self.pads is not None:
            rows[:, self.edge :].masked_fill_(self.pads, 0)
        return rows

    def out(self):
        """The attention's output, shape (N, P', C)."""
        return (self.map @ self.v).transpose(2, 3).flatten(3).flatten(1, 2)

    def backward(self, grad, dbias):
        """Gradient of scaled Q and K and of V side by side (N, P', 3 C) from the output's; adds to that of the bias."""
        images, windows, heads, area, head_dim = self.v.shape
        grad = grad.view(images, windows, area, heads, head_dim).transpose(2, 3).contiguous()
        dsoftmax = (grad @ self.v.mT).to(self.softmax.dtype)
        dscores = torch.ops.aten._softmax_backward_data(dsoftmax, self.softmax, -1, self.softmax.dtype)
        dbias.add(dscores.sum((0, 1), dtype=accumulator(dscores)))
        dscores = dscores.to(grad.dtype)
        found = grad.new_empty(3, *self.v.shape)
        products = (dscores, self.k), (dscores.mT, self.q), (self.map.mT, grad)
        for out, factors in zip(found, products, strict=True):
            torch.bmm(*(factor.flatten(0, 2) for factor in factors), out=out.flatten(0, 2))
        return found.permute(1, 2, 4, 0, 3, 5).flatten(3).flatten(1, 2)


def _sums(t, layout):
    """Sums over the windows that parameters get their gradients from, in full precision."""
    return types.SimpleNamespace(
        qkv_weight=Sum(t.qkv_weight),
        qkv_bias=Sum(t.qkv_weight[:, 0]),
        # Gradient of the bias that padding has alone.
        pads=None if layout.pads is None else Sum(t.qkv_weight[:, 0]),
        bias=Sum(t.table),  # (h, window^2, window^2)
        proj_weight=Sum(t.proj_weight),
    )


def _parameter_gradients(settings, t, sums):
    weight, bias = sums.qkv_weight.value, sums.qkv_bias.value
    scales = _scales(settings.scale, len(bias), bias.dtype, bias.device)
    *folded, dbias = unfold(weight.mul_(scales[:, None]), bias.mul_(scales), t.qkv_weight, t.norm_weight, t.norm_bias)
    if sums.pads is not None:
        dbias = torch.addcmul(dbias, sums.pads.value, scales)
    table = torch.zeros_like(t.table, dtype=bias.dtype)
    # Entries of the map that share a row of the table are added in their order, as in the backward pass of the module's
    # own lookup. index_add_ would add them atomically on CUDA, in an order that differs from run to run.
    table.index_put_((t.index.flatten(),), sums.bias.value.flatten(1).t(), accumulate=True)
    return WindowGradients(None, *folded, dbias, table, sums.proj_weight.value)


_window_attention = Operation('WindowAttention', _forward, _backward, WindowGradients)
