"""Pytest plugin with a second device: 'meta' computes on the CPU and refuses to be mixed with CPU tensors.

    SBP_TEST_DEVICE=meta PYTHONPATH=tests python -m pytest -p second_device tests/test_training.py

So what the report of a GPU runs as its tests is seen to keep apart what lies on the GPU and what on the host.
"""

import contextlib

import mmcv._ext
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from sbp_mmdet.adapters.inputs import PLAIN_INPUTS
from sbp_mmdet.adapters.predicate import PLAIN_TENSORS

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default, aten.copy.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class Elsewhere(Tensor):
    """Tensor of the second device."""

    @staticmethod
    def __new__(cls, inner):
        shape = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype)
        return Tensor._make_wrapper_subclass(cls, inner.size(), **shape, layout=inner.layout, device='meta')

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        return f'Elsewhere({self.inner})'

    def tolist(self):
        return self.inner.tolist()

    # What torch does without asking the class.

    def item(self):
        return self.inner.item()

    def new_tensor(self, *args, **kwargs):
        return Elsewhere(self.inner.new_tensor(*args, **kwargs))

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def _set_data(self, other):
        Tensor.data.__set__(self, other)
        self.inner = other.inner

    data = property(Tensor.data.__get__, _set_data)


def _run(func, args, kwargs):
    leaves = tree_flatten((args, kwargs))[0]
    elsewhere = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
    here = [leaf for leaf in leaves if type(leaf) is not Elsewhere and isinstance(leaf, Tensor) and leaf.dim()]
    there = bool(elsewhere)
    if elsewhere and here and func not in _COPIES and not _are_indices(func, args, here):
        raise RuntimeError(f'{func} mixes tensors of the second device with those of the CPU')
    if (device := kwargs.get('device')) is not None:
        there = torch.device(device).type == 'meta'
        kwargs = dict(kwargs, device='cpu' if there else device)
    if func is aten.copy_.default or func is aten.index_put_.default:
        there = isinstance(args[0], Elsewhere)
    args, kwargs = tree_map_only(Elsewhere, lambda leaf: leaf.inner, (args, kwargs))
    out = func(*args, **dict(kwargs, **({'pin_memory': False} if kwargs.get('pin_memory') else {})))
    if func is aten._local_scalar_dense.default:
        return out
    known = {id(leaf.inner): leaf for leaf in elsewhere}  # what works in place gives back what it got

    def wrapped(found):
        return known[id(found)] if id(found) in known else Elsewhere(found) if there else found

    return tree_map_only(Tensor, wrapped, out)


def _are_indices(func, args, here):
    """Return whether all tensors on the host are indices, which CUDA accepts from there."""
    indices = [id(index) for index in args[1] or []] if func in _INDEXED else []
    return bool(indices) and isinstance(args[0], Elsewhere) and all(id(leaf) in indices for leaf in here)


def _on_cpu(kernel):
    """Return a function that runs a kernel of mmcv on the CPU, because mmcv has none for the device 'meta'."""

    def run(*args, **kwargs):
        there = any(isinstance(leaf, Elsewhere) for leaf in tree_flatten((args, kwargs))[0])
        args, kwargs = tree_map_only(Elsewhere, lambda leaf: leaf.inner, (args, kwargs))
        out = kernel(*args, **kwargs)
        return tree_map_only(Tensor, Elsewhere, out) if there else out

    return run


for _name, _kernel in vars(mmcv._ext).items():
    if callable(_kernel):
        setattr(mmcv._ext, _name, _on_cpu(_kernel))

# It computes like a plain tensor.
PLAIN_TENSORS.add('Elsewhere')
PLAIN_INPUTS.add(Elsewhere)


class _Everywhere(TorchDispatchMode):
    """Mode that also applies to functions that create tensors, which have no tensor among their arguments."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # see LiveBytes

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


_is_enabled, _autocast = torch.is_autocast_enabled, torch.autocast


def _autocast_there(device_type, *args, **kwargs):
    """Disable autocast for 'meta', which torch does not support."""
    return contextlib.nullcontext() if device_type == 'meta' else _autocast(device_type, *args, **kwargs)


torch.autocast = _autocast_there
torch.is_autocast_enabled = lambda *kind: kind != ('meta',) and _is_enabled(*kind)


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run each test with the second device."""
    with _Everywhere():
        yield
