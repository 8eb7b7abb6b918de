"""Layers that run on maps of RoIs in chunks, save only their input, and are recomputed chunk by chunk."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .common.autograd_function import apply_function, differentiable_once
from .common.module_state import ModuleState, replaced, submodules
from .common.precision import Sums, autocast_dtype
from .common.shared_maps import Scope

__all__ = ['ROIS', 'run_in_chunks']

ROIS = 64  # number of RoIs in a chunk: enough to keep a GPU busy, in little memory


def run_in_chunks(forward: Callable, x: Tensor, modules: Sequence[nn.Module]) -> Tensor | tuple[Tensor | None, ...]:
    """Run layers that save only their input, and recompute them in the backward pass, a chunk of RoIs at a time.

    Args:
        forward (Callable): Forward pass of the layers, which returns a map, or a tuple of maps, some of which may be
            ``None``, as the boxes of a head that has no regression. It computes each RoI independently of the others.
        x (Tensor): Maps of the RoIs, shape (number of RoIs, C, H, W).
        modules (Sequence[nn.Module]): Modules that it runs.

    Returns:
        Tensor | tuple[Tensor | None, ...]: Result of the forward pass for all RoIs.

    Example:
        >>> masks = run_in_chunks(head, x, [head])
    """
    places = [
        (module, is_parameter, name)
        for module in submodules(modules)
        for is_parameter in (True, False)  # other tensors are, for example, FSDP's views of parameters
        for name, tensor in _tensors(module, is_parameter).items()
        if isinstance(tensor, Tensor) and tensor.requires_grad
    ]
    tensors = [_tensors(module, is_parameter)[name] for module, is_parameter, name in places]
    trained = {id(tensor): tensor for tensor in tensors}
    indices = [[*trained].index(id(tensor)) for tensor in tensors]
    layers = _Layers(forward, modules, places, indices)
    outputs = apply_function(_InChunks, layers, x, *trained.values())
    return outputs[0] if len(outputs) == 1 else outputs


def _tensors(module, is_parameter):
    """Return the dict of a module's parameters, or the one of its other attributes.

    It is looked up in each pass, because another recomputation around this one may replace it.
    """
    return module._parameters if is_parameter else vars(module)


class _Layers:
    """Layers with the parameters that they have in a forward pass.

    Args:
        forward (Callable): See :func:`run_in_chunks`.
        modules (Sequence[nn.Module]): See :func:`run_in_chunks`.
        places (Sequence[tuple[nn.Module, bool, str]]): For each attribute that is a trained tensor: its module,
            whether it is a parameter, and its name. Several may be the same tensor.
        indices (Sequence[int]): For each of these attributes, the index of its tensor.
    """

    def __init__(self, forward, modules, places, indices):
        self.forward, self._modules, self._places, self._indices = forward, modules, places, indices
        self._state = None

    def save_state(self):
        """Save the state of the modules, after a forward pass."""
        self._state = ModuleState(submodules(self._modules))

    @contextlib.contextmanager
    def with_leaves(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Restore the saved state within the context, with copies in the place of the trained tensors.

        The copies share memory with the tensors. Gradients of the tensors themselves would run the hooks on parameters
        for each chunk.

        Args:
            tensors (Sequence[Tensor]): The trained tensors.
        """
        leaves = [t.detach().requires_grad_() for t in tensors]
        leaves = [nn.Parameter(x) if isinstance(t, nn.Parameter) else x for t, x in zip(tensors, leaves, strict=True)]
        with self._state.restored():
            places = [(_tensors(module, is_parameter), name) for module, is_parameter, name in self._places]
            with replaced(places, [leaves[i] for i in self._indices]):
                yield leaves


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers: _Layers, x: Tensor, *trained: Tensor):
        ctx.layers, ctx.dtype = layers, autocast_dtype(x)
        ctx.save_for_backward(x, *trained)
        outs = None
        for start in range(0, len(x), ROIS):
            # Where maps and some layers are frozen, the graph of a chunk tells which outputs have a gradient.
            with torch.set_grad_enabled(outs is None and not ctx.needs_input_grad[1]):
                outputs = _run(ctx, x[start : start + ROIS])
            if outs is None:
                outs = [None if out is None else out.new_empty(len(x), *out.shape[1:]) for out in outputs]
                if not ctx.needs_input_grad[1]:
                    pairs = zip(outs, outputs, strict=True)
                    ctx.mark_non_differentiable(*[o for o, part in pairs if o is not None and not part.requires_grad])
            for out, part in zip(outs, outputs, strict=True):
                if part is not None:
                    out[start : start + ROIS].copy_(part)
            del outputs
        layers.save_state()
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        x, *trained = ctx.saved_tensors
        with ctx.layers.with_leaves(trained) as leaves:
            dx, sums = _backward(ctx, x, leaves, grads)
        gradients = [sums[i].to(t.dtype) if i in sums else None for i, t in enumerate(trained)]
        return None, dx, *gradients


def _backward(ctx, x, leaves, grads):
    """Return the gradient of the maps, and the gradients of the trained tensors by their index."""
    needs_x = ctx.needs_input_grad[1]
    dx = torch.empty_like(x) if needs_x else None
    sums = Sums(dict(enumerate(leaves)))
    for start in range(0, len(x), ROIS):
        chunk = slice(start, start + ROIS)
        with torch.enable_grad():
            part = x[chunk].detach().requires_grad_(needs_x)
            outs = _run(ctx, part)
        given = [None if grad is None else grad[chunk] for grad in grads]
        outs, given = zip(*((o, g) for o, g in zip(outs, given, strict=True) if g is not None), strict=True)
        wanted = [part, *leaves] if needs_x else leaves
        gradients = torch.autograd.grad(outs, wanted, given, allow_unused=True)
        del outs, given
        if needs_x:
            dpart, *gradients = gradients
            dx[chunk] = 0 if dpart is None else dpart
        sums.add(dict(enumerate(gradients)))
        del gradients, part
    return dx, sums.found


def _run(ctx, x):
    """Run the layers on the maps of some RoIs in the precision of the forward pass, and return their outputs."""
    # Autocast's cache is off: casts of weights that were made without gradients would be used where these are needed.
    cast = torch.autocast(x.device.type, dtype=ctx.dtype, enabled=ctx.dtype is not None, cache_enabled=False)
    with cast, Scope():
        outs = ctx.layers.forward(x)
    return outs if isinstance(outs, tuple) else (outs,)
