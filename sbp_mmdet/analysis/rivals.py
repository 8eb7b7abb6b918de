"""What users would take instead of SBP, in the same tables: checkpointing by choice, ``torch.compile``, offloading.

Checkpointing of whole blocks is the preset 'with_cp'. Every rival here runs the same plain backbone, with the same
weights. Compiled graphs keep their tensors out of sight of hooks on saved tensors, so :func:`.memory.held_bytes` asks
the allocator.
"""

import contextlib
import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from unittest import mock

import torch
import torch.utils.checkpoint
from mmcv.cnn.bricks import DropPath
from torch import nn

from ..families import Unit
from ..ops.compiled import no_compiler
from .cuda_rules import autocast, full_fp32

__all__ = [
    'RIVALS',
    'Rival',
    'draws_of_plain_code',
    'drawn_errors',
    'first_line',
    'graphs_over_sizes',
    'missing',
    'prepare',
    'relative_error',
    'rival_unit',
]

_SAVED_BY_CHOICE = ('convolution', 'mm', 'addmm', 'bmm', 'baddbmm')  # of torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Rival:
    """A way to store less that is not ours.

    Attributes:
        name (str): What tools call it.
        meaning (str): One line for --help.
        preset (str): The preset that it runs on. Default: 'none'.
        compiled (bool): By ``torch.compile``. Default: False.
        budget (float | None): ``activation_memory_budget`` of the compiler; None: its default. Default: None.
        on_host (bool): What is stored lies in the host's memory. Default: False.
    """

    name: str
    meaning: str
    preset: str = 'none'
    compiled: bool = False
    budget: float | None = None
    on_host: bool = False

    def wrap(self, run: Callable, *, backend: str = 'inductor') -> Callable:
        """The forward pass under this rival.

        Args:
            run (Callable): Forward pass of the unit, built with ``preset``.
            backend (str): Of ``torch.compile``. Default: 'inductor'.

        Returns:
            Callable: With attribute ``graphs``, a list with one entry for each graph compiled so far.
        """
        if self.compiled:
            return self._compile(run, backend)
        enter = self._offload if self.on_host else _saving_products

        def wrapped(x):
            with enter():
                return run(x)

        wrapped.graphs = []
        return wrapped

    def _compile(self, run, backend):
        graphs, inner = [], torch._dynamo.lookup_backend(backend)
        budget = {} if self.budget is None else {'activation_memory_budget': self.budget}

        def compile_graph(graph, inputs):
            # The budget is read where a graph is compiled. A backend of its own for each rival: otherwise one would
            # find the graphs of another, for the code is the same.
            graphs.append(1)
            with torch._functorch.config.patch(budget):
                return inner(graph, inputs)

        compiled = torch.compile(run, backend=compile_graph)

        def wrapped(x):
            return compiled(x)

        wrapped.graphs = graphs
        return wrapped

    @staticmethod
    def _offload():
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


RIVALS = {
    rival.name: rival
    for rival in (
        Rival('selective', 'blocks checkpointed, results of convolutions and matrix products saved', preset='with_cp'),
        Rival('compile', 'torch.compile', compiled=True),
        *(
            Rival(f'compile-{b}', f'torch.compile, activation_memory_budget {b}', compiled=True, budget=b)
            for b in (0.5, 0.25, 0.1)
        ),
        Rival('save-on-cpu', 'what is saved goes to the host and comes back (save_on_cpu)', on_host=True),
    )
}


@contextlib.contextmanager
def _saving_products():
    """The preset's checkpoints save the results of convolutions and matrix products."""
    cp = torch.utils.checkpoint
    found = [getattr(torch.ops.aten, name).default for name in _SAVED_BY_CHOICE]
    contexts = functools.partial(cp.create_selective_checkpoint_contexts, found)
    with mock.patch.object(cp, 'checkpoint', functools.partial(cp.checkpoint, context_fn=contexts)):
        yield


