"""Modules that draw random numbers: they are disabled for a comparison, or their gradients checked as derivatives."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from .module_run import cotangent, norm, run_module

__all__ = ['Disagreement', 'RandomParts', 'check_derivative']

_DIRECTIONS, _SLOPE = 2, 3e-3  # number of directions of derivatives, and their largest error


class Disagreement(Exception):
    """Error of a lean module that does not compute what its own code computes."""


# Names of attributes with the rate of dropout: of modules that apply it by a function, and of modules of dropout.
_APPLIED, _OWN = ('dropout', 'attn_drop'), ('p', 'drop_prob')


class RandomParts:
    """The modules inside of a module that draw random numbers in training.

    Args:
        module (nn.Module): The module that contains them.

    Attributes:
        by_element (bool): Whether one of them drops single elements, so that its draws depend on chunks.
    """

    def __init__(self, module: nn.Module):
        training = [m for m in module.modules() if m.training]
        self._applied = [(m, name, vars(m)[name]) for m in training for name in _APPLIED if _is_rate(m, name)]
        self._modules = [m for m in training if any(_is_rate(m, name) for name in _OWN)]
        self.by_element = bool(self._applied) or any(isinstance(m, _DropoutNd) for m in self._modules)

    def __bool__(self):
        return bool(self._applied or self._modules)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable them within the context."""
        for m, name, _ in self._applied:
            setattr(m, name, 0.0)
        for m in self._modules:
            m.training = False
        try:
            yield
        finally:
            for m, name, rate in self._applied:
                setattr(m, name, rate)
            for m in self._modules:
                m.training = True


def _is_rate(module, name):
    rate = vars(module).get(name)
    return isinstance(rate, float) and rate > 0


def check_derivative(
    prepared: Callable[[], contextlib.AbstractContextManager],
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    put_back: Callable[[], None],
) -> None:
    """Check that the gradients of a module are the derivative of its own forward pass, with the same random numbers.

    Args:
        prepared (Callable): Returns a context manager within which the module runs lean.
        module (nn.Module): The changed module.
        args (tuple): Arguments of the module.
        kwargs (dict): Keyword arguments of the module.
        put_back (Callable): Restores the random states.

    Raises:
        Disagreement: If the derivative by finite differences differs from the gradients.
    """
    cotangents, step = {}, 1e-6

    def fixed(number, output):
        return cotangents.setdefault(number, cotangent(number, output))

    def run(shift=None):
        put_back()
        with prepared():
            return run_module(module, args, kwargs, fixed, torch.float64, shift)

    gradients = {name: g for name, g in run().gradients.items() if g is not None and norm(g)}
    for seed in range(_DIRECTIONS):  # random directions: without dropout's mask, a gradient is right only on average
        ways = {name: _direction(g, seed) for name, g in gradients.items()}
        ahead, behind = (run({name: way * (sign * step) for name, way in ways.items()}) for sign in (1, -1))
        slope = sum(
            float((c * (ahead.outputs[f'output {i}'] - behind.outputs[f'output {i}'])).sum())
            for i, c in cotangents.items()
        )
        error = abs(slope / (2 * step) - sum(float((g * ways[name]).sum()) for name, g in gradients.items()))
        if not error <= _SLOPE * len(gradients) ** 0.5:
            raise Disagreement(f'gradients with dropout {error:.1e} off the derivative of the forward pass')


def _direction(gradient, seed):
    """Return random numbers whose product with the gradient is about 1."""
    generator = torch.Generator(gradient.device).manual_seed(seed)
    way = torch.randn(gradient.shape, generator=generator, device=gradient.device, dtype=torch.float32)
    return way.to(gradient.dtype).div_(norm(gradient))
