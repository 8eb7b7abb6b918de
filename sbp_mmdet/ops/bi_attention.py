"""Attention between an image and a text in both directions, with norms, layer scales and shortcuts, without a map.

With y = LN(x) and z = LN(w), the normalised tokens of image and text, and scores S = Q K^T / sqrt(d) between them,

    x' = y + gamma_v * proj_v(softmax(S + bias) V_w),        softmax over the text,
    w' = z + gamma_l * proj_l(softmax(S^T, masked) V_y),     softmax over the image.

A map of scores is as large as the image times the text. x and w are saved, the output of the second attention before
its projection, and the log-sum-exp of each row of its softmax. Scores exist for a chunk of the image's tokens at a
time: with the log-sum-exp, a chunk of the second softmax is P = exp(S^T - lse) whatever the other chunks hold, and the
gradient of its scores is P * (dP - D) with D = sum(dO * O) of each row, which the saved output gives at once. Dropout
of the weights is drawn chunk by chunk, and again in the backward pass.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import OnHost, Operation, gradients_of, with_dtype
from .common.layouts import cut_into_chunks
from .common.precision import accumulator
from .common.used_outputs import UsedOutputs
from .ffn import dropout_factor, random_state, replay_dropout

__all__ = ['LIMIT', 'BiAttentionSettings', 'BiAttentionTensors', 'bi_attention']

LIMIT = 50000  # scores are clamped to it, as the range of fp16 wants


@dataclasses.dataclass(frozen=True)
class BiAttentionSettings:
    """Settings of :func:`bi_attention`.

    Attributes:
        num_heads (int): Number of heads.
        dropout (float): Dropout rate of the weights in either direction. Default: 0.
        eps (tuple[float, float]): Added to the variances of image and text. Default: 1e-5.
        chunk (int | None): Number of scores that exist at a time. If ``None``, it depends on the device. Default: None.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.
    """

    num_heads: int
    dropout: float = 0.0
    eps: tuple[float, float] = (1e-5, 1e-5)
    chunk: int | None = None
    dtype: torch.dtype | None = None


class BiAttentionTensors(NamedTuple):
    """Inputs of :func:`bi_attention`.

    Attributes:
        x (Tensor): Tokens of the images, shape (N, V, C).
        text (Tensor): Tokens of the texts, shape (N, T, C).
        mask (Tensor | None): True where the text must not look at the image, shape (N, V).
        bias (Tensor | None): Added to the scores before the softmax over the text, shape (N, T).
        norm_v_weight, norm_v_bias, norm_l_weight, norm_l_bias (Tensor): Affine parts of the layer norms, shape (C,).
        query_weight, query_bias (Tensor): Layer from the image to Q, shapes (E, C) and (E,).
        key_weight, key_bias (Tensor): Layer from the text to K.
        value_v_weight, value_v_bias, value_l_weight, value_l_bias (Tensor): Layers to the values of image and text.
        out_v_weight, out_v_bias, out_l_weight, out_l_bias (Tensor): Projections, shapes (C, E) and (C,).
        gamma_v, gamma_l (Tensor): Layer scales, shape (C,).
    """

    x: Tensor
    text: Tensor
    mask: Tensor | None
    bias: Tensor | None
    norm_v_weight: Tensor
    norm_v_bias: Tensor
    norm_l_weight: Tensor
    norm_l_bias: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    value_v_weight: Tensor
    value_v_bias: Tensor
    value_l_weight: Tensor
    value_l_bias: Tensor
    out_v_weight: Tensor
    out_v_bias: Tensor
    out_l_weight: Tensor
    out_l_bias: Tensor
    gamma_v: Tensor
    gamma_l: Tensor


BiAttentionGradients = gradients_of(BiAttentionTensors, 'mask', 'bias')
_OF_ROWS = ('norm_v', 'query', 'value_v', 'out_v')
_OF_TEXT = ('norm_l', 'key', 'value_l', 'out_l')
# Parameters that only the tokens of images, or only those of texts, depend on.
_OF_IMAGE_ONLY = ('value_l_weight', 'value_l_bias', 'out_v_weight', 'out_v_bias', 'gamma_v')
_OF_TEXT_ONLY = ('value_v_weight', 'value_v_bias', 'out_l_weight', 'out_l_bias', 'gamma_l')


class BiAttentionSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        given (BiAttentionTensors): The inputs.
        out (Tensor): Output of the attention from the text to the image before its projection, shape (N, h, T, d).
        lse (Tensor): Log-sum-exp of its rows, shape (N, h, T).
        state (OnHost | None): State of the generator before dropout. If ``None``, there is no dropout.
    """

    given: BiAttentionTensors
    out: Tensor
    lse: Tensor
    state: OnHost | None


