"""Tensors of a GPU that is not there: shapes, data types and devices by torch's rules, without numbers.

torch's FakeTensor takes the branches of CUDA and refuses what CUDA would refuse, on a machine without a GPU and with a
torch that was built without CUDA. Two things are missing there, and stand here: what tells autograd of the device, and
autograd's engine, which asks for a real device.
"""

import contextlib
import ctypes
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from sbp_mmdet import SBPConvNeXt
from sbp_mmdet.masks import Positions

__all__ = ['backward', 'fake_backbone', 'gpu_that_is_not_there']

_CUDA = 1  # in c10's list of kinds of devices


@contextlib.contextmanager
def gpu_that_is_not_there():
    """FakeTensorMode, in which autograd and autocast accept tensors with device='cuda'.

    torch's own way to that (``_ensureCUDADeviceGuardSet``) replaces a driver that finds no device; a torch without CUDA
    has no driver. So it gets one that finds none.
    """
    if sys.platform != 'linux' or not hasattr(torch._C, '_ensureCUDADeviceGuardSet'):
        pytest.skip('needs Linux and torch 2.4 or newer')
    library = ctypes.CDLL(str(Path(torch.__file__).parent / 'lib/libc10.so'))
    drivers = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, '_ZN3c104impl26device_guard_impl_registryE')
    before = drivers[_CUDA]
    none = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)  # its answer to every question, among them the number of devices
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(none, ctypes.c_void_p).value] * 64)
    driver = ctypes.c_void_p(ctypes.addressof(methods))
    if not before:
        drivers[_CUDA] = ctypes.addressof(driver)
    torch._C._ensureCUDADeviceGuardSet()
    try:
        with (
            mock.patch.object(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: False),
            mock.patch.object(torch.cuda, 'is_bf16_supported', lambda *args: True),
            FakeTensorMode() as mode,
        ):
            yield mode
    finally:
        drivers[_CUDA] = before


@torch.no_grad()
def backward(outputs: list[Tensor]) -> dict[Tensor, Tensor]:
    """Runs the backward pass node by node, without autograd's engine.

    Args:
        outputs (list[Tensor]): What the gradients come in at.

    Returns:
        dict[Tensor, Tensor]: Leaf to gradient.
    """
    waiting, stack = {}, [out.grad_fn for out in outputs]  # node to the number of edges that lead to it
    seen = set(stack)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                waiting[node] = waiting.get(node, 0) + 1
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
    incoming, leaves = {}, {}
    for out in outputs:
        _add(incoming, out.grad_fn, out.output_nr, torch.empty_like(out))
    ready = [node for node in dict.fromkeys(out.grad_fn for out in outputs) if not waiting.get(node)]
    while ready:
        node = ready.pop()
        grads = incoming.pop(node, None)
        if hasattr(node, 'variable'):
            leaves[node.variable] = grads[0]
            continue
        for (after, number), grad in _edges(node, grads):
            if grad is not None:
                _add(incoming, after, number, grad)
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return leaves


def _edges(node, grads):
    """Where the gradients of a node's inputs go to, and the gradients; None: there is none."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if grads is None:
        return [(edge, None) for edge in edges]
    if hasattr(node, 'apply'):  # a function in Python, which has inputs that are no tensors
        found = node.apply(*grads)
        found = [grad for grad, needed in zip(found, node.needs_input_grad, strict=True) if needed]
    else:
        found = node(*grads)
        found = found if isinstance(found, tuple) else [found]
        found = [grad for grad, edge in zip(found, node.next_functions, strict=True) if edge[0] is not None]
    return list(zip(edges, found, strict=True))


def _add(incoming, node, number, grad):
    wanted = node._input_metadata[number]
    assert grad.device == wanted.device, f'{node.name()} gets a gradient on {grad.device}'
    grad = grad.sum_to_size(torch.Size(wanted.shape)).to(wanted.dtype)  # as the engine does
    grads = incoming.setdefault(node, [None] * len(node._input_metadata))
    grads[number] = grad if grads[number] is None else grads[number] + grad


class _Numbers:
    """A tensor on the CPU whose numbers are read."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def expand(self, *sizes):
        with unset_fake_temporarily():
            return _Numbers(self.tensor.expand(*sizes))

    def __getitem__(self, index):
        with unset_fake_temporarily():
            return int(self.tensor[index])


def fake_backbone(mode: FakeTensorMode, **arguments) -> SBPConvNeXt:
    """A small backbone on the GPU that is not there, in training mode. Positions are drawn on the CPU, as ever.

    Args:
        mode (FakeTensorMode): Of :func:`gpu_that_is_not_there`.
        **arguments: Of the backbone.
    """
    options = dict(out_indices=[0, 1, 2, 3], gap_before_final_norm=False) | arguments
    with unset_fake_temporarily():
        backbone = SBPConvNeXt(dict(depths=[1, 2, 2, 1], channels=[8, 12, 16, 20]), **options).train()
        draw = backbone.draw
    for module in backbone.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device='cuda'))

    def to_gpu(positions):
        keep, drop, nearest = tree_map_only(Tensor, lambda t: mode.from_tensor(t).to('cuda'), positions)
        if nearest is not None:
            nearest = nearest._replace(starts=_Numbers(positions.nearest.starts))
        return Positions(keep, drop, nearest)

    def draw_on_cpu(x, *args, **kwargs):
        with unset_fake_temporarily():
            drawn = draw(torch.empty(()).expand(x.shape), *args, **kwargs)
        return drawn._replace(positions={layer: to_gpu(found) for layer, found in drawn.positions.items()})

    backbone.draw = draw_on_cpu
    return backbone
