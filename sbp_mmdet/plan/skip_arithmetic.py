"""A training step without its arithmetic: all tensors are allocated, but few are computed.

The bytes of a step depend on shapes and types, not on values, except where boxes are compared. So the large operations
of the network, the backward pass and the optimizer need not be computed for a count of bytes: their results are zeros
of the right shape. Proposals, assignment and sampling are computed as usual. So are integers and bools, because masks
and indices decide how many rows are saved.
"""

import functools
import mmap
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .memory import tensors_in

__all__ = ['SkipArithmetic']

# Operations with fewer elements are computed: they cost little, and boxes are among them.
_LARGE = 2**17
_FACTORIES = ('zeros', 'new_zeros', 'zeros_like', 'ones', 'new_ones', 'full', 'new_full')
# Memory that nothing was written to is zeros as well: what would write to it may be large, and is not computed then.
_FACTORIES += ('empty', 'new_empty', 'empty_like', 'empty_strided', 'new_empty_strided')
# Number of operations whose results are remembered. A step of a detector has some hundred of different shapes, and the
# steps of its variants share most of them.
_REMEMBERED = 2**14
_PAGES = 2**16  # bytes from which zeros are cheaper as pages of the operating system


class SkipArithmetic(TorchDispatchMode):
    """Mode in which large operations return zeros of the right shape instead of being computed.

    Args:
        active (Callable): Returns whether the step is at a place where values do not matter.
    """

    def __init__(self, active: Callable[[], bool]):
        super().__init__()
        self._active = active

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # see LiveBytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind.view or not self._active() or not _is_large(kind, args, kwargs):
            return func(*args, **kwargs)
        return _mutated(func, args, kwargs) if kind.in_place else _skipped(func, args, kwargs)


class _Kind(NamedTuple):
    """Properties of an operation, read from its schema.

    Attributes:
        view (bool): Whether it returns a view of an input.
        in_place (bool): Whether it writes to an input, or to ``out``.
        factory (bool): Whether it makes a tensor from a shape.
    """

    view: bool
    in_place: bool
    factory: bool


@functools.cache
def _kind_of(func):
    schema = func._schema
    return _Kind(
        view=any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
        or func.overloadpacket.__name__ == '_unsafe_view',  # whose schema does not say so
        in_place=schema.is_mutable and (not schema.returns or schema.returns[0].alias_info is not None),
        factory=func.overloadpacket.__name__ in _FACTORIES,
    )


def _is_large(kind, args, kwargs):
    tensors = tensors_in(args, kwargs)
    dtype = kwargs.get('dtype') or (None if tensors else torch.get_default_dtype())
    if not (any(t.is_floating_point() for t in tensors) if dtype is None else dtype.is_floating_point):
        return False
    return kind.factory or any(t.numel() >= _LARGE for t in tensors)


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


class _Zeros(NamedTuple):
    """A result that is not computed: a view of a storage of ``nbytes`` bytes from ``offset`` on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    offset: int

    def make(self) -> Tensor:
        if not self.nbytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        if self.nbytes < _PAGES:
            numbers = torch.zeros(self.nbytes, dtype=torch.uint8)
        else:
            # The operating system provides zeros when a page is first touched, which happens to few pages. An allocator
            # would write them, because it takes memory that was used before.
            numbers = torch.frombuffer(mmap.mmap(-1, self.nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        return torch.empty(0, dtype=self.dtype).set_(numbers.untyped_storage(), self.offset, self.shape, self.stride)


_OF_VALUES = object()  # in place of results whose shapes depend on values
_remembered = {}


def _skipped(func, args, kwargs):
    """Return zeros in place of an operation's results. The shapes of results follow from the shapes of arguments."""
    key = func, _shapes(args), _shapes(kwargs)
    results = _remembered.get(key)
    if results is None:
        results = _inferred(func, args, kwargs)
        if len(_remembered) >= _REMEMBERED:
            _remembered.clear()
        if not tensors_in(results):
            _remembered[key] = results
    if results is _OF_VALUES:
        return func(*args, **kwargs)
    return _make_results(results)


def _inferred(func, args, kwargs):
    try:
        results = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    except (RuntimeError, NotImplementedError):
        return _OF_VALUES
    if func is torch.ops.aten.native_group_norm_backward.default and results[0] is not None:
        # Kernels return the input's type; torch's meta function does not.
        results = results[0].to(args[1].dtype), *results[1:]
    return tree_map(_to_zeros, results)


def _shapes(value):
    """Return a key that is equal for arguments whose tensors have the same shapes, strides and types."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes, value))
    if isinstance(value, dict):
        return tuple((name, _shapes(one)) for name, one in value.items())
    return type(value), value  # 1, 1.0 and True are equal


def _to_meta(value):
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')
    return torch.device('meta') if isinstance(value, torch.device) else value


def _to_zeros(value):
    if not isinstance(value, Tensor) or value.device.type != 'meta':
        return value
    return _Zeros(value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes(), value.storage_offset())


def _make_results(results):
    if isinstance(results, _Zeros):
        return results.make()
    return type(results)(map(_make_results, results)) if type(results) in (list, tuple) else results
