"""Linear layers with large weights, such as the first one of a box head."""

from torch import Tensor, nn

from ..ops.large_linear import large_linear
from .base import LeanModule, adapter
from .roles import ROLES

__all__ = ['LeanLinear']

_LARGE = 2**23  # number of elements from which a weight is larger than the usual input of its layer


@adapter(*ROLES['linear'])
class LeanLinear(LeanModule):
    """Linear layer with a large weight, whose backward pass frees the input early, see :func:`.large_linear`."""

    samples = has_reference = False

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the layer on (..., C)."""
        return large_linear(x, self.weight, self.bias) if x.numel() else super(LeanModule, self).forward(x)

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`."""
        return cls.is_stock(module) and module.weight.numel() >= _LARGE
