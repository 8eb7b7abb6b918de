"""The attention layer of a Swin block, with exact gradients.

    [Q K V] = LN(x) W^T + b,  y = x + factor * (proj(windows(Q, K, V)))

Attention runs inside of the windows of a feature map, which are shifted in every second block; B is the bias of each
relative position:

    M = s Q K^T + B,  S = softmax(M),  O = S V.

The input is saved: neither Q, K, V, of three times the channels, nor an attention map. If the input is in full
precision and the products are not, x-hat is saved instead, the normalised input before the affine part of the norm, and
its reciprocal deviation. The backward pass recomputes some windows at a time, and from the gradient dO of their outputs

    dV = S^T dO,  dS = dO V^T,  dM = S * (dS - rowsum(S * dS)),  dQ = s dM K,  dK = s dM^T Q,  dB = sum of dM.

A feature map that the windows do not divide is padded after the norm, with tokens that are zero: their Q, K and V are
the bias of the linear layer, and other tokens attend to them.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.folding import add_branch, incoming_rows, normalise
from .common.layer_norms import TokenNorm
from .common.layouts import Chunk
from .common.precision import FULL, Stored, Sums, accumulator, cast, cast_all, column_sums, multiply, store
from .common.row_sampling import sample_rows
from .window_layout import CollectedRows, window_layout

__all__ = ['WindowSettings', 'WindowTensors', 'window_attention']

aten = torch.ops.aten
# Added to the attention map between tokens that only the shift brought into one window, as in every Swin.
_APART = -100.0


@dataclasses.dataclass(frozen=True)
class WindowSettings:
    """Settings of :func:`window_attention`.

    Attributes:
        form (Form): What the operation saves. It has no reference form.
        num_heads (int): Number of heads h; C = h d.
        window (int): Side of a window, in tokens.
        shift (int): Number of tokens by which windows are shifted, from 0 to ``window - 1``.
        size (tuple[int, int]): Height and width of the feature map.
        scale (float): Factor s of Q K^T, usually 1 / sqrt(d).
        eps (float): Added to the variance of the layer norm. Default: 1e-5.
        chunk (int | None): Number of elements of the largest tensor of the windows that exist at a time. If ``None``,
            it depends on the device. Default: None.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.

    Raises:
        ValueError: If ``shift`` is not from 0 to ``window - 1``.
    """

    form: Form
    num_heads: int
    window: int
    shift: int
    size: tuple[int, int]
    scale: float
    eps: float = 1e-5
    chunk: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if not 0 <= self.shift < self.window:
            raise ValueError(f'shift={self.shift!r} must be from 0 to {self.window - 1}, for windows of {self.window}')


class WindowTensors(NamedTuple):
    """Inputs of :func:`window_attention`.

    Attributes:
        x (Tensor): Tokens, shape (N, H * W, C).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        qkv_weight, qkv_bias (Tensor): Linear layer to Q, K and V, shapes (3 C, C) and (3 C,); the bias may be ``None``.
        table (Tensor): Bias of each relative position, shape ((2 window - 1)^2, h).
        proj_weight, proj_bias (Tensor): Projection, shapes (C, C) and (C,).
        index (Tensor): Row of the table for each pair of tokens, int64, shape (window^2, window^2).
        factor (Tensor | float | None): Factor of the branch from stochastic depth: of each image, shape (N,), or a
            number for all of them. If ``None``, 1. Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    table: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    index: Tensor
    factor: Tensor | float | None = None


WindowGradients = gradients_of(WindowTensors, 'index', 'factor')


class WindowSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        source (Stored): Tokens x, or x-hat, shape (N, L, C).
        rstd (Tensor | None): Reciprocal deviation of the tokens, shape (N, L, 1), if ``source`` is x-hat.
        given (WindowTensors): Parameters, index and factor.
        qkv (tuple[Tensor, ...]): Q, K and V of each chunk of windows. If empty, they are recomputed.
    """

    source: Stored
    rstd: Tensor | None
    given: WindowTensors
    qkv: tuple[Tensor, ...] = ()


def window_attention(settings: WindowSettings, tensors: WindowTensors) -> Tensor:
    """Compute ``x + factor * proj(softmax(scale Q K^T + bias) V)`` in windows, with Q, K, V from ``LN(x)``.

    Args:
        settings (WindowSettings): Settings.
        tensors (WindowTensors): Inputs.

    Returns:
        Tensor: Shape (N, H * W, C).

    Raises:
        ValueError: If the number of tokens is not that of a feature map of this size.
    """
    height, width = settings.size
    if tensors.x.shape[1] != height * width:
        raise ValueError(f'{tensors.x.shape[1]} tokens are no map of {height} x {width}; set size to that of the map')
    return _window_attention(with_dtype(settings, tensors.x), tensors)


def _forward(settings, tensors, needs):
    s, t, layout = settings, tensors, window_layout(settings.size, settings.window, settings.shift, tensors.x.device)
    layers, rstd = _Layers.of(s, t), None
    if s.form.storage == 'native' and t.x.dtype is s.dtype:
        tokens = layers.norm.run(cast(t.x, layers.norm.full))[0]
    else:
        tokens, rstd = normalise(t.x, s.eps, s.dtype)
    branch, known = CollectedRows(len(layout.order)), []  # in the order of the windows
    for chunk in layout.chunks(s, len(tokens), tokens.shape[2]):
        windows = _Windows.run(s, layers, layout, tokens, rstd is not None, chunk)
        if s.form.recomputed and any(needs):
            known.append(windows.qkv)
        branch.put(chunk, F.linear(windows.out(), layers.proj_weight, layers.proj_bias))
    branch = branch.whole.index_select(1, layout.places)
    if branch.dtype is t.x.dtype and not isinstance(t.factor, Tensor):
        out = torch.add(t.x, branch, alpha=1 if t.factor is None else t.factor, out=branch)
    else:
        out = add_branch(t.x, [(Chunk.whole(branch), branch)], None, t.factor, s.dtype)
    if not any(needs):
        return out, None
    stored = Stored(t.x) if rstd is None else store(tokens, s.form.storage)
    return out, WindowSaved(stored, rstd, t._replace(x=None), tuple(known))


def _backward(settings, saved, grad, needs):
    s, t, layout = settings, saved.given, window_layout(settings.size, settings.window, settings.shift, grad.device)
    layers, is_normalised, sample = _Layers.of(s, t), saved.rstd is not None, s.form.sample
    if is_normalised:
        source = tokens = saved.source.load(s.dtype)
        statistics = None
    else:
        source = saved.source.values
        tokens, *statistics = layers.norm.run(cast(source, layers.norm.full))
    # For each chunk of windows, with g = factor * dy in their order: dO = g W_p, dW_p = g^T O, dW = d[Q K V]^T LN(x)
    # and the gradient of the norm's output d[Q K V] W. Padding sends no gradient to W_p and the norm.
    (scaled, total), sums = incoming_rows(grad, s.dtype, t.factor), _allocate_sums(t)
    scaled = scaled.view(grad.shape)
    through, norm = CollectedRows(len(layout.order)), (needs.x, needs.norm_weight, needs.norm_bias)
    for i, chunk in enumerate(layout.chunks(s, len(tokens), tokens.shape[2])):
        windows = _Windows.run(s, layers, layout, tokens, is_normalised, chunk, *saved.qkv[i : i + 1])
        g = windows.without_padding_(scaled.index_select(1, layout.part(layout.order, chunk)))
        dqkv, dbias = windows.backward(g @ layers.proj_weight, layers.scale)
        g = g.flatten(0, 1)
        sampled = sample_rows(sample, g)
        sums.add_product('proj_weight', sampled.take_weighted(g), sampled.take(windows.out().flatten(0, 1)))
        rows = dqkv.flatten(0, 1)
        sums.add(dict(bias=dbias, qkv_bias=column_sums(rows)))
        sampled = sample_rows(sample, rows)
        sums.add_product('qkv_weight', sampled.take_weighted(rows), sampled.take(windows.tokens.flatten(0, 1)))
        if any(norm):
            through.put(chunk, dqkv @ layers.qkv_weight)
    del tokens, scaled
    dx = weight = bias = None
    if any(norm):
        through = through.whole.index_select(1, layout.places)
        dx, weight, bias = layers.norm.backward(through, source, statistics, norm)
        del through
    if dx is not None:
        dx = dx.add_(grad) if saved.rstd is None else torch.addcmul(grad, dx, saved.rstd)
    sums = sums.gradients()
    table = _table_gradient(t, sums['bias'])
    return WindowGradients(dx, weight, bias, *layers.gradients(sums), table, sums['proj_weight'], total)


class _Layers(NamedTuple):
    """The norm, and the linear layers in the precision of matrix products.

    In half precision the scale is folded into the rows of the first layer for Q and K, see :func:`_qkv_scales`.

    Attributes:
        norm (TokenNorm): The norm.
        qkv_weight, qkv_bias (Tensor): First layer. The bias may be ``None``.
        bias (Tensor): B, shape (h, window^2, window^2).
        proj_weight, proj_bias (Tensor): Projection.
        scale (float): Factor s, where it is not folded.
        scales (Tensor | None): Factors of the first layer's rows, shape (3 C,). If ``None``, 1.
    """

    norm: TokenNorm
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    scale: float
    scales: Tensor | None

    @classmethod
    def of(cls, settings, t):
        """Return the layers of :class:`WindowTensors`."""
        norm = TokenNorm(t.norm_weight, t.norm_bias, settings.eps, settings.dtype)
        weight, bias, scale, scales = t.qkv_weight, t.qkv_bias, settings.scale, None
        if settings.dtype not in FULL:
            scale, scales = 1.0, _qkv_scales(scale, len(weight), norm.full, weight.device)
            weight = multiply(weight, scales[:, None], settings.dtype)
            bias = None if bias is None else bias * scales
        given = (weight, t.proj_weight, t.proj_bias) if bias is None else (weight, t.proj_weight, t.proj_bias, bias)
        weight, *projection = cast_all(given, settings.dtype)
        bias = None if bias is None else projection.pop()
        return cls(norm, weight, bias, _gather_bias(t), *projection, scale, scales)

    def gradients(self, sums):
        """Return the gradients of the first layer's weight and bias from the sums over the windows."""
        weight, bias = sums['qkv_weight'], sums['qkv_bias']
        return (weight, bias) if self.scales is None else (weight.mul_(self.scales[:, None]), bias.mul_(self.scales))


