"""Tokens instead of maps, and positions of each image's own, by hand-made examples and by images one at a time."""

import pytest
import torch
from ops_cases import differentiate, downsample_inputs, fused_downsample, fused_mlp, keep_mask, mlp_inputs, stored
from oracles import assert_near, where_sbp

from sbp_mmdet import sbp
from sbp_mmdet.masks import Nearest, Positions, positions
from sbp_mmdet.ops import rows
from sbp_mmdet.settings import DROPPED

MAPS = ('x', 'shortcut', 'out')


def own_masks(n, height, width, count, seed=0):
    """A mask for each image, (n, height, width), with as many kept in each."""
    order = torch.rand(n, height * width, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return (order < count).view(n, height, width)


def own_positions(masks, nearest):
    """The positions of each image's mask, stacked."""
    each = [positions(mask, nearest=nearest) for mask in masks]
    found = Positions(*(torch.stack([getattr(p, name) for p in each]) for name in ('keep', 'drop')))
    if not nearest:
        return found
    one_for_one = torch.arange(found.drop.shape[1])
    index = torch.stack([one_for_one if p.nearest.index is None else p.nearest.index for p in each])
    return found._replace(nearest=Nearest(index, torch.stack([p.nearest.starts for p in each])))


def of_tokens(f):
    """An operation on tokens as one on maps."""

    def run(**tensors):
        shape = tensors['x'].shape
        views = {n: t.flatten(2).mT for n, t in tensors.items() if n in MAPS}
        return f(**(tensors | views)).mT.view(shape)

    return run


@pytest.mark.parametrize('kind', ['half', None])
@pytest.mark.parametrize('form', [dict(), dict(recompute=True), dict(storage='int8'), dict(implementation='reference')])
def test_tokens_are_a_map_of_another_layout(kind, form):
    """A transformer's MLP: no gamma, tokens that are both input and shortcut."""
    tensors, _ = mlp_inputs(gamma=None)
    tensors['x'] = tensors['shortcut'].clone()
    form = dict(form)
    keep = None if kind is None else positions(keep_mask(kind, 5, 6))
    f = fused_mlp(keep, form.pop('recompute', False), factor=torch.tensor([1.5, 0.5]).double(), **form)
    assert_near(differentiate(of_tokens(f), tensors), differentiate(f, tensors), 1e-12)
    del tensors['shortcut']
    tensors['x'] = tensors['x'].flatten(2).mT.contiguous()
    out = differentiate(lambda x, **t: f(x=x, shortcut=x, **t), tensors)
    assert out['out'].shape == (2, 30, 8) and out['out'].is_contiguous()


def one_at_a_time(f_of, tensors, each):
    """Output and gradients of a batch from those of its images, each with its own positions."""
    found = []
    for i, keep in enumerate(each):
        leaves = {n: t[i : i + 1] if n in MAPS else t for n, t in tensors.items()}
        leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in leaves.items()}
        out = f_of(keep)(**leaves)
        # The image's part of the weights that differentiate gives a batch.
        weight = torch.arange(out.numel(), dtype=torch.float64).add(i * out.numel()).mul(1.7).cos().view(out.shape)
        asked = {n: t for n, t in leaves.items() if t is not None}
        grads = torch.autograd.grad(out, list(asked.values()), weight)
        found.append(dict(zip(asked, grads, strict=True), out=out.detach()))
    parts = {name: [f[name] for f in found] for name in found[0]}
    return {name: torch.cat(values) if name in MAPS else sum(values) for name, values in parts.items()}


@pytest.mark.parametrize('dropped', DROPPED)
@pytest.mark.parametrize('form', [dict(), dict(recompute=True), dict(recompute='conv'), dict(storage='int8')], ids=str)
@pytest.mark.parametrize('chunk', [1, 60, None])
def test_mlp_with_positions_of_each_image(dropped, form, chunk):
    form, nearest = dict(form, dropped=dropped), dropped != 'zero'
    recompute = form.pop('recompute', False)
    tensors, conv = mlp_inputs(n=3)
    masks = own_masks(3, 5, 6, 13)
    actual = differentiate(fused_mlp(own_positions(masks, nearest), recompute, conv, chunk=chunk, **form), tensors)

    def f_of(keep):
        return fused_mlp(keep, bool(recompute), **form)

    expected = one_at_a_time(f_of, tensors, [positions(mask, nearest=nearest) for mask in masks])
    assert_near(actual, {name: expected[name] for name in actual}, 1e-11)


@pytest.mark.parametrize('dropped', DROPPED)
@pytest.mark.parametrize('storage', ['native', 'int8'])
def test_downsample_with_positions_of_each_image(dropped, storage):
    tensors, masks, nearest = downsample_inputs(n=3), own_masks(3, 4, 3, 5), dropped != 'zero'
    actual = differentiate(fused_downsample(own_positions(masks, nearest), storage=storage, dropped=dropped), tensors)

    def f_of(keep):
        return fused_downsample(keep, storage=storage, dropped=dropped)

    expected = one_at_a_time(f_of, tensors, [positions(mask, nearest=nearest) for mask in masks])
    assert_near(actual, {name: expected[name] for name in actual}, 1e-11)


def test_algorithm1_with_positions_of_each_image():
    masks = own_masks(3, 3, 4, 5).flatten(1)
    f = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 5)).double()
    x = torch.randn(3, 12, 6, dtype=torch.float64, requires_grad=True)
    keep = own_positions(masks.view(3, 3, 4), False)
    leaves = [x, *f.parameters()]
    weight = torch.randn(3, 12, 5, dtype=torch.float64)
    actual, expected = sbp(f, x, keep), where_sbp(f, x, masks[:, :, None])
    torch.testing.assert_close(actual, expected)
    grads = (torch.autograd.grad(out, leaves, weight) for out in (actual, expected))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('recompute', [False, True])
def test_stored_bytes_are_those_of_shared_positions(recompute):
    """But for the indices."""
    tensors, _ = mlp_inputs(n=3)
    own, shared = own_positions(own_masks(3, 5, 6, 13), False), positions(own_masks(1, 5, 6, 13)[0])
    used = [stored(fused_mlp(keep, recompute), tensors) - keep.keep.nbytes for keep in (own, shared)]
    assert used[0] == used[1]


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_rows_of_each_image(layout):
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=layout)
    index = torch.tensor([[1, 7, 19], [0, 7, 8]])
    picked = rows.rows_of(x, index)
    assert torch.equal(picked, torch.stack([x[n, :, i // 5, i % 5] for n in range(2) for i in index[n].tolist()]))
    back = rows.map_of(picked, index, x.shape)
    kept = torch.zeros(2, 20).scatter_(1, index, 1.0).bool().view(2, 1, 4, 5)
    assert torch.equal(back, torch.where(kept, x, torch.zeros(())))
    tokens = rows.tokens_of(x)
    assert torch.equal(rows.rows_of(tokens, index), picked)
    assert torch.equal(rows.map_of(picked, index, tokens.shape), rows.tokens_of(back))
