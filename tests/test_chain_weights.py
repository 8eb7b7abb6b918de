"""The backward pass of a chain folds few weights, and keeps none longer than it has to."""

import collections

import pytest
import torch
from oracles import DEVICE
from test_residual_chain import build_stage, random_map
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.memory import peak_bytes


class _Folds(TorchDispatchMode):
    """Mode that counts how often each weight is multiplied by the factor of its norm."""

    def __init__(self):
        super().__init__()
        self.number = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul.Tensor and args[1].shape[1:] == (1, 1, 1):
            self.number[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def test_a_backward_pass_folds_the_weights_of_a_block_once():
    """The gradient of a layer's input uses the weight that its recomputation folded.

    The last layer of each block but the last is folded twice: it also recomputes the input of the next block.
    """
    model = build_stage(blocks=4)
    apply_lean(model)
    out = model(random_map().requires_grad_())
    with _Folds() as folds:
        out.sum().backward()
    found = [[folds.number[getattr(block, f'conv{i}').weight.data_ptr()] for i in (1, 2, 3)] for block in model]
    assert found == [[1, 1, 2]] * 3 + [[1, 1, 1]]


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_products_of_frozen_weights_are_not_kept(preset):
    """The norms need sums of W * dW' alone. Maps are small here, and a block may need its weights twice."""
    model = build_stage(blocks=6, width=64, options=dict(stride=1)).float()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.requires_grad_(False)
    apply_lean(model, preset=preset)
    out = model(torch.randn(1, 16, 8, 8, device=DEVICE)).sum()
    block = sum(module.weight.nbytes for module in model[1].modules() if isinstance(module, nn.Conv2d))
    assert peak_bytes(out.backward) < 2 * block + 20 * 256 * 64 * 4
