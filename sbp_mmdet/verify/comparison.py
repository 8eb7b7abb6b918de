"""The comparison of a lean module with its own code on one input: outputs and all gradients, with a tolerance.

The tolerance is what the module's own code differs from itself in a higher precision. That second run is made only
where the two are further apart than the rounding of the precision explains anyway.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from ..ops.common.precision import autocast_dtype
from .dry_run import random_state
from .module_run import Run, floating, run_module

__all__ = ['Disagreement', 'Side', 'compare', 'first_run', 'relative_difference', 'tolerance_of']

# Differences up to these are rounding whatever the module is, relative to the norm of a tensor: of outputs, and of
# gradients, in which a rounded number may stand on the other side of ReLU's zero.
_ROUNDING = {
    torch.float64: (1e-9, 1e-6),
    torch.float32: (1e-5, 3e-3),
    torch.bfloat16: (1e-2, 2e-2),
    torch.float16: (2e-3, 4e-3),
}
_MULTIPLE = 4  # of the error of the module's own code that a lean module may have
_ATTEMPTS = 3  # on slightly different inputs, before rounding is ruled out as the cause


class Disagreement(Exception):
    """Raised if a lean module does not compute what its own code computes."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of two ways to run a module.

    Attributes:
        module (nn.Module): The module.
        prepared (Callable): Returns a context in which it runs this way.
    """

    module: nn.Module
    prepared: Callable[[], contextlib.AbstractContextManager]

    def run(self, args: tuple, kwargs: dict, dtype: torch.dtype | None = None) -> Run:
        """Run the module, see :func:`.run_module`."""
        with self.prepared():
            return run_module(self.module, args, kwargs, cotangent, dtype)


def cotangent(number: int, output: Tensor) -> Tensor:
    """Return a fixed gradient for an output.

    It is random, has a mean and follows the output, so that every term of the backward pass of a norm counts, and is
    small enough for sums in half precision.

    Args:
        number (int): Which output it is.
        output (Tensor): The output.

    Returns:
        Tensor: Of the same shape, precision and device.
    """
    generator = torch.Generator(output.device).manual_seed(number)
    full = torch.float64 if output.dtype == torch.float64 else torch.float32
    found = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float32).to(full)
    scale = output.to(full).square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    found += 0.5 + 0.5 * output.to(full) / scale
    return found.nan_to_num_(0, 0, 0).mul_(max(output.numel(), 1) ** -0.25).to(output.dtype)


def tolerance_of(module: nn.Module, inputs) -> tuple[float, float]:
    """Return the relative differences of outputs and of gradients that rounding explains.

    Args:
        module (nn.Module): The module.
        inputs: Its arguments, nested.
    """
    dtypes = [autocast_dtype(x) or x.dtype for x in floating(inputs)] or [p.dtype for p in module.parameters()]
    return max((_ROUNDING.get(dtype, _ROUNDING[torch.bfloat16]) for dtype in dtypes), default=(0.0, 0.0))


def relative_difference(found: dict, expected: dict) -> float:
    """Return the difference of two dicts of tensors, all of them taken as one vector, relative to the second."""
    pairs = [(found[name], value) for name, value in expected.items() if value is not None]
    total = math.hypot(*(_norm(value) for _, value in pairs)) if pairs else 0.0
    off = math.hypot(*(_distance(a, b) for a, b in pairs)) if pairs else 0.0
    return off / total if total else off


def first_run(own: Side, lean: Side, args: tuple, kwargs: dict, devices: set) -> tuple[Run, Run]:
    """Run both sides with the same random numbers.

    Args:
        own (Side): The module's own code.
        lean (Side): The changed module.
        args (tuple): The arguments.
        kwargs (dict): The keyword arguments.
        devices (set): Devices of the module.

    Returns:
        tuple[Run, Run]: Results of the own code, and of the changed module.

    Raises:
        Disagreement: If the changed module raises where its own code does not.
    """
    put_back = random_state(devices)
    expected = own.run(args, kwargs)
    put_back()
    try:
        return expected, lean.run(args, kwargs)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise Disagreement(f'{type(error).__name__}: {error}') from error


def compare(
    own: Side,
    lean: Side,
    args: tuple,
    kwargs: dict,
    *,
    devices: set,
    slack: float = 0.0,
    only: Callable[[str], bool] = lambda name: True,
) -> tuple[Run, Run]:
    """Compare a changed module with its own code.

    Args:
        own (Side): The module's own code.
        lean (Side): The changed module.
        args (tuple): The arguments that the module gets.
        kwargs (dict): The keyword arguments.
        devices (set): Devices of the module.
        slack (float): Relative difference of gradients that the changed module has by design. Default: 0.
        only (Callable): Whether a gradient is compared, by its name. Default: all are.

    Returns:
        tuple[Run, Run]: Results of the own code, and of the changed module, on these arguments.

    Raises:
        Disagreement: If they differ. The message has names and figures.
    """
    outputs, gradients = tolerance_of(lean.module, (args, kwargs))
    bars = dict(outputs=outputs, gradients=gradients + slack)
    put_back = random_state(devices)
    runs = first_run(own, lean, args, kwargs, devices)
    if not (off := _beyond(runs, only, bars)):
        return runs
    random = RandomParts(lean.module)
    with random.off():
        errors = _compare_with_full(own, lean, args, kwargs, devices, bars, only)
    off = {key: value for key, value in off.items() if not value <= bars[key[0]] + (1 + _MULTIPLE) * errors.get(key, 0)}
    if not random or not off:
        return runs
    if not random.by_element:  # stochastic depth: both sides draw the same
        raise Disagreement(_told(off))
    put_back()
    check_derivative(lean, args, kwargs, put_back)
    return runs


def _compare_with_full(own, lean, args, kwargs, devices, bars, only) -> dict:
    """Compare with the module's own code in a higher precision as the scale; returns relative errors of that code."""
    noise, suspects, put_back = {}, None, random_state(devices)
    for attempt in range(_ATTEMPTS):
        put_back()
        runs = first_run(own, lean, args, kwargs, devices)
        off = _beyond(runs, only, bars)
        noise.pop('exact', None)  # of other inputs
        put_back()
        off = {key: value for key, value in off.items() if not _is_noise(key, runs, own, args, kwargs, bars, noise)}
        suspects = off if suspects is None else {key: value for key, value in off.items() if key in suspects}
        if not suspects:
            return {key: value for key, value in noise.items() if isinstance(key, tuple)}
        args, kwargs = _nearby((args, kwargs), attempt)
    raise Disagreement(_told(suspects))


