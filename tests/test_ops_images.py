"""Stochastic depth by leaving out: the values and gradients of computing everything and multiplying by zero."""

import copy

import pytest
import torch
import torch.utils.checkpoint as cp
from oracles import (
    DEVICE,
    SMALL,
    assert_near,
    gradients,
    image,
    loss_of,
    masks_of,
    oracle_convnext,
    record_keep,
    small_backbone,
)

from sbp_mmdet.analysis.memory import saved_bytes
from sbp_mmdet.draws import generator_of
from sbp_mmdet.ops.images import on_images

SKIP = dict(skip_dropped_images=True)
BLOCKS = [(i, j) for i, depth in enumerate(SMALL['depths']) for j in range(depth)]


def record_images(backbone):
    """The dict that each forward pass fills with the images that each block is given."""
    seen = {}
    for i, j in BLOCKS:
        backbone.stages[i][j].register_forward_pre_hook(lambda _, args, key=(i, j): seen.update({key: args[2]}))
    return seen


def drawn(backbone, steps, iteration, n=2):
    """(steps, blocks, n) of bool: the images of each step; blocks without stochastic depth have all."""
    seen, rows = record_images(backbone), []
    for step in steps:
        iteration(step)
        backbone(image(n, 32, 32))
        rows.append(torch.stack([torch.ones(n).bool() if seen[key] is None else seen[key] for key in BLOCKS]))
    return torch.stack(rows)


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize(
    'sbp_cfg',
    [
        dict(keep_ratio=1.0, implementation='reference'),
        dict(keep_ratio=1.0, recompute=True),
        dict(implementation='reference'),
        dict(),
        dict(recompute='block', sampler='random'),
    ],
    ids=str,
)
def test_gradients_are_those_of_multiplying_by_zero(sbp_cfg, with_cp, iteration):
    backbone = small_backbone({**SKIP, **sbp_cfg}, drop_path_rate=0.8, with_cp=with_cp)
    x, state = image(5), dict(backbone.named_parameters())
    keep, images = record_keep(backbone), record_images(backbone)

    def expected(x):
        masks = masks_of(keep, *x.shape[-2:])
        return oracle_convnext(state, x, SMALL['depths'], masks, drop_path_rate=0.8, images=images)

    cases = set()
    for step in range(6):
        iteration(step)
        found = gradients(backbone, x)
        assert all(g is not None for g in found.values())
        assert_near(found, gradients(backbone, x, expected), 1e-9)
        for block in images.values():
            cases.add('some' if block is not None and 0 < block.sum() < 5 else block is None or block.any().item())
    assert cases == {True, False, 'some'}  # all images, none, and some, which are not always neighbours


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_a_replay_leaves_out_the_same_images(use_reentrant, iteration):
    """Somebody's checkpoint around the whole backbone. A reentrant one has no gradients in its first pass."""
    backbone = small_backbone(dict(SKIP, sampler='random'), drop_path_rate=0.8)
    x, state = image(3).requires_grad_(), dict(backbone.named_parameters())
    keep, images = record_keep(backbone), record_images(backbone)
    for step in range(3):
        iteration(step)
        backbone.zero_grad()
        outs = cp.checkpoint(backbone, x, use_reentrant=use_reentrant)
        first = dict(images)
        loss_of(outs).backward()
        assert all(torch.equal(first[key], images[key]) for key in BLOCKS[1:])
        masks = masks_of(keep, 64, 64)
        expected = oracle_convnext(state, x, SMALL['depths'], masks, drop_path_rate=0.8, images=images)
        for a, b in zip(outs, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        found = {name: p.grad for name, p in state.items()}
        assert_near(
            found, dict(zip(state, torch.autograd.grad(loss_of(expected), list(state.values())), strict=True)), 1e-9
        )


@pytest.mark.parametrize('options', [dict(dropped='nearest'), dict(storage='int8'), dict(keep_ratio=1.0)], ids=str)
def test_kept_images_are_those_of_a_smaller_batch(options):
    """Whatever the block does to its gradients: its branch for the kept images alone, over the rate of keeping."""
    backbone = small_backbone(dict(SKIP, recompute=True, **options), drop_path_rate=0.5)
    block, plain = backbone.stages[1][1], copy.deepcopy(backbone.stages[1][1])
    plain.drop_path = torch.nn.Identity()
    x = torch.randn(3, 12, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.to(DEVICE).requires_grad_()
    keep = backbone.draw(image(3)).positions.get((1, 1))
    images = torch.tensor([True, False, True])

    def expected(x):
        kept = x[images]
        branch = plain(kept, keep) - kept
        return x.index_add(0, images.nonzero().flatten().to(x.device), branch / (1 - block.drop_path_rate))

    def differentiate(module, forward):
        parameters = dict(module.named_parameters())
        out = forward(x)
        grads = torch.autograd.grad(loss_of([out]), [x, *parameters.values()])
        return dict(zip(['out', 'x', *parameters], [out.detach(), *grads], strict=True))

    found = differentiate(block, lambda x: block(x, keep, images))
    assert_near(found, differentiate(plain, expected), 1e-9)


@pytest.mark.parametrize('recompute', [False, True, 'block'])
def test_in_reduced_precision(recompute):
    """Images that pass a block by keep the precision they come in, beside those that it has raised to fp32."""
    backbone = small_backbone(dict(SKIP, recompute=recompute, keep_ratio=1.0), dtype=torch.float32, drop_path_rate=0.8)
    images, x, state = record_images(backbone), image(4, dtype=torch.float32), dict(backbone.named_parameters())

    def forward(x):
        return oracle_convnext(state, x, SMALL['depths'], {}, drop_path_rate=0.8, images=images)

    with torch.autocast('cpu', torch.bfloat16):
        found = gradients(backbone, x)
    assert any(0 < kept.sum() < 4 for kept in images.values() if kept is not None)
    for name, expected in gradients(backbone, x, forward).items():  # in fp32
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), expected.flatten(), 0) > 0.995, name