def bi_attention(settings: BiAttentionSettings, tensors: BiAttentionTensors) -> tuple[Tensor, Tensor]:
    """Compute attention between images and texts in both directions, with exact gradients.

    Args:
        settings (BiAttentionSettings): Settings.
        tensors (BiAttentionTensors): Inputs.

    Returns:
        tuple[Tensor, Tensor]: Tokens of images and texts, shapes (N, V, C) and (N, T, C).

    Raises:
        ValueError: If images and texts have tokens of different widths.
    """
    x, text = tensors.x, tensors.text
    if x.shape[-1] != text.shape[-1]:
        raise ValueError(f'tokens of images have width {x.shape[-1]}, those of texts {text.shape[-1]}; make them equal')
    used = UsedOutputs(2)
    for index, names in enumerate((_OF_IMAGE_ONLY, _OF_TEXT_ONLY)):
        own = used.only_for(index, [getattr(tensors, name) for name in names])
        tensors = tensors._replace(**dict(zip(names, own, strict=True)))
    out = _operation(with_dtype(settings, x), tensors)
    return used.split(out, [x.shape[1], text.shape[1]])


def _linear(s, t, rows, name):
    """Apply a layer in the precision of matrix products."""
    weight, bias = (t[f'{name}_{kind}'].to(s.dtype) for kind in ('weight', 'bias'))
    return F.linear(rows.to(s.dtype), weight, bias)


def _norm(s, t, rows, side):
    weight, bias = t[f'norm_{side}_weight'], t[f'norm_{side}_bias']
    rows = rows.to(torch.promote_types(rows.dtype, weight.dtype))
    return F.layer_norm(rows, rows.shape[-1:], weight, bias, s.eps[side == 'l'])


def _by_heads(s, rows):
    """Return rows (..., L, E) as (..., h, L, d)."""
    return rows.unflatten(-1, (s.num_heads, -1)).transpose(-2, -3)


def _project_text(s, t, text):
    """Compute normalised tokens of a text, shape (N, T, C), and its keys and values, shape (N, h, T, d)."""
    z = _norm(s, t, text, 'l')
    return z, *(_by_heads(s, _linear(s, t, z, name)) for name in ('key', 'value_l'))


def _update_text(s, t, z, out):
    """Compute the new tokens of a text from the output (N, h, T, d) of its attention."""
    return z + t['gamma_l'] * _linear(s, t, out.transpose(1, 2).flatten(2), 'out_l')


def _update_image_rows(s, t, rows, key, value, bias):
    """Compute the new tokens x' for some tokens of an image, and the scores S (in full precision) and values of these.

    Args:
        s (BiAttentionSettings): Settings with a dtype.
        t (dict[str, Tensor]): Parameters by name.
        rows (Tensor): Tokens, shape (R, C).
        key (Tensor): Keys of the text, shape (h, T, d).
        value (Tensor): Values of the text, shape (h, T, d).
        bias (Tensor | None): Shape (T,).

    Returns:
        tuple[Tensor, Tensor, Tensor]: Shapes (R, C), (h, R, T) and (h, R, d).
    """
    y = _norm(s, t, rows, 'v')
    query = _by_heads(s, _linear(s, t, y, 'query') * key.shape[-1] ** -0.5)
    scores = (query @ key.mT).clamp(-LIMIT, LIMIT)
    scores = scores.to(accumulator(scores))
    seen = (scores if bias is None else scores + bias).softmax(-1)
    seen = _apply_dropout(s, seen).to(s.dtype)
    branch = _linear(s, t, (seen @ value).transpose(0, 1).flatten(1), 'out_v')
    return y + t['gamma_v'] * branch, scores, _by_heads(s, _linear(s, t, y, 'value_v'))


def _apply_dropout(s, weights):
    """Return attention weights after dropout."""
    return weights * dropout_factor(weights, s.dropout) if s.dropout else weights


def _take_image(x, n):
    return None if x is None else x[n]


def _cut_rows(s, t):
    """Return the chunks of the tokens of an image, as slices."""
    width = max(s.num_heads * t.text.shape[1], len(t.query_weight))
    return [chunk.rows for chunk in cut_into_chunks(1, t.x.shape[1], width, t.x.device, s.chunk)]