def _beyond(runs, only, bars) -> dict:
    """Return relative differences above the bars, by part and name."""
    expected, lean = runs
    found = {
        (part, name): _distance(getattr(lean, part)[name], value) / (_norm(value) or 1)
        for part, name, value in _pairs(expected, only)
    }
    return {key: value for key, value in found.items() if not value <= bars[key[0]]}


class RandomParts:
    """Modules that draw random numbers in training.

    Args:
        module (nn.Module): What contains them.

    Attributes:
        by_element (bool): Whether one of them is dropout of single numbers, whose draws depend on how a tensor is cut.
    """

    def __init__(self, module: nn.Module):
        self._found = [m for m in module.modules() if m.training and _rate(m)]
        self.by_element = any(isinstance(m, (_DropoutNd, nn.MultiheadAttention)) for m in self._found)

    def __bool__(self):
        return bool(self._found)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn them off."""
        attention = [(m, m.dropout) for m in self._found if isinstance(m, nn.MultiheadAttention)]
        others = [m for m in self._found if not isinstance(m, nn.MultiheadAttention)]
        for m, _ in attention:
            m.dropout = 0.0
        for m in others:
            m.training = False
        try:
            yield
        finally:
            for m, rate in attention:
                m.dropout = rate
            for m in others:
                m.training = True


def _rate(module):
    """Return the rate of a module that draws, whatever the attribute is called; 0 for others."""
    names = ('dropout',) if isinstance(module, nn.MultiheadAttention) else ('p', 'drop_prob')
    rates = [vars(module).get(name) for name in names]
    return next((rate for rate in rates if isinstance(rate, float) and rate), 0.0)


def check_derivative(lean: Side, args: tuple, kwargs: dict, put_back: Callable[[], None]) -> None:
    """Check that the gradients of a module are the derivative of its own forward pass, with the same random numbers.

    Args:
        lean (Side): The changed module.
        args (tuple): The arguments.
        kwargs (dict): The keyword arguments.
        put_back (Callable): Puts back the random state.

    Raises:
        Disagreement: If they are not.
    """
    put_back()
    cotangents, step = {}, 1e-6

    def fixed(number, output):
        return cotangents.setdefault(number, cotangent(number, output))

    def run(shift=None):
        put_back()
        with lean.prepared():
            return run_module(lean.module, args, kwargs, fixed, torch.float64, shift)

    gradients = {name: g for name, g in run().gradients.items() if g is not None}
    length = math.hypot(*map(_norm, gradients.values()))
    if not length:
        return
    ahead, behind = (run({name: g * (s * step / length) for name, g in gradients.items()}) for s in (1, -1))
    slope = sum(
        float((c * (ahead.outputs[f'output {i}'] - behind.outputs[f'output {i}'])).sum()) for i, c in cotangents.items()
    )
    error = abs(slope / (2 * step) / length - 1)
    if not error <= 1e-2:
        raise Disagreement(f'gradients with dropout {error:.1e} off the derivative of the forward pass')


def _pairs(run, only) -> Iterator[tuple[str, str, Tensor]]:
    yield from (('outputs', name, value) for name, value in run.outputs.items())
    yield from (('gradients', name, value) for name, value in run.gradients.items() if only(name))


def _is_noise(key, runs, own, args, kwargs, bars, noise) -> bool:
    """Return whether the module's own code differs as much from a higher precision as the lean module does."""
    exact = _in_full(own, args, kwargs, noise)
    if exact is None:
        return False
    part, name = key
    expected, lean = (getattr(run, part)[name] for run in runs)
    value = getattr(exact, part)[name]
    size = _norm(value) or 1
    noise[key] = max(noise.get(key, 0.0), _distance(expected, value) / size)
    return _distance(lean, value) <= (_MULTIPLE * noise[key] + bars[part]) * size


