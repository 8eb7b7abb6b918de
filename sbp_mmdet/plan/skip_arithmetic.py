"""A training step without its arithmetic: all tensors are allocated, but few are computed.

The bytes of a step depend on shapes and types, not on values, except where boxes are compared. So the large operations
of the network, the backward pass and the optimizer need not be computed for a count of bytes: their results are zeros
of the right shape. Proposals, assignment and sampling are computed as usual. So are integers and bools, because masks
and indices decide how many rows are saved.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ['SkipArithmetic']

# Operations with fewer elements are computed: they cost little, and boxes are among them.
_LARGE = 2**17
_FACTORIES = ('zeros', 'new_zeros', 'zeros_like', 'ones', 'new_ones', 'full', 'new_full')


class SkipArithmetic(TorchDispatchMode):
    """Mode in which large operations return zeros of the right shape instead of being computed.

    Args:
        active (Callable): Returns whether the step is at a place where values do not matter.
    """

    def __init__(self, active: Callable[[], bool]):
        super().__init__()
        self._active = active

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._active() and not _is_view(func) and _is_large(func, args, kwargs):
            returns = func._schema.returns
            if func._schema.is_mutable and (not returns or returns[0].alias_info):
                return _mutated(func, args, kwargs)
            try:
                results = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
            except (RuntimeError, NotImplementedError):  # the shape of the result depends on values
                return func(*args, **kwargs)
            if func is torch.ops.aten.native_group_norm_backward.default and results[0] is not None:
                # Kernels return the input's type; torch's meta function does not.
                results = results[0].to(args[1].dtype), *results[1:]
            return tree_map(_to_zeros, results)
        return func(*args, **kwargs)


def _is_view(func):
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


def _is_large(func, args, kwargs):
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    dtype = kwargs.get('dtype') or (None if tensors else torch.get_default_dtype())
    if not (any(t.is_floating_point() for t in tensors) if dtype is None else dtype.is_floating_point):
        return False
    return func.overloadpacket.__name__ in _FACTORIES or any(t.numel() >= _LARGE for t in tensors)


def _mutated(func, args, kwargs):
    """Return the tensors that an operation in place or with ``out`` would have written to, unchanged."""
    values = [
        kwargs.get(argument.name, args[i] if i < len(args) else None)
        for i, argument in enumerate(func._schema.arguments)
    ]
    written = [v for v, a in zip(values, func._schema.arguments, strict=True) if a.alias_info and a.alias_info.is_write]
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _to_meta(value):
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')
    return torch.device('meta') if isinstance(value, torch.device) else value


def _to_zeros(value):
    if not isinstance(value, Tensor) or value.device.type != 'meta':
        return value
    if not value.untyped_storage().nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    # With numpy, the operating system provides zeros when a page is first touched, which happens to few pages.
    storage = torch.from_numpy(np.zeros(value.untyped_storage().nbytes(), np.uint8)).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())
