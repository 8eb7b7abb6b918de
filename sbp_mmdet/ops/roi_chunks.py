"""Layers that run on maps of RoIs in chunks, save only their input, and are recomputed chunk by chunk."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .common.autograd_function import apply_function, differentiable_once
from .common.handed_maps import Scope
from .common.precision import Sum, accumulator, autocast_dtype

__all__ = ['ROIS', 'run_in_chunks']

ROIS = 64  # number of RoIs in a chunk: enough to keep a GPU busy, in little memory


def run_in_chunks(forward: Callable, x: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor | tuple[Tensor, ...]:
    """Run layers that save only their input, and recompute them in the backward pass, a chunk of RoIs at a time.

    Args:
        forward (Callable): Forward pass of the layers, which returns a map, or a tuple of maps. It computes each RoI
            independently of the others.
        x (Tensor): Maps of the RoIs, shape (number of RoIs, C, H, W).
        parameters (Sequence[nn.Parameter]): Parameters that need gradients.

    Returns:
        Tensor | tuple[Tensor, ...]: Result of the forward pass for all RoIs.

    Example:
        >>> masks = run_in_chunks(head, x, [*head.parameters()])
    """
    outputs = apply_function(_InChunks, forward, x, *parameters)
    return outputs[0] if len(outputs) == 1 else outputs


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward: Callable, x: Tensor, *parameters: Tensor):
        ctx.run, ctx.dtype = forward, autocast_dtype(x)
        ctx.save_for_backward(x, *parameters)
        outs = None
        for start in range(0, len(x), ROIS):
            outputs = _run(ctx, x[start : start + ROIS])
            outs = outs or [out.new_empty(len(x), *out.shape[1:]) for out in outputs]
            for out, part in zip(outs, outputs, strict=True):
                out[start : start + ROIS].copy_(part)
            del outputs
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        x, *parameters = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[1]
        dx = torch.empty_like(x) if needs_x else None
        sums = [Sum(p) for p in parameters]
        for start in range(0, len(x), ROIS):
            chunk = slice(start, start + ROIS)
            with torch.enable_grad():
                part = x[chunk].detach().requires_grad_(needs_x)
                outs = _run(ctx, part)
            given = [None if grad is None else grad[chunk] for grad in grads]
            outs, given = zip(*((o, g) for o, g in zip(outs, given, strict=True) if g is not None), strict=True)
            wanted = [part, *parameters] if needs_x else parameters
            gradients = torch.autograd.grad(outs, wanted, given, allow_unused=True)
            del outs, given
            if needs_x:
                dpart, *gradients = gradients
                dx[chunk] = 0 if dpart is None else dpart
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add(gradient.to(accumulator(gradient)))
            del gradients, part
        pairs = zip(sums, parameters, strict=True)
        gradients = [None if total.empty else total.value.to(p.dtype) for total, p in pairs]
        return None, dx, *gradients


def _run(ctx, x):
    """Run the layers on the maps of some RoIs in the precision of the forward pass, and return their outputs."""
    # Autocast's cache is off: casts of weights that were made without gradients would be used where these are needed.
    cast = torch.autocast(x.device.type, dtype=ctx.dtype, enabled=ctx.dtype is not None, cache_enabled=False)
    with cast, Scope():
        outs = ctx.run(x)
    return outs if isinstance(outs, tuple) else (outs,)
