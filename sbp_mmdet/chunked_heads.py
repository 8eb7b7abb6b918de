"""Heads of RoIs that save only their input, and run and are recomputed in chunks of RoIs."""

from collections.abc import Callable, Sequence

import mmcv.cnn
import mmengine.model
import torch
from mmdet.models.backbones import resnet
from mmdet.models.layers import ResLayer
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead, Shared4Conv1FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.shared_heads import ResLayer as SharedHead
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .ops.common.autograd_function import differentiable_once
from .ops.common.handed_maps import Scope
from .ops.common.precision import Sum, accumulator, autocast_dtype
from .surgery import stock_class

__all__ = ['computes_rois_one_by_one', 'run_in_chunks', 'runs_in_chunks']

_ROIS = 64  # number of RoIs in a chunk: enough to keep a GPU busy, in little memory

# Classes of heads and layers that compute each RoI independently of the others.
_HEADS = (FCNMaskHead, ConvFCBBoxHead, Shared4Conv1FCBBoxHead, SharedHead)
_LAYERS = (
    *(nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.ReLU, nn.AvgPool2d, nn.Sequential, nn.ModuleList),
    *(nn.GroupNorm, nn.BatchNorm2d, nn.SyncBatchNorm),
    *(mmengine.model.Sequential, mmengine.model.ModuleList),
    *(mmcv.cnn.Conv2d, mmcv.cnn.ConvTranspose2d, mmcv.cnn.Linear, mmcv.cnn.ConvModule),
    *(ResLayer, resnet.Bottleneck, resnet.BasicBlock),
)


def computes_rois_one_by_one(head: nn.Module) -> bool:
    """Return whether a head computes each RoI independently, so that it can run in chunks of RoIs.

    Heads without convolutions are excluded, because they save little apart from their input.

    Args:
        head (nn.Module): The head.
    """
    if stock_class(type(head)) not in _HEADS:
        return False
    layers = [
        layer for name, child in head.named_children() if not name.startswith('loss') for layer in child.modules()
    ]
    known = all(stock_class(type(layer)) in _LAYERS for layer in layers)
    return known and any(isinstance(layer, nn.Conv2d) for layer in layers)


def runs_in_chunks(head: nn.Module, x: Tensor) -> bool:
    """Return whether a head runs in chunks now: batch norms must not normalise with statistics of the RoIs.

    Args:
        head (nn.Module): The head.
        x (Tensor): Input of the head.
    """
    norms = (m for m in head.modules() if isinstance(m, _BatchNorm))
    apart = not any(norm.training or norm.running_mean is None for norm in norms)
    return len(x) > _ROIS and apart and computes_rois_one_by_one(head)  # the head's layers may have been replaced


def run_in_chunks(forward: Callable, x: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor | tuple[Tensor, ...]:
    """Run a head that saves only its input, and recompute it in the backward pass, a chunk of RoIs at a time.

    Args:
        forward (Callable): The forward pass of the head, which returns a map, or a tuple of maps.
        x (Tensor): Maps of the RoIs, shape (number of RoIs, C, H, W).
        parameters (Sequence[nn.Parameter]): Parameters that need gradients.

    Returns:
        Tensor | tuple[Tensor, ...]: Result of the forward pass for all RoIs.
    """
    found = _run_all(forward, x, parameters)
    return found[0] if len(found) == 1 else found


@torch.compiler.disable
def _run_all(forward, x, parameters):
    return _InChunks.apply(forward, x, *parameters)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward: Callable, x: Tensor, *parameters: Tensor):
        ctx.head, ctx.dtype = forward, autocast_dtype(x)
        ctx.save_for_backward(x, *parameters)
        outs = None
        for start in range(0, len(x), _ROIS):
            found = _run(ctx, x[start : start + _ROIS])
            outs = outs or [out.new_empty(len(x), *out.shape[1:]) for out in found]
            for out, part in zip(outs, found, strict=True):
                out[start : start + _ROIS].copy_(part)
            del found
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        x, *parameters = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[1]
        dx = torch.empty_like(x) if needs_x else None
        sums = [Sum(p) for p in parameters]
        for start in range(0, len(x), _ROIS):
            chunk = slice(start, start + _ROIS)
            with torch.enable_grad():
                part = x[chunk].detach().requires_grad_(needs_x)
                outs = _run(ctx, part)
            given = [None if grad is None else grad[chunk] for grad in grads]
            outs, given = zip(*((o, g) for o, g in zip(outs, given, strict=True) if g is not None), strict=True)
            wanted = [part, *parameters] if needs_x else parameters
            found = torch.autograd.grad(outs, wanted, given, allow_unused=True)
            del outs, given
            if needs_x:
                dpart, *found = found
                dx[chunk] = 0 if dpart is None else dpart
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total.add(gradient.to(accumulator(gradient)))
            del found, part
        pairs = zip(sums, parameters, strict=True)
        gradients = [None if total.empty else total.value.to(p.dtype) for total, p in pairs]
        return None, dx, *gradients


def _run(ctx, x):
    """Run the head on the maps of some RoIs in the precision of the forward pass, and return its outputs as a tuple."""
    # Autocast's cache is off: casts of weights that were made without gradients would be used where these are needed.
    cast = torch.autocast(x.device.type, dtype=ctx.dtype, enabled=ctx.dtype is not None, cache_enabled=False)
    with cast, Scope():
        outs = ctx.head(x)
    return outs if isinstance(outs, tuple) else (outs,)