def missing(name: str, device: torch.device | str) -> str | None:
    """Why a rival cannot run here.

    Args:
        name (str): A key of ``RIVALS``.
        device (torch.device | str): Where it would run.

    Returns:
        str | None: The reason; None: it can.

    Raises:
        ValueError: For an unknown name.
    """
    if name not in RIVALS:
        raise ValueError(f'rival {name!r} is unknown; choose from {[*RIVALS]}')
    rival, version = RIVALS[name], f'torch {torch.__version__}'
    if name == 'selective' and not hasattr(torch.utils.checkpoint, 'create_selective_checkpoint_contexts'):
        return f'{version} has no selective checkpointing'
    if not rival.compiled:
        return None
    reason = no_compiler(torch.device(device).type)
    for module in ('torch._functorch.config', 'torch._inductor.config'):
        importlib.import_module(module)  # slow, so only where something is compiled
    if rival.budget is not None and not hasattr(torch._functorch.config, 'activation_memory_budget'):
        reason = reason or f'{version} has no activation_memory_budget'
    return reason


def rival_unit(rival: Rival, build: Callable[[str], Unit], **options) -> Unit:
    """A unit under a rival.

    Args:
        rival (Rival): Of ``RIVALS``.
        build (Callable): Preset to unit, see :func:`.benchmark.build_unit`.
        **options: Of :meth:`Rival.wrap`.

    Returns:
        Unit: To be measured like any other.
    """
    unit = build(rival.preset)
    return unit._replace(run=rival.wrap(unit.run, **options))


def prepare(
    names: Sequence[str],
    build: Callable[[str], Unit],
    shape: tuple[int, ...],
    *,
    device: str,
    dtype: torch.dtype | None,
    backend: str = 'inductor',
    layout: torch.memory_format = torch.contiguous_format,
) -> tuple[dict[str, Unit], dict[str, dict]]:
    """Builds rivals, compiles them, and says of each that does not run why.

    Args:
        names (Sequence[str]): Keys of ``RIVALS``.
        build (Callable): Preset to unit.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where they run.
        dtype (torch.dtype | None): Autocast; None: off.
        backend (str): Of ``torch.compile``. Default: 'inductor'.
        layout (torch.memory_format): Of the input. Default: ``torch.contiguous_format``.

    Returns:
        tuple: Units that run, and for every name a record: ``reason``, or ``graphs`` and ``compile_s`` (the first step
        without the time of the second one) where something is compiled, else nothing.
    """
    units, records = {}, {}
    for name in names:
        if reason := missing(name, device):
            records[name] = dict(reason=reason)
            continue
        unit = rival_unit(RIVALS[name], build, backend=backend)
        try:
            first, second = (_seconds(lambda: _step(unit, shape, device, dtype, layout), device) for _ in range(2))  # noqa: B023
        except Exception as error:  # whatever a compiler may raise: the record says it
            records[name] = dict(reason=first_line(error))
            continue
        units[name] = unit
        graphs = len(unit.run.graphs)
        records[name] = dict(graphs=graphs, compile_s=max(first - second, 0.0)) if graphs else {}
    return units, records


def first_line(error: BaseException) -> str:
    """Of what an error says, with its kind."""
    return f'{type(error).__name__}: {(str(error).strip().splitlines() or [""])[0]}'


def _step(unit, shape, device, dtype, layout=torch.contiguous_format):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, memory_format=layout)
    x.requires_grad_(not unit.reads_image)
    with autocast(device, dtype):
        outs = unit.run(x)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [_weights(o) for o in outs])
    found = {name: p.grad.float() for name, p in unit.module.named_parameters() if p.grad is not None}
    unit.module.zero_grad()
    return found


def _weights(out):
    return torch.arange(out.numel(), device=out.device).mul(1.7).cos().view(out.shape).to(out.dtype)


def _seconds(fn, device):
    start = time.perf_counter()
    fn()
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start


