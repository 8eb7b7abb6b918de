"""Base class of bindings of consecutive blocks, whose convolutions and norms run as one operation."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.conv_norm_act import ConvNormSettings, ConvNormTensors
from .bindings import Binding
from .conv_module import ConvNorm, count_batches

__all__ = ['ChainBinding']


@dataclasses.dataclass(frozen=True, eq=False)
class ChainBinding(Binding):
    """Base class of bindings of consecutive blocks.

    Attributes:
        blocks (tuple[nn.Module, ...]): The blocks.
    """

    blocks: tuple[nn.Module, ...]
    shares_modules = True
    one_precision = False

    @staticmethod
    def is_full(blocks: Sequence[nn.Module]) -> bool:
        """Return whether blocks are as many as a chain may have.

        Args:
            blocks (Sequence[nn.Module]): One block or more.
        """
        raise NotImplementedError

    @property
    def num_members(self) -> int:
        """Number of consecutive members of a sequence that the operation computes."""
        return len(self.blocks)

    @functools.cached_property
    def layers(self) -> list[ConvNorm]:
        """All layers of the chain in the operation's order, each with a norm."""
        raise NotImplementedError

    @functools.cached_property
    def _norms(self):
        return [layer.norm for layer in self.layers]

    def layer_inputs(
        self, form: Form, x: Tensor
    ) -> Iterable[tuple[ConvNormSettings, ...] | tuple[ConvNormTensors, ...]]:
        """Return the settings of all layers and the tensors of all layers, and count the batch in their norms.

        Args:
            form (Form): Form of the operation.
            x (Tensor): Input of the chain, shape (N, C, H, W).
        """
        dtype = autocast_dtype(x) or x.dtype
        counts = not count_batches(self._norms)
        return zip(*[layer.inputs(form, None, dtype, counts=counts) for layer in self.layers], strict=True)
