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

from .operation import Form, Operation, gradients_of, in_precision
from .precision import Stored, Sum, accumulator, column_sums, store
from .rows import CHUNK, Chunk, Sampled, add_branch, fold, normalise, normalise_backward, unfold

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
        branch[:, chunk] = F.linear(windows.out(), layers.proj_weight, layers.proj_bias)
    branch = branch.index_select(1, layout.places)
    out = add_branch(t.x, [(Chunk.whole(branch), branch)], None, t.factor, settings.dtype)
    if not any(needs):
        return out, None
    return out, WindowSaved(store(xhat, settings.form.storage), rstd, t._replace(x=None))


def _backward(settings, saved, grad, needs):
    t, layout = saved.given, _layout(settings.size, settings.window, settings.shift, grad.device)
    layers, sampled = _Layers.folded(settings, t), Sampled(settings.form.sample, len(grad) * len(layout.order))
    xhat = saved.xhat.load(settings.dtype)
    incoming = grad if t.factor is None else grad * t.factor[:, None, None]
    sums = _sums(t, incoming)
    incoming = incoming.to(settings.dtype)
    dxhat = xhat.new_empty(len(xhat), len(layout.order), xhat.shape[2]) if needs.x else None
    for chunk in layout.chunks(settings, len(xhat), xhat.shape[2]):
        windows = _Windows.run(settings, layers, layout, xhat, chunk)
        g = incoming.index_select(1, layout.order[chunk])
        pads = layout.pads_of(chunk)
        g = g if pads is None else g * ~pads
        dqkv = windows.backward(g @ layers.proj_weight, sums.bias)
        first = len(g) * chunk.start
        sums.proj_weight.add_product(*(sampled.of(rows.flatten(0, 1), first) for rows in (g, windows.out())))
        if pads is not None:
            sums.pads.add(column_sums((dqkv * pads).flatten(0, 1)))
            dqkv = dqkv * ~pads
        sums.qkv_bias.add(column_sums(dqkv.flatten(0, 1)))
        sums.qkv_weight.add_product(*(sampled.of(rows.flatten(0, 1), first) for rows in (dqkv, windows.xhat)))
        if needs.x:
            dxhat[:, chunk] = dqkv @ layers.qkv_weight
    sampled.scale_(sums.proj_weight.value, sums.qkv_weight.value)
    found = _parameter_gradients(settings, t, sums)
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
        pads (Tensor | None): bool, shape (P,), where the places are padding; None: nowhere.
        regions (Tensor | None): Shape (P / window^2, window^2), parts of the map that do not see each other; None: all
            tokens of a window do.
    """

    order: Tensor
    places: Tensor
    simple: int
    pads: Tensor | None
    regions: Tensor | None

    def chunks(self, settings, images, channels):
        """Slices of the places, whole windows."""
        area = settings.window**2
        budget = settings.chunk or CHUNK.get(self.order.device.type, CHUNK['cuda'])
        step = max(budget // (images * area * max(3 * channels, settings.num_heads * area)), 1) * area
        ends = (0, self.simple), (self.simple, len(self.order))
        return [slice(i, min(i + step, end)) for start, end in ends for i in range(start, end, step)]

    def pads_of(self, chunk):
        """Where a chunk's places are padding, bool, shape (P', 1); None: nowhere."""
        return None if self.pads is None or chunk.stop <= self.simple else self.pads[chunk, None]

    def apart(self, chunk, dtype):
        """What is added to the maps of a chunk's windows, shape (n, 1, window^2, window^2); None: nothing."""
        if self.regions is None or chunk.stop <= self.simple:
            return None
        area = self.regions.shape[1]
        own = self.regions[chunk.start // area : chunk.stop // area]
        return (own[:, None, :, None] != own[:, None, None, :]).to(dtype).mul_(_APART)


@functools.lru_cache(maxsize=16)  # two for each stage, which its blocks share: one takes dozens of launches
def _layout(size, side, shift, device):
    height, width = size
    tokens = height * width
    below, right = -height % side, -width % side
    # Windows before these rows and columns hold neither padding nor what the shift brought round.
    down, along = (max(n - shift, 0) // side for n in (height, width))

    def windows_of(x):  # a map
        windows = x.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
        parts = windows[:down, :along], windows[:down, along:], windows[down:]
        return torch.cat([part.reshape(-1) for part in parts])

    numbers = torch.arange(tokens, device=device).view(height, width)
    numbers = F.pad(numbers, (0, right, 0, below), value=tokens)
    order = windows_of(numbers.roll((-shift, -shift), (0, 1)))
    places = order.new_empty(tokens + 1)  # the last one is where padding goes
    places[order] = torch.arange(len(order), device=device)
    pads = order == tokens if below or right else None
    regions = None
    if shift:
        rows, columns = (_bands(n, side, shift, device) for n in (height + below, width + right))
        regions = windows_of(3 * rows[:, None] + columns).view(-1, side * side)
    return _Layout(order.clamp_(max=tokens - 1), places[:-1], down * along * side**2, pads, regions)


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
    proj_bias: Tensor

    @classmethod
    def folded(cls, settings, t):
        bias = t.qkv_weight.new_zeros(len(t.qkv_weight)) if t.qkv_bias is None else t.qkv_bias
        rows = _scales(settings, bias)
        weight, padding = t.qkv_weight * rows[:, None], bias * rows
        folded = fold(weight, padding, t.norm_weight, t.norm_bias, settings.dtype)
        own = t.table[t.index.flatten()].view(*t.index.shape, -1).permute(2, 0, 1).contiguous()
        return cls(
            *folded, padding.to(settings.dtype), own, *(p.to(settings.dtype) for p in (t.proj_weight, t.proj_bias))
        )


def _scales(settings, like):
    """What rows of the layer to Q, K and V are multiplied by. Q and K share the scale, so that in half precision
    neither gradient leaves the range before the other."""
    root = abs(settings.scale) ** 0.5
    q, k, v = like.new_ones(3, len(like) // 3)
    return torch.cat([q * (settings.scale / root), k * root, v])


class _Windows:
    """Some windows: x-hat (N, P', C), Q, K (both scaled), V (N, n, h, window^2, d), and their maps."""

    def __init__(self, xhat, q, k, v, softmax):
        self.xhat, self.q, self.k, self.v = xhat, q, k, v
        self.softmax, self.map = softmax, softmax.to(v.dtype)

    @classmethod
    def run(cls, settings, layers, layout, xhat, chunk):
        xhat = xhat.index_select(1, layout.order[chunk])
        qkv = F.linear(xhat, layers.qkv_weight, layers.qkv_bias)
        pads = layout.pads_of(chunk)
        qkv = qkv if pads is None else torch.where(pads, layers.padding, qkv)
        qkv = qkv.unflatten(2, (3, settings.num_heads, -1)).unflatten(1, (-1, settings.window**2))
        # Copied once, into the order of the products, each of which would copy its part otherwise.
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).contiguous()
        scores = (q @ k.mT).to(torch.promote_types(settings.dtype, layers.bias.dtype)).add_(layers.bias)
        apart = layout.apart(chunk, scores.dtype)
        return cls(xhat, q, k, v, (scores if apart is None else scores.add_(apart)).softmax(-1))

    def out(self):
        """The attention's output, shape (N, P', C)."""
        return (self.map @ self.v).transpose(2, 3).flatten(3).flatten(1, 2)

    def backward(self, grad, dbias):
        """Gradient of scaled Q and K and of V side by side (N, P', 3 C) from the output's; adds to that of the bias."""
        images, windows, heads, area, head_dim = self.v.shape
        found = grad.new_empty(images, windows, area, 3, heads, head_dim)
        grad = grad.view(images, windows, area, heads, head_dim).transpose(2, 3).contiguous()
        dsoftmax = (grad @ self.v.mT).to(self.softmax.dtype)
        dscores = torch.ops.aten._softmax_backward_data(dsoftmax, self.softmax, -1, self.softmax.dtype)
        dbias.add(dscores.sum((0, 1), dtype=accumulator(dscores)))
        dscores = dscores.to(grad.dtype)
        for i, part in enumerate((dscores @ self.k, dscores.mT @ self.q, self.map.mT @ grad)):
            found[:, :, :, i] = part.transpose(2, 3)
        return found.flatten(3).flatten(1, 2)


def _sums(t, incoming):
    """Sums over the windows that parameters get their gradients from, in full precision."""
    return types.SimpleNamespace(
        qkv_weight=Sum(t.qkv_weight),
        qkv_bias=Sum(t.qkv_weight[:, 0]),
        pads=Sum(t.qkv_weight[:, 0]),  # gradient of the bias that padding has alone
        bias=Sum(t.table),  # (h, window^2, window^2)
        proj_weight=Sum(t.proj_weight),
        proj_bias=column_sums(incoming.flatten(0, 1)),
    )


def _parameter_gradients(settings, t, sums):
    weight, bias, pads = sums.qkv_weight.value, sums.qkv_bias.value, sums.pads.value
    scales = _scales(settings, bias)
    for part in (weight.t(), bias, pads):
        part.mul_(scales)
    *folded, dbias = unfold(weight, bias, t.qkv_weight, t.norm_weight, t.norm_bias)
    table = torch.zeros_like(t.table, dtype=bias.dtype)
    table.index_add_(0, t.index.flatten(), sums.bias.value.flatten(1).t())
    return WindowGradients(None, *folded, dbias + pads, table, sums.proj_weight.value, sums.proj_bias)


_window_attention = Operation('WindowAttention', _forward, _backward, WindowGradients)
