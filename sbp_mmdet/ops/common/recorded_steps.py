"""Records of the operations that run within a context, so that one autograd node can stand for all of them.

:func:`.operation_sequence.run_sequence` is that node.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ['Step', 'record_steps', 'recorded_steps']

_thread = threading.local()  # attribute `steps`: the list that operations are recorded in


class Step(NamedTuple):
    """An operation of a sequence, whose input is the output of the one before.

    Attributes:
        operation (Operation | None): The operation. If ``None``, no image runs it, and its parameters get zeros.
        settings (Any): Its settings.
        tensors (tuple): Its tensors without the input; without an operation, its parameters.
        images (KeptImages | None): Images that run it. If ``None``, all. Default: None.
    """

    operation: Any
    settings: Any
    tensors: tuple
    images: Any = None

    @classmethod
    def of(cls, operation, settings, tensors: NamedTuple) -> 'Step':
        """Return the step of an operation that runs now."""
        return cls(operation, settings, tensors._replace(**dict.fromkeys(operation.inputs)))

    def parameters(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that a gradient is computed of, without the input."""
        if self.operation is None:
            return self.tensors
        names = self.operation.gradients._fields
        return tuple([getattr(self.tensors, name) for name in names if name not in self.operation.inputs])

    def run_again(self, x: Tensor, needs: Sequence[bool], is_last: bool) -> tuple[Tensor | None, Any]:
        """Return the output and what the backward pass needs.

        Args:
            x (Tensor): Input.
            needs (Sequence[bool]): Whether the input and each of :meth:`parameters` needs a gradient.
            is_last (bool): Whether the output is not used. It may be ``None`` then.
        """
        operation, images = self.operation, self.images
        if operation is None:
            return x, None
        rows = x if images is None else images.take(x)
        tensors, flags = self.tensors._replace(**dict.fromkeys(operation.inputs, rows)), self._flags(needs)
        if is_last and operation.save is not None:
            return None, operation.save(self.settings, tensors, flags)
        out, saved = operation.forward(self.settings, tensors, flags)
        return out if images is None else images.put(x, out), saved

    def backward(self, saved: Any, needs: Sequence[bool], grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradient of the input, if it is needed, and those of :meth:`parameters`.

        Args:
            saved (Any): Result of :meth:`run_again`.
            needs (Sequence[bool]): Its argument.
            grad (Tensor): Gradient of the output.
        """
        operation, images = self.operation, self.images
        if operation is None:
            return grad, [
                torch.zeros_like(p) if needed else None for p, needed in zip(self.tensors, needs[1:], strict=True)
            ]
        rows = grad if images is None else images.take(grad)
        gradients = operation.backward(self.settings, saved, rows, self._flags(needs))._asdict()
        of_inputs = [gradients.pop(name) for name in operation.inputs]
        if not needs[0]:
            return None, [*gradients.values()]
        dx, *others = [g for g in of_inputs if g is not None]
        for other in others:  # beside the gradient of a shortcut, which is the incoming one, the first is a new tensor
            dx.add_(other)
        return dx if images is None else images.put(grad, dx), [*gradients.values()]

    def _flags(self, needs):
        operation = self.operation
        others = iter(needs[1:])
        return operation.gradients(
            *[needs[0] if n in operation.inputs else next(others) for n in operation.gradients._fields]
        )


@contextlib.contextmanager
def record_steps(steps: list[Step]) -> Iterator[None]:
    """Let operations compute their output without a graph within the context, and append themselves to a list."""
    before, _thread.steps = getattr(_thread, 'steps', None), steps
    try:
        yield
    finally:
        _thread.steps = before


def recorded_steps() -> list[Step] | None:
    """Return the list that operations are recorded in here, or ``None`` if they are not."""
    return getattr(_thread, 'steps', None)
