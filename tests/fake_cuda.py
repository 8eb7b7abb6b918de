"""Fake tensors of a GPU: shapes, data types and devices by the rules of CUDA, without numbers.

torch's FakeTensor takes the branches of CUDA and refuses what CUDA would refuse, on a machine without a GPU and with a
torch that was built without CUDA. Two things are missing there, and stand here: what tells autograd of the device, and
autograd's engine, which asks for a real device.
"""

import contextlib
import ctypes
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet.plan.detector import clear_caches
from sbp_mmdet.stochastic_backprop.masks import Positions
from sbp_mmdet.stochastic_backprop.step_draws import StepDraws, ThinnedStages

__all__ = [
    'backward',
    'copy_to_gpu',
    'count_kernels_of_lists',
    'move_to_gpu',
    'simulate_gpu',
    'unset_fake_temporarily',
]

unset_fake_temporarily = getattr(fake_tensor, 'unset_fake_temporarily', None)  # torch 2.1, which has none, skips these
# Shape of the result of a kernel that torch knows for CUDA alone.
_shapes = torch.library.Library('aten', 'IMPL', 'Meta')
_shapes.impl('batch_norm_elemt', lambda x, *_: torch.empty_like(x))
_PASSES = itertools.count()
_CUDA = 1  # in c10's list of kinds of devices


@contextlib.contextmanager
def simulate_gpu():
    """Open a FakeTensorMode in which autograd and autocast accept tensors with device='cuda', and draws have values.

    torch's own function for this (``_ensureCUDADeviceGuardSet``) replaces a driver that finds no device. A torch
    that was built without CUDA has no driver, so it gets one that finds no device.
    """
    if sys.platform != 'linux' or not hasattr(torch._C, '_ensureCUDADeviceGuardSet'):
        import pytest  # not above: the report of a GPU counts launches where pytest may be missing

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
            _drawing_on_cpu(mode),
            _OnePrecision(),
        ):
            clear_caches()  # of tensors on a real GPU
            yield mode
    finally:
        drivers[_CUDA] = before
        clear_caches()  # of tensors of this mode


# Operations by the indices of the tensors that CUDA's kernel takes in one precision, with that of `out`.
_OF_ONE_PRECISION = {
    (0, 1): 'mm mv dot bmm native_batch_norm_backward cudnn_batch_norm_backward avg_pool2d_backward '
    'max_pool2d_with_indices_backward searchsorted _softmax_backward_data',
    (0, 2): 'index_put index_put_',
    (0, 3): 'index_add index_add_ index_copy index_copy_',
    (0, 1, 2): 'addmm addmv baddbmm convolution convolution_backward native_group_norm '
    '_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention',
    (0, 2, 3): 'native_layer_norm',
    (0, 1, 5): 'native_layer_norm_backward',
    (0, 1, 4): 'native_group_norm_backward',
    (0, 1, 2, 3, 4): '_scaled_dot_product_flash_attention_backward',
    (0, 1, 2, 3, 5): '_scaled_dot_product_efficient_attention_backward',
}
_IN_ONE_PRECISION = {name: places for places, names in _OF_ONE_PRECISION.items() for name in names.split()}


