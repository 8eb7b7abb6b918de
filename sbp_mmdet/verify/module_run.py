"""One forward and backward pass of a module, with outputs, gradients and saved bytes for a comparison."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..ops.common.precision import accumulator

__all__ = ['Run', 'SavedTensors', 'bridge', 'cotangent', 'find_floating', 'norm', 'run_module', 'storage_of']


_AT_A_TIME = 2**18
_MOVED = 0.1  # scale of the noise that is added to constant parameters


class SavedTensors(NamedTuple):
    """Tensors that autograd saves in a module's forward pass.

    Attributes:
        inside (int): Bytes of tensors that are neither inputs nor outputs, nor parameters and buffers.
        inputs (frozenset[int]): Indices of the saved ones among the floating-point inputs.
        outputs (frozenset[int]): Indices of the saved ones among the floating-point outputs.
    """

    inside: int
    inputs: frozenset
    outputs: frozenset


class Run(NamedTuple):
    """Results of a pass.

    Attributes:
        outputs (dict[str, Tensor | None]): Floating-point outputs, buffers after the pass, and inputs that the module
            has written to (``None`` for the others).
        gradients (dict[str, Tensor | None]): Gradients of floating-point inputs and of parameters.
        stored (SavedTensors): Tensors that autograd saved.
    """

    outputs: dict
    gradients: dict
    stored: SavedTensors


def find_floating(tree) -> list[Tensor]:
    """Return the floating-point tensors of nested arguments."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the storage of a tensor as long as the storage exists."""
    return tensor.untyped_storage()._cdata


def cotangent(number: int, output: Tensor) -> Tensor:
    """Return a fixed gradient for an output.

    It is the sum of random numbers, a constant and a multiple of the output, so that every term of the backward pass of
    a norm is large enough to be checked. It is small enough for sums in half precision.

    Args:
        number (int): Index of the output, which seeds the random numbers.
        output (Tensor): The output.

    Returns:
        Tensor: The gradient, of the same shape, precision and device.
    """
    generator = torch.Generator(output.device).manual_seed(number)
    full = torch.float64 if output.dtype == torch.float64 else torch.float32
    noise = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float32).to(full)
    scale = output.to(full).square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    noise += 0.5 + 0.5 * output.to(full) / scale
    return noise.nan_to_num_(0, 0, 0).mul_(max(output.numel(), 1) ** -0.25).to(output.dtype)


def norm(x: Tensor | None) -> float:
    """Return the norm of a tensor.

    Args:
        x (Tensor | None): The tensor. If ``None``, the norm is 0.
    """
    if x is None or not x.numel():
        return 0.0
    if x.device.type != 'cpu' or x.numel() <= _AT_A_TIME:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))
    # On a CPU a norm in another precision makes a copy: one of a part stays in the caches.
    return math.hypot(*(norm(part) for part in x.flatten().split(_AT_A_TIME)))


def run_module(
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    cotangent: Callable[[int, Tensor], Tensor],
    dtype: torch.dtype | None = None,
    shift: dict[str, Tensor] | None = None,
    backward: bool = True,
) -> Run:
    """Run a module forward and backward on copies of its inputs, buffers and parameters.

    No gradient is accumulated, and no hook of a parameter runs. Noise is added to parameters and buffers that are
    constant, as many are after initialisation, and it is the same in each run. A bias of zero or a layer scale of 1e-6
    would hide faults that show later in the training.

    Args:
        module (nn.Module): The module, in the mode and with the class that it should have.
        args (tuple): Arguments of the module.
        kwargs (dict): Keyword arguments of the module.
        cotangent (Callable): Returns the gradient of an output, given its index and its value.
        dtype (torch.dtype | None): Precision of the pass, without autocast. If ``None``, the pass has the precision of
            its inputs and of the present autocast. Default: None.
        shift (dict[str, Tensor] | None): Tensors that are added to inputs and parameters, by the name of their
            gradient. If ``None``, nothing is added. Default: None.
        backward (bool): Whether gradients are computed. If ``False``, what autograd saves is counted, and not kept in
            memory. Default: True.

    Returns:
        Run: The results.
    """
    return _Pass(module, dtype, shift or {}).run(args, kwargs, cotangent, backward)