def test_compiled(iteration):
    """The draw differs from call to call; the code that was compiled is the same."""
    backbone = small_backbone(SKIP, drop_path_rate=0.8)
    torch.compiler.reset()
    compiled = torch.compile(backbone, backend='eager')
    for step in range(3):
        iteration(step)
        found = gradients(backbone, image(3), compiled)
        iteration(100)
        gradients(backbone, image(3))
        iteration(step)
        assert_near(found, gradients(backbone, image(3)), 1e-10)


def test_values_are_those_of_multiplying_by_zero():
    backbone = small_backbone(SKIP, drop_path_rate=0.8)
    keep, images = record_keep(backbone), record_images(backbone)
    found = backbone(image(3))
    masks, state = masks_of(keep, 64, 64), dict(backbone.named_parameters())
    expected = oracle_convnext(state, image(3), SMALL['depths'], masks, drop_path_rate=0.8, images=images)
    assert not all(block.all() for block in images.values() if block is not None)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('pattern', [[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_only_these_images_are_computed(pattern, memory_format):
    x = torch.randn(5, 3, 4, 4).to(memory_format=memory_format)
    seen = []
    images = torch.tensor(pattern).bool()
    out = on_images(lambda x: seen.append(x) or 10 * x, x, images, [])
    assert torch.equal(out, torch.where(images.view(-1, 1, 1, 1), 10 * x, x))
    (computed,) = seen
    assert torch.equal(computed, x[images])
    # What the block stores is not a view with the other images behind it, and keeps its layout.
    assert computed.untyped_storage().nbytes() == computed.nbytes
    assert computed.is_contiguous(memory_format=memory_format) and out.is_contiguous(memory_format=memory_format)


def test_a_block_without_images():
    """Its parameters have gradients of zero, not none: AdamW decays weights, and reducers wait for them."""
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    used, frozen = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    out = on_images(lambda x: pytest.fail('computed'), x, torch.tensor([False, False]), [used, frozen])
    (3 * out).sum().backward()
    assert torch.equal(out, x) and torch.equal(x.grad, torch.full_like(x, 3))
    assert torch.equal(used.grad, torch.zeros(3, 2)) and frozen.grad is None


@pytest.mark.parametrize(('recompute', 'with_cp'), [(True, False), ('block', False), (False, False), (False, True)])
def test_stored_bytes_are_those_of_the_kept_images(recompute, with_cp):
    backbone = small_backbone(dict(SKIP, recompute=recompute), drop_path_rate=0.5, with_cp=with_cp)
    block = backbone.stages[1][1]
    x = torch.randn(4, 12, 16, 16, dtype=torch.float64, requires_grad=True)

    def stored(images):
        kept = torch.tensor(images).bool()
        return saved_bytes(lambda: block(x, None, kept), [x, *block.parameters()])

    # All four store x itself, which is there anyway.
    everything = stored([1, 1, 1, 1]) + x.nbytes
    # Less a few tensors of one number for each image, nothing else is there.
    assert stored([1, 0, 1, 0]) == pytest.approx(everything / 2, rel=0.01)
    assert stored([0, 0, 0, 1]) == pytest.approx(everything / 4, rel=0.01)
    assert stored([0, 0, 0, 0]) == 0


def test_how_often(iteration):
    """Each block of its own, as often as its rate says: within five standard deviations."""
    backbone = small_backbone(SKIP, drop_path_rate=0.5)
    found = drawn(backbone, range(400), iteration).double()
    rates = torch.linspace(0, 0.5, len(BLOCKS), dtype=torch.float64)
    deviation = (rates * (1 - rates) / 800).sqrt()
    assert ((found.mean((0, 2)) - (1 - rates)).abs() <= 5 * deviation).all()
    last = found[:, -3:].transpose(1, 2).flatten(0, 1)  # the three highest rates, 800 draws
    off_diagonal = torch.corrcoef(last.T)[~torch.eye(3).bool()]
    assert (off_diagonal.abs() < 5 / 800**0.5).all()
    assert torch.corrcoef(found[:, -1].T)[0, 1].abs() < 5 / 400**0.5


def test_drawn_from_seed_rank_and_step(iteration, monkeypatch):
    backbone = small_backbone(SKIP, drop_path_rate=0.5)

    def sequence(seed=0, rank=0, steps=range(10)):
        torch.manual_seed(seed)
        monkeypatch.setattr('sbp_mmdet.draws.get_rank', lambda: rank)
        return drawn(backbone, steps, iteration, n=4)

    first = sequence()
    assert torch.equal(first, sequence())
    assert torch.equal(first[4:], sequence(steps=range(4, 10)))  # a resumed run
    assert not torch.equal(first, sequence(rank=1))
    assert not torch.equal(first, sequence(seed=1))
    assert not torch.equal(first[1:], first[:-1])


def test_masks_do_not_change_with_it():
    """The same positions with and without, so that one can be compared with the other."""
    seen = []
    for sbp_cfg in (dict(sampler='random'), dict(SKIP, sampler='random')):
        backbone = small_backbone(sbp_cfg, drop_path_rate=0.5)
        keep = record_keep(backbone)
        backbone(image(2))
        seen.append(masks_of(keep, 64, 64))
    assert all(torch.equal(seen[0][key], seen[1][key]) for key in seen[0].keys() | seen[1].keys())


def test_masks_and_images_do_not_tell_of_each_other(monkeypatch):
    states = []

    def spy(step, *purpose):
        generator = generator_of(step, *purpose)
        states.append(generator.get_state().numpy().tobytes())
        return generator

    monkeypatch.setattr('sbp_mmdet.draws.generator_of', spy)
    small_backbone(SKIP, drop_path_rate=0.5)(image(2))
    assert len(states) == len(set(states)) == 2


def test_where_nothing_is_dropped():
    """Evaluation, frozen stages, a rate of 0, and without being asked for."""
    x = image(2)

    def given(train=True, sbp_cfg=SKIP, **options):
        backbone = small_backbone(sbp_cfg, **options).train(train)
        images = record_images(backbone)
        backbone(x)
        return {key for key, kept in images.items() if kept is not None}

    assert given(drop_path_rate=0.5) == set(BLOCKS[1:])
    assert given(drop_path_rate=0.5, frozen_stages=3) == {(3, 0)}
    assert given(drop_path_rate=0.5, frozen_stages=4) == set()
    assert given(drop_path_rate=0.5, train=False) == set()
    assert given() == set()
    with torch.no_grad():  # the pass that a reentrant checkpoint replays; of masks it has no need
        assert given(drop_path_rate=0.5) == set(BLOCKS[1:])
        assert not small_backbone(SKIP, drop_path_rate=0.5).draw(x).positions
    assert given(drop_path_rate=0.5, sbp_cfg={}) == given(drop_path_rate=0.5, sbp_cfg=None) == set()
