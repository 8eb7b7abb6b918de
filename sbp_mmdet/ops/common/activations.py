"""Activation functions, with their backward passes."""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .modes import clones_what_is_written

__all__ = ['ACTIVATIONS', 'Activation', 'overwrite']

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation function with its settings.

    Attributes:
        name (str): A key of ``ACTIVATIONS``.
        slope (float): Slope of leaky ReLU for negative values. Default: 0.01.
        approximate (str): Form of GELU, 'none' or 'tanh'. Default: 'none'.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> y = Activation('leaky_relu', slope=0.1)(x)
    """

    name: str
    slope: float = 0.01
    approximate: str = 'none'

    def __post_init__(self):
        if self.name not in ACTIVATIONS:
            raise ValueError(f'activation {self.name!r} is unknown; choose one of {", ".join(ACTIVATIONS)}')

    @property
    def jumps_at_zero(self) -> bool:
        """Whether the derivative jumps where the input is zero, so that a rounded input has to keep its sign."""
        return self.name in ('relu', 'relu6', 'leaky_relu')

    def __call__(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Compute the function.

        Args:
            x (Tensor): Input, of any shape.
            inplace (bool): Whether ``x`` may be overwritten. Default: False.

        Returns:
            Tensor: The output, of the same shape.
        """
        return ACTIVATIONS[self.name][0](self, x, inplace)

    def backward(self, grad: Tensor, x: Tensor, inplace: bool = False) -> Tensor:
        """Compute the gradient of the input ``x`` from that of the output.

        Args:
            grad (Tensor): Gradient of the output.
            x (Tensor): The input.
            inplace (bool): Whether ``grad`` may be overwritten; only ReLU does so. Default: False.

        Returns:
            Tensor: The gradient, of the same shape.
        """
        if inplace and self.name == 'relu':
            return overwrite(aten.threshold_backward, grad, x, 0)
        return ACTIVATIONS[self.name][1](self, grad, x)


def overwrite(function: torch._ops.OpOverloadPacket, grad: Tensor, *args, **options) -> Tensor:
    """Compute the backward pass of an activation in the memory of the incoming gradient, where torch's modes allow it.

    Args:
        function (torch._ops.OpOverloadPacket): The backward pass, whose written result has the name ``grad_input``.
        grad (Tensor): Gradient of the output, overwritten.
        *args: Further arguments.
        **options: Options of the function.

    Returns:
        Tensor: The gradient of the input.
    """
    if torch._C._len_torch_dispatch_stack() and clones_what_is_written():
        return function.default(grad, *args, **options)
    return function.grad_input(grad, *args, **options, grad_input=grad)


# Forward pass (activation, x, inplace) and backward pass (activation, grad, x) of each activation, by its name.
ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    'relu': (
        lambda a, x, inplace: torch.relu_(x) if inplace else torch.relu(x),
        lambda a, g, x: aten.threshold_backward.default(g, x, 0),
    ),
    'relu6': (lambda a, x, inplace: F.relu6(x, inplace), lambda a, g, x: aten.hardtanh_backward.default(g, x, 0, 6)),
    'leaky_relu': (
        lambda a, x, inplace: F.leaky_relu(x, a.slope, inplace),
        lambda a, g, x: aten.leaky_relu_backward.default(g, x, a.slope, False),
    ),
    'silu': (lambda a, x, inplace: F.silu(x, inplace), lambda a, g, x: aten.silu_backward.default(g, x)),
    # mmcv's Swish, which differs from SiLU in the last bit.
    'swish': (lambda a, x, inplace: x * torch.sigmoid(x), lambda a, g, x: aten.silu_backward.default(g, x)),
    'hardswish': (lambda a, x, inplace: F.hardswish(x, inplace), lambda a, g, x: aten.hardswish_backward.default(g, x)),
    'gelu': (
        lambda a, x, inplace: F.gelu(x, approximate=a.approximate),
        lambda a, g, x: aten.gelu_backward.default(g, x, approximate=a.approximate),
    ),
}