class _Pass:
    """One pass of a module on copies of its inputs, parameters and buffers, see :func:`run_module`.

    Args:
        module (nn.Module): The module.
        dtype (torch.dtype | None): Precision of the pass. If ``None``, that of its inputs and of the present autocast.
        shift (dict[str, Tensor]): Tensors that are added to inputs and parameters, by the name of their gradient.
    """

    def __init__(self, module, dtype, shift):
        self._module, self._dtype, self._shift = module, dtype, shift
        self._inputs = {}  # id of an argument -> the leaf in its place, and the copy of it that the module gets
        self._parameters = {
            name: nn.Parameter(
                self._shifted(name, self._cast(_perturb_if_constant(p.detach()))), requires_grad=p.requires_grad
            )
            for name, p in module.named_parameters()
        }
        self._buffers = {
            name: self._cast(_perturb_if_constant(buffer.detach(), positive=True)).clone()
            for name, buffer in module.named_buffers()
        }

    def run(self, args, kwargs, cotangent, backward) -> Run:
        """Run the pass; it can run once."""
        off = contextlib.nullcontext()
        if self._dtype:
            devices = {t.device.type for t in (*self._parameters.values(), *find_floating((args, kwargs)))}
            off = torch.autocast(next(iter(devices), 'cpu'), enabled=False)
        # A checkpoint around the pass must not take what is saved here, also in the backward pass, for its own tensors.
        apart = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.enable_grad(), off, apart, _without_weight_cache():
            tensors = {f'module.{name}': t for name, t in (self._parameters | self._buffers).items()}
            step = functools.partial(self._forward_and_backward, args, kwargs, cotangent, backward)
            return functional_call(_Calls(self._module), tensors, (step,))

    def _forward_and_backward(self, args, kwargs, cotangent, backward):
        inputs, saved, references = tree_map(self._copied, (args, kwargs)), {}, []

        def pack(tensor):
            references.append(StorageWeakRef(tensor.untyped_storage()))  # keep addresses from being reused
            saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor if backward else None

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
            outs = find_floating(self._module(*inputs[0], **inputs[1]))
        written = [x.detach() if x._version else None for _, x in self._inputs.values()]  # each is a new copy
        own = [*self._parameters.values(), *self._buffers.values()]
        stored = _stored(saved, [passed for _, passed in self._inputs.values()], outs, own)
        wanted = {f'input {i}': x for i, (x, _) in enumerate(self._inputs.values())}
        wanted |= {name: p for name, p in self._parameters.items() if p.requires_grad}
        wanted = wanted if backward else {}
        with_graph = [(i, o) for i, o in enumerate(outs) if o.requires_grad]
        gradients = [None] * len(wanted)
        if with_graph and wanted:
            cotangents = [cotangent(i, o.detach()) for i, o in with_graph]
            outputs = [o for _, o in with_graph]
            gradients = torch.autograd.grad(outputs, [*wanted.values()], cotangents, allow_unused=True)
        results = {f'output {i}': o.detach() for i, o in enumerate(outs)}
        results |= {name: buffer for name, buffer in self._buffers.items() if buffer.is_floating_point()}
        results |= {f'input {i} after the call': x for i, x in enumerate(written)}
        return Run(results, dict(zip(wanted, gradients, strict=True)), stored)

    def _copied(self, tensor):
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            return tensor
        if id(tensor) not in self._inputs:
            leaf = self._shifted(f'input {len(self._inputs)}', self._cast(tensor.detach())).requires_grad_()
            # Modules may change their input in place, which a leaf forbids.
            self._inputs[id(tensor)] = leaf, leaf.clone()
        return self._inputs[id(tensor)][1]

    def _cast(self, tensor):
        return tensor.to(self._dtype) if self._dtype and tensor.is_floating_point() else tensor

    def _shifted(self, name, tensor):
        return tensor + self._shift[name] if self._shift.get(name) is not None else tensor.detach()


