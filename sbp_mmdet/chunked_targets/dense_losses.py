"""Losses of dense heads, which are sums over priors and classes, computed some priors at a time."""

from collections.abc import Callable, Sequence

import torch
from mmdet.models.losses import FocalLoss, QualityFocalLoss, VarifocalLoss
from torch import Tensor, nn

from ..adapters.bypassed_modules import OF_EVERY_MODULE, PLAIN
from ..ops.common.autograd_function import apply_function, differentiable_once
from ..ops.common.module_state import ModuleState, submodules
from ..ops.common.precision import autocast_dtype
from ..surgery import Mixin, has_methods_of, mix_into_known

__all__ = ['losses_in_chunks']

_LOSSES = (FocalLoss, QualityFocalLoss, VarifocalLoss)


def losses_in_chunks(model: nn.Module, pairs: int) -> list[str]:
    """Make the focal losses of a model run over some priors at a time.

    Args:
        model (nn.Module): Detector, changed in place.
        pairs (int): Number of pairs of a prior and a class that are computed at a time.

    Returns:
        list[str]: Names of the changed losses.
    """
    losses = mix_into_known(model, _SumsInChunks, _is_known)
    for loss in losses.values():
        loss.pairs_at_a_time = pairs
    return [*losses]


def _is_known(loss):
    return any(has_methods_of(loss, kind, 'forward') for kind in _LOSSES) and _has_plain_settings(loss)


def _has_plain_settings(loss):
    """Return whether a loss has no tensors and modules. A weight that is a tensor may need a gradient."""
    own = vars(loss)
    holds_none = not (own['_parameters'] or own['_buffers'] or own['_modules'])
    return holds_none and all(type(value) in PLAIN for name, value in own.items() if name not in OF_EVERY_MODULE)


class _SumsInChunks(Mixin):
    """A focal loss of many priors. It saves its inputs only, and maps of all priors and classes exist in chunks.

    Attributes:
        pairs_at_a_time (int): Number of pairs of a prior and a class in a chunk.
    """

    def forward(self, pred, target, weight=None, avg_factor=None, reduction_override=None):
        """Compute the loss of predictions (number of priors, number of classes)."""
        options = dict(avg_factor=avg_factor, reduction_override=reduction_override)
        rows = max(self.pairs_at_a_time // max(pred[:1].numel(), 1), 1)
        targets = [*target] if isinstance(target, (tuple, list)) else [target]
        # A mean over priors is a sum that is divided by the factor, which each chunk does.
        adds_up = (reduction_override or self.reduction, avg_factor is not None) in (('sum', False), ('mean', True))
        given = [*targets, weight, avg_factor]
        constant = not any(isinstance(x, Tensor) and x.requires_grad for x in given) and _has_plain_settings(self)
        apart = all(_has_a_row_for_each(pred, x) for x in [*targets, *given[-2:-1]] if x is not None)
        if isinstance(self, VarifocalLoss) and weight is not None:  # one of a dimension weighs classes there
            apart = apart and weight.shape == pred.shape
        trains = torch.is_grad_enabled() and pred.requires_grad and pred.dim() == 2
        if not (trains and adds_up and constant and apart and len(pred) > rows):
            return super().forward(pred, target, weight, **options)
        own, several = super().forward, isinstance(target, (tuple, list))

        # The node holds this function, which must not hold the targets: within a checkpoint they are freed.
        def part(pred, weight, *targets):
            return own(pred, targets if several else targets[0], weight, **options)

        return apply_function(_Sum, part, self, rows, pred, weight, *targets)


def _has_a_row_for_each(pred, x):
    """Return whether a target or weight belongs to priors one by one; other shapes may be broadcast over all priors."""
    return isinstance(x, Tensor) and len(x) == len(pred) and (x.dim() == 1 or x.shape == pred.shape)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Callable, module: nn.Module, rows: int, pred: Tensor, *others: Tensor | None):
        ctx.loss, ctx.rows, ctx.dtype = loss, rows, autocast_dtype(pred)
        ctx.save_for_backward(pred, *others)
        total = sum(_chunk_loss(ctx, chunk) for chunk in _chunks(ctx, (pred, *others)))
        ctx.state = ModuleState(submodules([module]))  # its weight may have changed before the backward pass
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        pred, *others = ctx.saved_tensors
        result = torch.empty_like(pred)
        places = result.split(ctx.rows)
        with ctx.state.restored():
            for place, (part, *rest) in zip(places, _chunks(ctx, (pred, *others)), strict=True):
                with torch.enable_grad():
                    part = part.detach().requires_grad_()
                    total = _chunk_loss(ctx, (part, *rest))
                place.copy_(*torch.autograd.grad(total, part, grad))
        return None, None, None, result, *[None] * len(others)


def _chunks(ctx, tensors: Sequence[Tensor | None]):
    """Return the tensors of each chunk of priors."""
    number = -(-len(tensors[0]) // ctx.rows)
    return zip(*([None] * number if x is None else x.split(ctx.rows) for x in tensors), strict=True)


def _chunk_loss(ctx, chunk):
    """Return the loss of a chunk, in the precision of the forward pass."""
    device = chunk[0].device.type
    with torch.autocast(device, dtype=ctx.dtype, enabled=ctx.dtype is not None, cache_enabled=False):
        return ctx.loss(*chunk)