def _in_full(own, args, kwargs, noise):
    """Run the module's own code in fp64 (fp32 for half precision), once for each input; None if a kernel lacks it."""
    if 'exact' not in noise:
        dtypes = {autocast_dtype(x) or x.dtype for x in floating((args, kwargs))}
        full = torch.float32 if dtypes & {torch.float16, torch.bfloat16} else torch.float64
        try:
            noise['exact'] = own.run(args, kwargs, full)
        except (RuntimeError, TypeError, NotImplementedError):
            noise['exact'] = None  # a kernel that the precision has not; the bars decide
    return noise['exact']


def _nearby(inputs, seed):
    """Return the arguments with floating-point tensors moved by a thousandth."""

    def moved(x):
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        generator = torch.Generator(x.device).manual_seed(seed)
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32)
        return (x * (1 + 1e-3 * noise)).to(x.dtype)

    return tree_map(moved, inputs)


def _norm(x) -> float:
    return 0.0 if x is None or not x.numel() else float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _distance(found, expected) -> float:
    """Return the norm of the difference. A number that is not finite counts where the expected one is finite."""
    if found is None or expected is None:
        return _norm(expected if found is None else found)
    off = found.double() - expected.double() if found.dtype != expected.dtype else found - expected
    distance = _norm(off)
    if math.isfinite(distance):
        return distance
    finite = expected.isfinite()
    return _norm(off[finite].double())


def _told(figures):
    worst = sorted(figures.items(), key=lambda item: -item[1])[:3]
    return ', '.join(
        f'{name} {"gradient " if part == "gradients" else ""}{value:.1e} off' for (part, name), value in worst
    )