def _perturb_if_constant(tensor, positive=False):
    """Add noise to a constant tensor. Any other tensor is returned unchanged.

    Args:
        tensor (Tensor): The tensor.
        positive (bool): Whether positive numbers remain positive, as variances must. Default: False.
    """
    if not (tensor.is_floating_point() and tensor.numel()) or not (tensor == tensor.flatten()[0]).all():
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel())
    noise = torch.randn(tensor.shape, generator=generator, device='cpu').clamp_(-2, 2).mul_(_MOVED).to(tensor)
    size = tensor.abs()
    size = torch.where(size > 0, size, 1) if positive else size.clamp_min(1)
    return tensor + noise * size


class _Calls(nn.Module):
    """Module that calls a function, so that ``functional_call`` replaces tensors in a recomputation, too."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, function):
        return function()


def _stored(saved, inputs, outputs, own):
    known = {storage_of(t) for t in own}
    ins, outs = ({storage_of(t): i for i, t in enumerate(tensors)} for tensors in (inputs, outputs))
    inside = sum(
        n for address, n in saved.items() if address not in known and address not in ins and address not in outs
    )
    return SavedTensors(
        inside,
        frozenset(i for address, i in ins.items() if address in saved),
        frozenset(i for address, i in outs.items() if address in saved and address not in ins),
    )


@contextlib.contextmanager
def _without_weight_cache():
    """Disable autocast's cache, which would keep casts of the copied weights until the step ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Bridged(torch.autograd.Function):
    """Autograd function that runs a function without a graph and gives its inputs synthetic gradients.

    The gradients are linear in those of the outputs. It replaces a module inside of another one, so that both sides of
    a comparison get the same gradients from it.
    """

    @staticmethod
    def forward(ctx, run, structure, *leaves):
        out = run(*tree_unflatten([*leaves], structure))
        ctx.shapes = [(x.shape, x.dtype, x.device) if _is_float(x) else None for x in leaves]
        ctx.set_materialize_grads(False)
        return tuple(o.clone() if isinstance(o, Tensor) else o for o in out)

    @staticmethod
    def backward(ctx, *grads):
        total = sum(_project(g) for g in grads if g is not None)
        made = (None if s is None else (_fixed_numbers(*s) * total).to(s[1]) for s in ctx.shapes)
        return None, None, *made


def bridge(run: Callable, args: tuple, kwargs: dict):
    """Run ``run(*args, **kwargs)`` in :class:`_Bridged`.

    Args:
        run (Callable): The function.
        args (tuple): Arguments of the function.
        kwargs (dict): Keyword arguments of the function.

    Returns:
        The result of ``run``.
    """
    leaves, structure = tree_flatten((args, kwargs))
    found = []

    def flat_run(args, kwargs):
        flat, spec = tree_flatten(run(*args, **kwargs))
        found.append(spec)
        return flat

    return tree_unflatten([*_Bridged.apply(flat_run, structure, *leaves)], found[0])


def _is_float(x):
    return isinstance(x, Tensor) and x.is_floating_point()


def _project(grad):
    grad = grad.to(accumulator(grad))
    return (grad * _fixed_numbers(grad.shape, grad.dtype, grad.device)).sum()


def _fixed_numbers(shape, dtype, device):
    """Return a fixed tensor, cos(1.7 i) / sqrt(n) for its i-th of n elements, which no fault is likely to reproduce."""
    number = torch.Size(shape).numel()
    numbers = torch.arange(number, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return numbers.mul_(1.7).cos_().view(shape) / max(number, 1) ** 0.5