def _gather_bias(t):
    return t.table.t().index_select(1, t.index.view(-1)).view(-1, *t.index.shape)


@functools.lru_cache(maxsize=16)
def _qkv_scales(scale, channels, dtype, device):
    """Return the factors of the layer's rows for Q, K and V.

    Q and K share the scale, so that in half precision neither gradient leaves the range before the other.
    """
    root = abs(scale) ** 0.5
    # Made on the CPU, whatever torch's default device is.
    factors = torch.tensor([scale / root, root, 1], dtype=dtype, device='cpu').to(device)
    return factors.repeat_interleave(channels // 3, output_size=channels)


class _Windows:
    """Activations of some windows: P' places of n windows.

    Attributes:
        tokens (Tensor): Tokens after the norm, zero where there is padding, shape (N, P', C).
        heads (int): Number of heads h.
        qkv (Tensor): Q and K, each times the root of the scale where it is folded, and V, shape
            (3, N n h, window^2, d).
        softmax (Tensor): S, shape (N n h, window^2, window^2).
        map (Tensor): S in the precision of matrix products.
        edge (int): First place of the windows at the edge.
        pads (Tensor | None): Whether the places from ``edge`` on are padding, bool, (P' - edge, 1).
    """

    def __init__(self, tokens, heads, qkv, softmax, edge, pads):
        self.tokens, self.heads, self.qkv = tokens, heads, qkv
        self.softmax, self.map = softmax, cast(softmax, qkv.dtype)
        self.edge, self.pads = edge, pads

    @classmethod
    def run(cls, settings, layers, layout, tokens, is_normalised, chunk, qkv=None):
        """Compute Q, K, V and S of some places.

        Args:
            settings (WindowSettings): Settings.
            layers (_Layers): The layers.
            layout (WindowLayout): Places of the tokens in windows.
            tokens (Tensor): All tokens after the norm, or x-hat of all tokens, shape (N, L, C).
            is_normalised (bool): Whether it is x-hat.
            chunk (slice): The places.
            qkv (Tensor | None): Q, K and V, if they are known. Default: None.
        """
        area, heads, edge = settings.window**2, settings.num_heads, max(layout.simple - chunk.start, 0)
        own = slice(max(chunk.start - layout.simple, 0), chunk.stop - layout.simple)  # among places at the edge
        at_edge = own.stop > own.start
        pads = layout.part(layout.pads, own) if at_edge and layout.pads is not None else None
        tokens = tokens.index_select(1, layout.part(layout.order, chunk))
        tokens = layers.norm.scale(tokens) if is_normalised else tokens
        if pads is not None:
            tokens[:, edge:].masked_fill_(pads, 0)
        (images, places, _), head_dim = tokens.shape, tokens.shape[2] // heads
        number = images * places // area  # of windows; nothing is left to torch to find, for there may be no image
        if qkv is None:
            qkv = F.linear(tokens, layers.qkv_weight, layers.qkv_bias)
            # One copy into the order of the products; otherwise each product would copy its own part.
            qkv = qkv.view(number, area, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
            qkv = qkv.reshape(3, number * heads, area, head_dim)
        scores = torch.bmm(qkv[0], qkv[1].mT).view(number, heads, area, area)
        scores = torch.add(layers.bias, scores, alpha=layers.scale)
        if at_edge and layout.apart is not None:
            apart = layout.apart[own.start // area : own.stop // area]
            scores.view(images, places // area, heads, area, area)[:, edge // area :].add_(apart, alpha=_APART)
        return cls(tokens, heads, qkv, scores.softmax(-1).view(number * heads, area, area), edge, pads)

    def without_padding_(self, rows):
        """Set rows (N, P', ...) to zero where there is padding, in place."""
        if self.pads is not None:
            rows[:, self.edge :].masked_fill_(self.pads, 0)
        return rows

    def out(self):
        """Return O of the windows, shape (N, P', C)."""
        _, number, area, head_dim = self.qkv.shape
        out = torch.bmm(self.map, self.qkv[2]).view(number // self.heads, self.heads, area, head_dim)
        return out.transpose(1, 2).reshape(self.tokens.shape)

    def backward(self, grad, scale):
        """Return the gradients of Q, K and V side by side, (N, P', 3 C), and that of the position bias B.

        Args:
            grad (Tensor): dO, shape (N, P', C).
            scale (float): Factor of Q K^T.
        """
        (q, k, v), heads = self.qkv.unbind(0), self.heads
        number, area, head_dim = v.shape[0] // heads, *v.shape[1:]
        # dS = dO V^T, dM = S * (dS - rowsum(S * dS)), dB = sum of dM, dQ = dM K, dK = dM^T Q, dV = S^T dO.
        grad = grad.view(number, area, heads, head_dim).transpose(1, 2).reshape(v.shape)
        dsoftmax = cast(torch.bmm(grad, v.mT), self.softmax.dtype)
        dscores = torch._softmax_backward_data(dsoftmax, self.softmax, -1, self.softmax.dtype)
        dbias = dscores.view(number, heads, area, area).sum(0, dtype=accumulator(dscores))
        dscores = cast(dscores, grad.dtype)
        gradients = grad.new_empty(3, *v.shape)
        dq, dk, dv = gradients.unbind(0)
        torch.baddbmm(dq, dscores, k, beta=0, alpha=scale, out=dq)
        torch.baddbmm(dk, dscores.mT, q, beta=0, alpha=scale, out=dk)
        torch.bmm(self.map.mT, grad, out=dv)
        gradients = gradients.view(3, number, heads, area, head_dim).permute(1, 3, 0, 2, 4)
        return gradients.reshape(*self.tokens.shape[:2], 3 * heads * head_dim), dbias


def _allocate_sums(t):
    """Return the sums over the windows for the gradients of parameters, in full precision."""
    qkv_bias = t.qkv_weight[:, 0] if t.qkv_bias is None else t.qkv_bias
    return Sums(dict(qkv_weight=t.qkv_weight, qkv_bias=qkv_bias, bias=t.table, proj_weight=t.proj_weight))


def _table_gradient(t, bias):
    table = torch.zeros_like(t.table, dtype=bias.dtype)
    # Entries of the map that share a row of the table are added in their order, as in the backward pass of the module's
    # own lookup. index_add_ would add them atomically on CUDA, in an order that differs from run to run.
    return table.index_put_((t.index.view(-1),), bias.flatten(1).t(), accumulate=True)


_window_attention = Operation('WindowAttention', _forward, _backward, WindowGradients)