class _OnePrecision(TorchDispatchMode):
    """Mode that refuses tensors of several precisions, which fake tensors accept and CUDA's kernels do not.

    Statistics of a layer norm have to be in full precision, too.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # see LiveBytes

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _IN_ONE_PRECISION and args[0].is_cuda:
            given = [args[i] for i in _IN_ONE_PRECISION[name] if i < len(args)]
            given += [] if func._overloadname.startswith('dtype') else [kwargs.get('out')]
            dtypes = {t.dtype for t in given if isinstance(t, Tensor)}
            if len(dtypes) > 1:
                raise RuntimeError(f'{func}: expected one scalar type but found {sorted(map(str, dtypes))}')
        if name == 'native_layer_norm_backward' and args[0].is_cuda:
            assert {t.dtype for t in args[3:5]} == {torch.promote_types(args[1].dtype, torch.float32)}
        return func(*args, **kwargs)


def backward(outputs: list[Tensor]) -> dict[Tensor, Tensor]:
    """Run the backward pass node by node, without autograd's engine.

    Args:
        outputs (list[Tensor]): What the gradients come in at.

    Returns:
        dict[Tensor, Tensor]: Leaf to gradient.
    """
    number = next(_PASSES)
    # Outside of the engine there is no such number, and torch's checkpoints recompute for each tensor that they saved.
    with torch.no_grad(), mock.patch.object(torch._C, '_current_graph_task_id', lambda: number):
        return _run_nodes(outputs)


def _run_nodes(outputs):
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
    """Return the nodes that receive the gradients of a node's inputs, with these gradients, or ``None`` if there are
    none."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if grads is None:
        return [(edge, None) for edge in edges]
    if hasattr(node, 'apply'):  # a function in Python, which has inputs that are no tensors
        gradients = node.apply(*grads)
        gradients = [grad for grad, needed in zip(gradients, node.needs_input_grad, strict=True) if needed]
    else:
        gradients = node(*grads)
        gradients = gradients if isinstance(gradients, tuple) else [gradients]
        gradients = [grad for grad, edge in zip(gradients, node.next_functions, strict=True) if edge[0] is not None]
    return list(zip(edges, gradients, strict=True))


def _add(incoming, node, number, grad):
    wanted = node._input_metadata[number]
    assert grad.device == wanted.device, f'{node.name()} gets a gradient on {grad.device}'
    grad = grad.sum_to_size(torch.Size(wanted.shape)).to(wanted.dtype)  # as the engine does
    grads = incoming.setdefault(node, [None] * len(node._input_metadata))
    grads[number] = grad if grads[number] is None else grads[number] + grad


def copy_to_gpu(mode: FakeTensorMode, tree):
    """Return fake GPU tensors for CPU tensors in nested tuples and dicts.

    They have the same strides, and are leaves that require a gradient if the originals do. Numbers that are read on the
    host stay there.

    Args:
        mode (FakeTensorMode): Result of :func:`simulate_gpu`.
        tree: Tensors, :class:`Positions` or containers of them.
    """
    if isinstance(tree, Positions):
        return Positions(*(copy_to_gpu(mode, tensor) for tensor in tree))
    if isinstance(tree, Tensor):
        tensor = torch.empty_strided(tree.shape, tree.stride(), dtype=tree.dtype, device='cuda')
        return tensor.requires_grad_(tree.requires_grad)
    if isinstance(tree, dict):
        return {key: copy_to_gpu(mode, value) for key, value in tree.items()}
    if hasattr(tree, '_fields'):
        return type(tree)(*(copy_to_gpu(mode, value) for value in tree))
    return tree


def move_to_gpu(mode: FakeTensorMode, module: nn.Module) -> None:
    """Move parameters and buffers of a module to the fake GPU, in place."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(copy_to_gpu(mode, p), p.requires_grad)
        part._buffers = copy_to_gpu(mode, part._buffers)


def count_kernels_of_lists(name: str, args: tuple) -> int:
    """Count the kernels of an operation: one, or if CUDA has none for its lists, as many as a list has tensors.

    CUDA has one if the tensors of each pair have the same shape and strides, and all have one precision; tensors that
    are copied may have two.

    Args:
        name (str): Name of the operation.
        args (tuple): Its arguments.
    """
    if not name.startswith('_foreach'):
        return 1
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and isinstance(arg[0], Tensor)]
    dtypes = {x.dtype for tensors in lists for x in tensors} if name != '_foreach_copy_' else ()
    alike = all(len({(x.shape, x.stride()) for x in pair}) == 1 for pair in zip(*lists, strict=True))
    return 1 if alike and len(dtypes) < 2 else len(lists[0])


@contextlib.contextmanager
def _drawing_on_cpu(mode):
    """Make backbones draw on the CPU, as always, and move the drawn positions and heads to the fake GPU."""

    def on_cpu(draw, moves):
        def drawn(*args):
            with unset_fake_temporarily():
                drawn_values = draw(*args)
            return copy_to_gpu(mode, drawn_values) if moves else drawn_values

        return drawn

    names = dict(positions=True, heads=True, images=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ThinnedStages, 'device', lambda self, key: torch.device('cpu')))
        for name, moves in names.items():
            stack.enter_context(mock.patch.object(StepDraws, name, on_cpu(getattr(StepDraws, name), moves)))
        yield
