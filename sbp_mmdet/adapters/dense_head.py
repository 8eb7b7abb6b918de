"""The head of mmdet's region proposal network."""

import torch
from mmdet.models.dense_heads import RPNHead
from torch import Tensor, nn

from ..ops.common.folding import bias_or_zeros
from ..ops.common.precision import no_autocast
from ..ops.common.row_strips import Convolution
from ..ops.common.used_outputs import UsedOutputs
from ..ops.dense_head import DenseHeadSettings, DenseHeadTensors, dense_head
from .base import LeanModule, adapter

__all__ = ['LeanRPNHead']


@adapter(RPNHead)
class LeanRPNHead(LeanModule):
    """Head of a region proposal network with one hidden convolution, run level by level."""

    samples = has_reference = False
    shares_maps = True
    callers = ('loss', 'loss_and_predict', 'predict', 'loss_by_feat', 'predict_by_feat')

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        yield self.rpn_conv, 'convolution that keeps the size'
        yield from ((conv, 'pointwise convolution') for conv in (self.rpn_cls, self.rpn_reg))

    def accepts(self, x: tuple[Tensor, ...]) -> bool:
        """See :meth:`.LeanModule.accepts`."""
        return all(level.dim() == 4 for level in x)

    def lean_forward(self, x: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the scores and the boxes of each level, as two lists."""
        outputs = zip(*map(self._level, x), strict=True)
        return tuple(map(list, outputs))

    def _level(self, x):
        if not x.numel():
            return self.forward_single(x)
        hidden, outputs = self.rpn_conv, (self.rpn_cls, self.rpn_reg)
        geometry = Convolution(hidden.padding, hidden.dilation, hidden.groups)
        used = UsedOutputs(len(outputs))
        with no_autocast(x):  # it concatenates only what it knows, on a CPU no fp16
            layers = [(conv.weight, bias_or_zeros(conv.weight, conv.bias)) for conv in outputs]
            weights, biases = zip(*(used.only_for(i, layer) for i, layer in enumerate(layers)), strict=True)
            out_weight, out_bias = torch.cat(weights), torch.cat(biases)
        bias = bias_or_zeros(hidden.weight, hidden.bias)
        tensors = DenseHeadTensors(x, hidden.weight, bias, out_weight, out_bias)
        out = dense_head(DenseHeadSettings(self.form, geometry, sampled=_sampled_anchors(self)), tensors)
        return used.split(out, [*map(len, weights)])

    @classmethod
    def thin_gradient(cls, module: nn.Module, grad: Tensor) -> Tensor:
        """See :meth:`.LeanModule.thin_gradient`. The loss reads as many positions as the sampler takes at most."""
        if number := _sampled_anchors(module):
            positions = torch.arange(grad.shape[2:].numel(), device=grad.device)
            unread = positions % -(-len(positions) // number) != 0
            grad.flatten(2).masked_fill_(unread, 0)
        return grad

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`. With several hidden convolutions each has an adapter of its own."""
        return getattr(module, 'num_convs', None) == 1


def _sampled_anchors(module):
    """Return how many anchors of an image the loss reads, ``None`` if all of them."""
    number = getattr(getattr(module, 'sampler', None), 'num', None)
    return number if isinstance(number, int) else None
