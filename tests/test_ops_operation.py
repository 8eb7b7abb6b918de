"""The wrapper that makes an autograd function of two plain functions, and the forms of operations."""

from typing import NamedTuple

import pytest
import torch
from oracles import DEVICE
from torch import Tensor

from sbp_mmdet.ops.common.autograd_function import Form, OnHost, Operation


class Tensors(NamedTuple):
    x: Tensor
    weight: Tensor | None
    other: Tensor | None = None


class Gradients(NamedTuple):
    x: Tensor | None = None
    weight: Tensor | None = None


class Deep(NamedTuple):
    weight: Tensor
    number: int
    numbers: OnHost


class Saved(NamedTuple):
    deep: Deep
    x: Tensor | None


def forward(settings, tensors, needs):
    x, weight, other = tensors
    saved = Saved(Deep(weight, 7, OnHost(torch.tensor([settings]))), x if needs.weight else None)
    return settings * x * weight + other, saved


def backward(settings, saved, grad, needs):
    assert saved.deep.number == 7 and saved.deep.numbers.tensor.item() == settings
    assert (saved.x is None) == (not needs.weight)
    dweight = (settings * grad * saved.x).sum(0) if needs.weight else None
    return Gradients(settings * grad * saved.deep.weight if needs.x else None, dweight)


double = Operation('Scaled', forward, backward, Gradients)


@pytest.mark.parametrize('trainable', [('x', 'weight'), ('x',), ('weight',), ()], ids=str)
def test_operation(trainable):
    leaves = dict(x=torch.randn(3, 4), weight=torch.randn(4))
    leaves = {name: t.requires_grad_(name in trainable) for name, t in leaves.items()}
    other, seen = torch.ones(3, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        out = double(2, Tensors(**leaves, other=other))
    assert torch.equal(out, 2 * leaves['x'] * leaves['weight'] + 1)
    assert out.requires_grad == bool(trainable)
    assert len(seen) == len(trainable and ('weight',)) + ('weight' in trainable)
    if trainable:
        assert DEVICE != 'cpu' or 'Scaled' in out.grad_fn.name()  # elsewhere the result is moved, see conftest.py
        out.sum().backward()
    expected = dict(x=2 * leaves['weight'].expand(3, 4), weight=2 * leaves['x'].sum(0))
    for name, leaf in leaves.items():
        if name in trainable:
            torch.testing.assert_close(leaf.grad, expected[name])
        else:
            assert leaf.grad is None
    assert other.grad is None  # not among those that get a gradient


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(implementation='fuse'), "implementation='fuse' is unknown; choose 'fused' or 'reference'"),
        (dict(storage='int4'), "storage='int4' is unknown; choose 'native' or 'int8'"),
        (dict(implementation='reference', storage='int8'), "storage='int8' needs implementation='fused'"),
    ],
)
def test_forms_that_cannot_be_honoured(options, message):
    with pytest.raises(ValueError, match=message):
        Form(**options)
    assert hash(Form()) == hash(Form('fused', 'native'))