def graphs_over_sizes(build: Callable[[str], Unit], shapes: Iterable[tuple], device: str) -> int:
    """Number of graphs that training with these sizes of input compiles, with whatever budget.

    Args:
        build (Callable): Preset to unit.
        shapes (Iterable[tuple]): Of the inputs, in the order in which they come.
        device (str): Where it runs.

    Returns:
        int: Graphs. Which ones there are is decided before they are compiled, so no compiler runs here.
    """
    torch._dynamo.reset()
    unit = rival_unit(RIVALS['compile'], build, backend='aot_eager')
    for shape in shapes:
        _step(unit, shape, device, None)
    torch._dynamo.reset()
    return len(unit.run.graphs)


@full_fp32()
def drawn_errors(
    names: Sequence[str],
    build: Callable[[str], Unit],
    shape: tuple[int, ...],
    *,
    device: str,
    rate: float = 0.4,
    draws: int = 4,
    backend: str = 'inductor',
    layout: torch.memory_format = torch.contiguous_format,
) -> dict[str, float | None]:
    """How far gradients are from the plain ones while stochastic depth drops images, in fp32, all parameters together.

    All get the same random numbers, so what differs is wrong: a budget of the compiler below 0.5 was seen to draw again
    in the backward pass.

    Args:
        names (Sequence[str]): Presets and rivals that run here.
        build (Callable): Preset to unit.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where they run.
        rate (float): Of every block with stochastic depth. Default: 0.4.
        draws (int): Of stochastic depth, all compared. Default: 4.
        backend (str): Of ``torch.compile``. Default: 'inductor'.
        layout (torch.memory_format): Of the input. Default: ``torch.contiguous_format``.

    Returns:
        dict[str, float | None]: Name to norm of the difference, relative to that of the plain gradients; None where the
        unit has no stochastic depth.
    """

    def build_drawing(preset):
        unit = build(preset)
        found.append(_set_stochastic_depth(unit.module, rate))
        return unit

    def gradients(unit):
        rows = []
        for seed in range(draws):
            torch.manual_seed(seed)
            rows.append(_step(unit, shape, device, None, layout))
        return rows

    found = []
    exact, errors = gradients(build_drawing('none')), {}
    for name in names:
        if name in RIVALS:
            rival = RIVALS[name]
            if rival.compiled:
                torch._dynamo.reset()
            unit = rival_unit(rival, build_drawing, backend=backend)
        else:
            unit = build_drawing(name)
        with draws_of_plain_code([name]):
            errors[name] = relative_error(gradients(unit), exact) if found[-1] else None
    return errors


def draws_of_plain_code(names: Sequence[str]):
    """Compiled code draws as plain code does, with torch's own generator.

    Args:
        names (Sequence[str]): Presets and rivals; only for a compiled one is there anything to do.

    Returns:
        A context manager, for the first backward pass too: that is where it is compiled.
    """
    compiled = any(name in RIVALS and RIVALS[name].compiled for name in names)
    return torch._inductor.config.patch(fallback_random=True) if compiled else contextlib.nullcontext()


def _set_stochastic_depth(module: nn.Module, rate: float) -> int:
    """Gives each block this rate; returns how many places there are. A block at rate 0 may hold an identity there."""
    places = 0
    for owner in module.modules():
        if isinstance(owner, DropPath):
            owner.drop_prob, places = rate, places + 1
        elif isinstance(getattr(owner, 'drop_path', None), nn.Identity):
            owner.drop_path, places = DropPath(rate).train(owner.training), places + 1
    return places


def relative_error(found: Sequence[dict], exact: Sequence[dict]) -> float:
    """Norm of the difference of gradients, relative to that of the exact ones.

    Args:
        found, exact (Sequence[dict]): For each step, name of a parameter to its gradient. A parameter whose block was
            left out in one of the two has the gradient zero there.
    """
    squares = [0.0, 0.0]
    for got, want in zip(found, exact, strict=True):
        for name in {*got, *want}:
            zero = torch.zeros_like(got[name] if name in got else want[name])
            a, b = got.get(name, zero).double(), want.get(name, zero).double()
            squares[0] += (a - b).square().sum().item()
            squares[1] += b.square().sum().item()
    return (squares[0] / max(squares[1], 1e-300)) ** 0.5