def _forward(s, tensors, needs):
    t = tensors
    named = t._asdict()
    z, key, value = _project_text(s, named, t.text)
    state = random_state(t.x.device, s.dropout)
    full = accumulator(t.x)
    shape = (len(t.x), s.num_heads, t.text.shape[1])
    top = torch.full(shape, torch.finfo(full).min, dtype=full, device=t.x.device)
    total, out = torch.zeros_like(top), key.new_zeros(key.shape, dtype=full)
    image = t.x.new_empty(t.x.shape, dtype=torch.promote_types(t.x.dtype, t.gamma_v.dtype))
    for n in range(len(t.x)):
        for part in _cut_rows(s, t):
            rows, scores, own = _update_image_rows(s, named, t.x[n, part], key[n], value[n], _take_image(t.bias, n))
            image[n, part] = rows
            if t.mask is not None:
                scores = scores.masked_fill(t.mask[n, part, None], float('-inf'))
            # The softmax over all tokens of the image, chunk by chunk: sums so far are scaled to the new maximum.
            new = torch.maximum(top[n], scores.amax(1))
            scale, weights = (top[n] - new).exp(), (scores - new[:, None]).exp()
            top[n], total[n] = new, total[n] * scale + weights.sum(1)
            out[n] = out[n] * scale[..., None] + (_apply_dropout(s, weights).to(s.dtype).mT @ own)
    out = (out / total[..., None]).to(s.dtype)
    text = _update_text(s, named, z, out)
    return torch.cat([image, text.to(image.dtype)], 1), BiAttentionSaved(t, out, top + total.log(), state)


def _list_needed(needs, others, layers, gamma):
    """Return the names of the needed gradients of some layers and other inputs."""
    names = [*others, gamma, *(f'{layer}_{kind}' for layer in layers for kind in ('weight', 'bias'))]
    return [name for name in names if getattr(needs, name, True)]


def _backward(s, saved, grad, needs):
    t, out, *_ = saved
    grad, of_text = grad.split([t.x.shape[1], t.text.shape[1]], 1)
    names = _list_needed(needs, ['text'], _OF_TEXT, 'gamma_l')
    with torch.enable_grad():
        own = t._asdict() | {name: getattr(t, name).detach().requires_grad_() for name in names}
        z, key, value = _project_text(s, own, own['text'])
        out = out.detach().requires_grad_()
        text = _update_text(s, own, z, out)
    (dout,) = torch.autograd.grad(text, [out], of_text.to(text.dtype), retain_graph=True)
    with replay_dropout(grad.device, saved.state):
        gradients, dkey, dvalue = _rows_backward(s, saved, grad, needs, dout, key.detach(), value.detach())
    differentiable = [(o, g) for o, g in ((text, of_text), (key, dkey), (value, dvalue)) if o.requires_grad]
    if names:
        outs, grads = zip(*differentiable, strict=True)
        grads = [g.to(o.dtype) for o, g in zip(outs, grads, strict=True)]
        gradients |= dict(zip(names, torch.autograd.grad(outs, [own[name] for name in names], grads), strict=True))
    return BiAttentionGradients(**gradients)


def _rows_backward(s, saved, grad, needs, dout, key, value):
    """Compute the gradients that come from the image, in chunks of its tokens.

    Returns:
        tuple[dict[str, Tensor], Tensor, Tensor]: Gradients of ``x`` and of the parameters by name, of the keys and of
        the values of the text.
    """
    t, out, lse, _ = saved
    delta = (dout * out).sum(-1, dtype=lse.dtype)  # D of each row of the second softmax
    names = _list_needed(needs, [], _OF_ROWS, 'gamma_v')
    sums = {name: torch.zeros_like(getattr(t, name), dtype=accumulator(t.x)) for name in names}
    dx = torch.empty_like(t.x) if needs.x else None
    dkey, dvalue = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
    for n in range(len(t.x)):
        for part in _cut_rows(s, t):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (t.x[n, part], key[n], value[n])]
                own = t._asdict() | {name: getattr(t, name).detach().requires_grad_() for name in names}
                rows_made = _update_image_rows(s, own, *leaves, _take_image(t.bias, n))
            weights = (rows_made[1].detach() - lse[n, :, None]).exp()  # P transposed, P = exp(S^T - lse)
            if t.mask is not None:
                weights = weights.masked_fill(t.mask[n, part, None], 0.0)
            # dP = dO V^T, dS^T = P * (dP - D), dV = P^T dO, all transposed; dropout multiplies P by `factor`.
            dweights = (rows_made[2].detach() @ dout[n].mT).to(weights.dtype)
            if s.dropout:
                factor = dropout_factor(weights, s.dropout)
                dweights.mul_(factor)
            dscores = weights * (dweights - delta[n, :, None])
            if s.dropout:
                weights.mul_(factor)
            down = weights.to(s.dtype) @ dout[n]
            wanted = [*leaves, *(own[name] for name in names)]
            gradients = torch.autograd.grad(rows_made, wanted, [grad[n, part].to(rows_made[0].dtype), dscores, down])
            if needs.x:
                dx[n, part] = gradients[0]
            dkey[n] += gradients[1]
            dvalue[n] += gradients[2]
            for name, gradient in zip(names, gradients[3:], strict=True):
                sums[name] += gradient
    return dict(sums, x=dx), dkey, dvalue


_operation = Operation('BiAttention', _forward, _backward, BiAttentionGradients)
