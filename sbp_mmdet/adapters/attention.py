"""mmcv's multi-head attention, and other attentions and cheap layers, which run their own code and are recomputed."""

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.layers.transformer.utils import ConditionalAttention, DynamicConv
from mmdet.models.necks.ssd_neck import L2Norm
from torch import Tensor, nn

from ..ops.common.precision import autocast_dtype
from .base import LeanModule, adapter
from .ffn import recomputed

__all__ = ['LeanMultiheadAttention', 'LeanRecomputed', 'bind_arguments']


def bind_arguments(forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> SimpleNamespace:
    """Return the arguments of a call by the names of a forward's parameters, with their defaults.

    Args:
        forward (Callable): The forward pass of a class.
        module (nn.Module): The module.
        args (tuple): Positional arguments.
        kwargs (dict): Keyword arguments.
    """
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


@adapter(MultiheadAttention)
class LeanMultiheadAttention(LeanModule):
    """mmcv's multi-head attention by torch's kernel without an attention map.

    With a mask or dropout, the layer is recomputed in the backward pass.
    """

    samples = has_reference = False
    reorders_dropout = True  # on a GPU, torch's kernel drops other entries than the own code

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        yield self.attn, 'multi-head attention'
        yield from ((module, 'recomputable') for module in self.attn.children())

    def lean_forward(self, *args, **kwargs) -> Tensor:
        """Run the layer; the arguments are those of mmcv's ``MultiheadAttention``."""
        a = bind_arguments(MultiheadAttention.forward, self, args, kwargs)
        key = a.query if a.key is None else a.key
        if not (a.query.numel() and key.numel()):  # torch cannot infer the shape of the kernel's mask then
            return super(LeanModule, self).forward(*args, **kwargs)
        value, key_pos = key if a.value is None else a.value, a.key_pos
        if key_pos is None and a.query_pos is not None:
            if a.query_pos.shape == key.shape:
                key_pos = a.query_pos
            else:
                warnings.warn(f'position encoding of key is missing in {type(self).__name__}.', stacklevel=2)
        tensors = (a.query, key, value, a.query_pos, key_pos, a.attn_mask, a.key_padding_mask)
        masked = a.attn_mask is not None or a.key_padding_mask is not None
        again = masked or (self.attn.dropout and self.attn.training)
        out = recomputed(self._attend, self, *tensors) if again else self._attend(*tensors)
        return (a.query if a.identity is None else a.identity) + self.dropout_layer(self.proj_drop(out))

    def _attend(self, query, key, value, query_pos, key_pos, attn_mask, key_padding_mask):
        query = query if query_pos is None else query + query_pos
        key = key if key_pos is None else key + key_pos
        masks = attn_mask, key_padding_mask
        if dtype := autocast_dtype(query):  # torch 2.1 casts neither a mask of bools nor one of numbers later
            cast = {id(x): x.to(dtype) for x in (query, key, value)}
            query, key, value = (cast[id(x)] for x in (query, key, value))
            masks = (x if x is None or x.dtype is torch.bool else x.to(dtype) for x in masks)
        added, padding = masks
        if self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out = self.attn(query, key, value, padding, need_weights=False, attn_mask=added)[0]
        if self.attn.bias_k is None and not self.attn.add_zero_attn:  # otherwise there is always a key
            _mark_rows_without_keys(out, attn_mask, key_padding_mask)
        return out.transpose(0, 1) if self.batch_first else out


def _mark_rows_without_keys(out: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> None:
    """Multiply those rows by NaN whose keys are all masked in one of the heads.

    The module's own softmax gives NaN there, in the gradients as well, which the loss shows. torch gives zeros.

    Args:
        out (Tensor): Output of the attention, shape (L, N, E), or (L, E); changed in place.
        attn_mask (Tensor | None): Mask of shape (L, S) or (N * h, L, S). True and minus infinity hide a key.
        key_padding_mask (Tensor | None): Mask of shape (N, S), or (S,).
    """
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.reshape(-1, key_padding_mask.shape[-1])
    if attn_mask is not None:
        images = 1 if out.dim() == 2 or attn_mask.dim() == 2 else out.shape[1]
        attn_mask = attn_mask.reshape(images, -1, *attn_mask.shape[-2:])  # (N, h, L, S), where N and h may be 1
        padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
        rows = _hidden(out.dtype, attn_mask, padding).all(3).any(1).T
    elif key_padding_mask is not None:
        rows = _hidden(out.dtype, key_padding_mask).all(1)[None]
    else:
        return
    rows = rows if out.dim() == 3 else rows[:, 0]
    out.mul_(torch.ones_like(rows, dtype=out.dtype).masked_fill_(rows, torch.nan)[..., None])


def _hidden(dtype: torch.dtype, mask: Tensor, other: Tensor | None = None) -> Tensor:
    """Return which keys masks hide. Masks of numbers are added to the scores in the precision of the attention."""
    if other is not None and torch.bool not in (mask.dtype, other.dtype):
        return mask.to(dtype) + other.to(dtype) == -torch.inf
    hides = mask if mask.dtype is torch.bool else mask.to(dtype) == -torch.inf
    return hides if other is None else hides | _hidden(dtype, other)


@adapter(
    *(ConditionalAttention, SpatialReductionAttention, nn.MultiheadAttention, DynamicConv, L2Norm),
    'projects.DiffusionDet.diffusiondet.head.DynamicConv',
)
class LeanRecomputed(LeanModule):
    """Layer that runs its own code and is recomputed in the backward pass: other attentions, and cheap layers."""

    samples = has_reference = False

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`. Nothing is bypassed, but the submodules are called twice."""
        yield from ((module, 'recomputable') for module in [*self.modules()][1:])

    def lean_forward(self, *args, **kwargs) -> Tensor:
        """Run the layer with its own arguments."""

        def run(args, kwargs):
            return super(LeanModule, self).forward(*args, **kwargs)

        return recomputed(run, self, args, kwargs)
