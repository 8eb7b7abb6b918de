"""Comparison of a lean module with its own code on one input: outputs and all gradients, within a tolerance.

The tolerance is the difference of the module's own code to itself in a higher precision. That run is made only if the
two sides differ by more than usual rounding. In half precision, where rounding errors of networks with ReLUs are large,
both sides are then compared in fp32 as well.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..ops.common.precision import autocast_dtype
from .dry_run import random_state_restorer
from .module_run import Run, cotangent, find_floating, norm, run_module
from .random_parts import Disagreement, RandomParts, check_derivative

__all__ = ['Side', 'compare', 'relative_difference']

# Relative differences of outputs and of gradients that count as rounding in any module. Those of gradients are larger,
# because a rounded number may lie on the other side of a ReLU's zero.
_ROUNDING = {
    torch.float64: (1e-9, 1e-6),
    torch.float32: (1e-5, 3e-3),
    torch.bfloat16: (1e-2, 2e-2),
    torch.float16: (2e-3, 4e-3),
}
_MULTIPLE = 4  # error that a lean module may have, as a multiple of the error of its own code
_HALF = {torch.float16, torch.bfloat16}
# Gradients that are zero apart from rounding, such as that of a bias in front of a batch norm, are smaller than this
# part of the module's largest gradient. Double precision has no higher one that would show it.
_NEGLIGIBLE = 1e-7
_ATTEMPTS = 3  # number of slightly different inputs that are tried before rounding is ruled out as the cause


@dataclasses.dataclass(frozen=True)
class Side:
    """One of two ways to run a module.

    Attributes:
        module (nn.Module): The module.
        prepared (Callable): Returns a context manager within which the module runs this way.
        backward (bool): Whether gradients are computed. Default: True.
        thin (Callable): Sets some of an output's gradient to zero, see :meth:`.LeanModule.thin_gradient`. Default:
            keeps all.
    """

    module: nn.Module
    prepared: Callable[[], contextlib.AbstractContextManager]
    backward: bool = True
    thin: Callable[[Tensor], Tensor] = lambda grad: grad

    def run(self, args: tuple, kwargs: dict, dtype: torch.dtype | None = None) -> Run:
        """Run the module, see :func:`.run_module`."""

        def gradient(number, output):
            return self.thin(cotangent(number, output))

        with self.prepared():
            return run_module(self.module, args, kwargs, gradient, dtype, backward=self.backward)


def _tolerance_of(module: nn.Module, inputs, dtype: torch.dtype | None) -> tuple[float, float]:
    """Return the relative differences of outputs and of gradients that rounding explains.

    Args:
        module (nn.Module): The module.
        inputs: Arguments of the module, nested.
        dtype (torch.dtype | None): Precision of the module, see :func:`.run_module`.
    """
    dtypes = [autocast_dtype(x) or x.dtype for x in find_floating(inputs)] or [p.dtype for p in module.parameters()]
    dtypes = [dtype] if dtype else dtypes
    return max((_ROUNDING.get(dtype, _ROUNDING[torch.bfloat16]) for dtype in dtypes), default=(0.0, 0.0))


def relative_difference(actual: dict, expected: dict) -> float:
    """Return the norm of the difference of two dicts of tensors, relative to the norm of the second dict."""
    pairs = [(actual[name], value) for name, value in expected.items() if value is not None]
    total = math.hypot(*(norm(value) for _, value in pairs)) if pairs else 0.0
    off = math.hypot(*(_distance(a, b) for a, b in pairs)) if pairs else 0.0
    return off / total if total else off


def _run_both(
    own: Side,
    lean: Side,
    args: tuple,
    kwargs: dict,
    devices: set,
    dtype: torch.dtype | None = None,
    expected: Run | None = None,
) -> tuple[Run, Run]:
    """Run both sides with the same random numbers.

    Args:
        own (Side): The module's own code.
        lean (Side): The changed module.
        args (tuple): The arguments.
        kwargs (dict): The keyword arguments.
        devices (set): Devices of the module.
        dtype (torch.dtype | None): See :func:`.run_module`. Default: None.
        expected (Run | None): Results of the own code. If ``None``, it runs. Default: None.

    Returns:
        tuple[Run, Run]: Results of the own code, and of the changed module.

    Raises:
        Disagreement: If the changed module raises where its own code does not.
    """
    put_back = random_state_restorer(devices)
    if expected is None:
        expected = own.run(args, kwargs, dtype)
    put_back()
    try:
        return expected, lean.run(args, kwargs, dtype)
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
    dtype: torch.dtype | None = None,
    expected: Run | None = None,
) -> tuple[Run, Run]:
    """Compare a changed module with its own code.

    Args:
        own (Side): The module's own code.
        lean (Side): The changed module.
        args (tuple): The arguments that the module gets.
        kwargs (dict): The keyword arguments.
        devices (set): Devices of the module.
        slack (float): Relative error of gradients that the changed module has by design, with a mean of 0. Default: 0.
        only (Callable): Returns whether the gradient of this name is compared. Default: all are.
        dtype (torch.dtype | None): Precision of both sides. If ``None``, that of the training. Default: None.
        expected (Run | None): Results of the own code in ``dtype``. If ``None``, it runs. Default: None.

    Returns:
        tuple[Run, Run]: Results of the own code, and of the changed module, on these arguments.

    Raises:
        Disagreement: If they differ. The message has the names of tensors and their relative differences.
    """
    outputs, gradients = _tolerance_of(lean.module, (args, kwargs), dtype)
    bars = dict(outputs=outputs, gradients=gradients + slack)
    put_back = random_state_restorer(devices)
    runs = _run_both(own, lean, args, kwargs, devices, dtype, expected)
    off = _find_differences(runs, only, bars)
    if slack and (longer := _find_scale_errors(runs, only, off, gradients, slack)):
        raise Disagreement(_format_figures(longer))
    if not off:
        return runs
    random = RandomParts(lean.module)
    with random.off():
        precise = _PreciseComparison(own, lean, devices, slack, only, bars, dtype)
        errors = precise.compare(args, kwargs, off)
    off = {key: value for key, value in off.items() if not value <= bars[key[0]] + (1 + _MULTIPLE) * errors.get(key, 0)}
    if not random or not off:
        return runs
    if not random.by_element:  # stochastic depth: both sides draw the same numbers
        raise Disagreement(_format_figures(off))
    put_back()
    check_derivative(lean.prepared, lean.module, args, kwargs, put_back)
    return runs


def _find_differences(runs, only, bars) -> dict:
    """Return the relative differences that exceed the bars, by part ('outputs' or 'gradients') and tensor name."""
    expected, lean = runs
    least = _NEGLIGIBLE * max(filter(math.isfinite, map(norm, expected.gradients.values())), default=0.0)
    differences = {
        (part, name): _distance(getattr(lean, part)[name], value)
        / (max(norm(value), least if part == 'gradients' else 0.0) or 1)
        for part, name, value in _pairs(expected, only)
    }
    return {key: value for key, value in differences.items() if not value <= bars[key[0]]}


def _find_scale_errors(runs, only, off, rounding, slack) -> dict:
    """Return the gradients that are too long or too short by more than rounding explains, with the relative errors.

    Errors of rounding to eight bits point in every direction; that of a wrong factor points along the gradient.
    """
    expected, lean = runs
    errors = {}
    for name, value in expected.gradients.items():
        if value is not None and only(name) and ('gradients', name) not in off:
            error = abs(_scale_error(lean.gradients[name], value))
            if error > rounding + slack * (1 + 2 / value.numel() ** 0.5) / 3:
                errors['gradients', name] = error
    return errors


def _scale_error(actual, expected) -> float:
    """Return the relative error of a tensor in the direction of the expected one: <a, e> / |e|^2 - 1."""
    size = norm(expected)
    if actual is None or not size:
        return 0.0
    return float(torch.sum(actual.double().div(size) * expected.double().div(size))) - 1


class _PreciseComparison:
    """Comparison that measures differences against the rounding error of the module's own code.

    Args:
        own (Side): The module's own code.
        lean (Side): The changed module.
        devices (set): Devices of the module.
        slack (float): See :func:`compare`.
        only (Callable): See :func:`compare`.
        bars (dict): Relative differences of outputs and gradients that rounding explains.
        dtype (torch.dtype | None): See :func:`compare`.
    """

    def __init__(self, own, lean, devices, slack, only, bars, dtype):
        self.own, self.lean, self.devices, self.bars, self.dtype = own, lean, devices, bars, dtype
        self.options = dict(devices=devices, slack=slack, only=only)
        self.errors = {}  # of the own code, by part and name

    def compare(self, args, kwargs, wanted) -> dict:
        """Compare on the arguments and, if the sides differ, on arguments close to them.

        Args:
            args (tuple): The arguments.
            kwargs (dict): The keyword arguments.
            wanted (Iterable[tuple[str, str]]): Parts and names whose errors are measured even if the sides agree here.

        Returns:
            dict: Errors of the own code by part and name.

        Raises:
            Disagreement: If the sides differ on all of these arguments.
        """
        suspects, put_back = None, random_state_restorer(self.devices)
        for attempt in range(_ATTEMPTS):
            put_back()
            runs = _run_both(self.own, self.lean, args, kwargs, self.devices, self.dtype)
            off = _find_differences(runs, self.options['only'], self.bars)
            if off or not attempt:
                put_back()
                exact = self._exact(args, kwargs, put_back)
                if exact is not None:
                    self._measure_errors({*off, *wanted}, runs[0], exact)
                off = {key: value for key, value in off.items() if not self._is_noise(key, runs, exact)}
            suspects = off if suspects is None else {key: value for key, value in off.items() if key in suspects}
            if not suspects:
                return self.errors
            args, kwargs = _add_noise((args, kwargs), attempt)
        raise Disagreement(_format_figures(suspects))

    def _exact(self, args, kwargs, put_back):
        """Return the results of the own code in a higher precision, or ``None`` if it does not run in one."""
        dtypes = {self.dtype} if self.dtype else {autocast_dtype(x) or x.dtype for x in find_floating((args, kwargs))}
        half = bool(dtypes & _HALF)
        full = torch.float32 if half else torch.float64
        try:
            exact = self.own.run(args, kwargs, full)
        except (RuntimeError, TypeError, NotImplementedError):
            return None  # a kernel does not support the precision; the bars decide
        if half:
            put_back()
            compare(self.own, self.lean, args, kwargs, **self.options, dtype=full, expected=exact)
        return exact

    def _measure_errors(self, keys, expected, exact) -> None:
        for part, name in keys:
            value = getattr(exact, part)[name]
            error = _distance(getattr(expected, part)[name], value) / (norm(value) or 1)
            self.errors[part, name] = max(self.errors.get((part, name), 0.0), error)

    def _is_noise(self, key, runs, exact) -> bool:
        """Return whether the own code is about as far from itself in a higher precision as the lean module is."""
        if exact is None:
            return False
        part, name = key
        (expected, lean), value = (getattr(run, part)[name] for run in runs), getattr(exact, part)[name]
        size, bar = norm(value) or 1, self.bars[part]
        if not _distance(lean, value) <= (_MULTIPLE * self.errors[key] + bar) * size:
            return False
        if self.errors[key] > 1 or value is None:
            return True  # the gradient consists of rounding errors
        # Rounding errors, and ReLUs that change sides by them, hardly change the length of a gradient.
        slack = _MULTIPLE * abs(_scale_error(expected, value)) + self.errors[key] * (0.25 + 2 / value.numel() ** 0.5)
        return abs(_scale_error(lean, value)) <= bar + slack


def _pairs(run, only) -> Iterator[tuple[str, str, Tensor]]:
    yield from (('outputs', name, value) for name, value in run.outputs.items())
    yield from (('gradients', name, value) for name, value in run.gradients.items() if only(name))


def _add_noise(inputs, seed):
    """Return the arguments with relative noise of a thousandth in their floating-point tensors."""

    def add_noise(x):
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        generator = torch.Generator(x.device).manual_seed(seed)
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32)
        return (x * (1 + 1e-3 * noise)).to(x.dtype)

    return tree_map(add_noise, inputs)


def _distance(actual, expected) -> float:
    """Return the norm of the difference. Numbers that are not finite count only where the expected one is finite."""
    if actual is None or expected is None:
        return norm(expected if actual is None else actual)
    off = actual.double() - expected.double() if actual.dtype != expected.dtype else actual - expected
    distance = norm(off)
    if math.isfinite(distance):
        return distance
    finite = expected.isfinite()
    return norm(off[finite].double())


def _format_figures(figures):
    worst = sorted(figures.items(), key=lambda item: -item[1])[:3]
    return ', '.join(
        f'{name} {"gradient " if part == "gradients" else ""}{value:.1e} off' for (part, name), value in worst
    )
