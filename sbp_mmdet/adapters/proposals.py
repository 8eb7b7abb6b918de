"""The first stage of DINO: proposals of all tokens. Some hundred of them are taken, and get gradients."""

import contextlib
import functools
from unittest import mock

import torch
from mmdet.models.detectors import DINO
from torch import nn

from ..ops.again import rows_again
from ..settings import Settings
from .adapter import Lean, Whole, adapter, kind_of

__all__ = ['Proposals']


@adapter(DINO)
class Proposals(Whole):
    """Layers that make the proposals store their input, and run again for the tokens that are taken."""

    def lean_forward(self, *args, **kwargs):
        return super(Lean, self).forward(*args, **kwargs)

    def pre_decoder(self, *args, **kwargs):
        """The detector's own, with two layers and a branch of the head as one operation."""
        if not (self.training and torch.is_grad_enabled()) or self.form.implementation == 'reference':
            return super().pre_decoder(*args, **kwargs)
        first = self.memory_trans_fc, self.memory_trans_norm
        with contextlib.ExitStack() as stack:
            for branches in (self.bbox_head.cls_branches, self.bbox_head.reg_branches):
                layers = (*first, branches[self.decoder.num_layers])
                run = functools.partial(_chain, [layer.forward for layer in layers])
                parameters = [p for layer in layers for p in layer.parameters()]
                operation = functools.partial(rows_again, run, parameters)
                stack.enter_context(mock.patch.object(layers[-1], 'forward', operation))
            for layer in first:
                stack.enter_context(mock.patch.object(layer, 'forward', lambda x: x))
            return super().pre_decoder(*args, **kwargs)

    @classmethod
    def members(cls, module: nn.Module):
        yield module

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        kind = kind_of(module)
        own = ('pre_decoder', 'gen_encoder_output_proposals')
        if all(getattr(kind, name) is getattr(DINO, name) for name in own):
            return None
        return f'its class, {kind.__name__}, makes proposals in its own way'


def _chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x
