"""When the backbone draws masks, what they depend on, and which layer gets which."""

import pytest
import torch
import torch.utils.checkpoint as cp
from oracles import (
    assert_near,
    gradients,
    image,
    loss_of,
    masks_of,
    oracle_convnext,
    record_keep,
    small_backbone,
)

from sbp_mmdet import draws

RANDOM = dict(sampler='random')


def masks(backbone, x=None):
    """The masks of one training step."""
    x = image(1) if x is None else x
    seen = record_keep(backbone)
    backbone(x)
    return masks_of(seen, *x.shape[-2:])


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a.keys() | b.keys())


def sequence(backbone, iteration, steps=range(5)):
    """The first stage's masks of some training steps."""
    drawn = []
    for step in steps:
        iteration(step)
        drawn.append(masks(backbone)[0, 0])
    return torch.stack(drawn)


@pytest.fixture(name='drawn_masks')
def fixture_drawn_masks(monkeypatch):
    """Counts the draws of masks."""
    calls = []
    stage_masks = draws.stage_masks
    monkeypatch.setattr(draws, 'stage_masks', lambda *args, **kw: calls.append(args) or stage_masks(*args, **kw))
    return calls


@pytest.mark.parametrize('sampler', ['grid', 'random'])
@pytest.mark.parametrize('size', [(64, 64), (70, 93), (32, 33)], ids=str)
def test_same_positions_across_layers(sampler, size):
    """All layers of a stage, also across the stages: a kept position is a kept patch of the stage before."""
    drawn = masks(small_backbone(dict(sampler=sampler)), image(1, *size))
    assert drawn.keys() == {(0, 0), (1, 'downsample'), (1, 0), (1, 1), (2, 'downsample'), (2, 0), (2, 1)}
    for (stage, _), mask in drawn.items():
        assert torch.equal(mask, drawn[stage, 0])
        if stage:
            height, width = mask.shape
            patches = drawn[stage - 1, 0][: 2 * height, : 2 * width].unflatten(0, (height, 2)).unflatten(2, (width, 2))
            assert torch.equal(patches.all(3).all(1), mask) and torch.equal(patches.any(3).any(1), mask)


def test_ratio_of_each_block():
    ratios = [0.25, 1, 0.5, 0.75, 0.125]
    drawn = masks(small_backbone(dict(keep_ratio=ratios)), image(1, 256, 256))
    kept = {key: mask.double().mean().item() for key, mask in drawn.items()}
    # The layer that leads into a stage goes with the stage's first block.
    assert kept == {(0, 0): 0.25, (1, 1): 0.5, (2, 0): 0.75, (2, 1): 0.125, (2, 'downsample'): 0.75}


def test_which_layers():
    def layers(**sbp_cfg):
        return set(masks(small_backbone(sbp_cfg)))

    assert layers(blocks=(1, 0, 2, 0), downsample=False) == {(0, 0), (2, 0), (2, 1)}
    assert layers(blocks=(0, 1, 0, 1)) == {(1, 'downsample'), (1, 0), (2, 'downsample'), (3, 0)}
    assert layers(blocks=(0, 0, 0, 0)) == {(1, 'downsample'), (2, 'downsample')}
    assert layers(blocks=(0, 0, 0, 0), downsample=False) == set()


@pytest.mark.parametrize('dropped', ['nearest', 'pool'])
def test_dropped_positions_that_send_gradients_are_next_to_kept_ones(dropped):
    """Each stage draws at its own resolution: a checkerboard everywhere, and not blocks of the deepest stage."""
    drawn = masks(small_backbone(dict(dropped=dropped)), image(1, 64, 96))
    assert {stage for stage, _ in drawn} == {0, 1, 2}
    for mask in drawn.values():
        assert (mask[:, 1:] != mask[:, :-1]).all() and (mask[1:] != mask[:-1]).all()


def test_nothing_is_drawn_without_need(drawn_masks):
    backbone, x = small_backbone(RANDOM), image(1)
    backbone(x)
    assert drawn_masks
    drawn_masks.clear()
    with torch.no_grad():
        backbone(x)
    with torch.inference_mode():
        backbone(x)
    backbone.eval()
    backbone(x)
    for other in (
        small_backbone(),
        small_backbone(dict(keep_ratio=1.0)),
        small_backbone(RANDOM, frozen_stages=4),
        small_backbone(dict(blocks=(1, 2, 0, 0)), frozen_stages=3),
    ):
        other(x)
    assert not drawn_masks


def test_frozen_stages_need_no_masks(drawn_masks):
    """The deepest stage that uses SBP and is not frozen is where the mask is drawn."""
    drawn = masks(small_backbone(dict(blocks=(1, 2, 0, 0), downsample=False), frozen_stages=1))
    assert drawn.keys() == {(1, 0), (1, 1)}
    assert len(drawn_masks[0][0]) == 2


def test_a_resumed_run_continues(iteration):
    whole = sequence(small_backbone(RANDOM), iteration, range(6))
    assert torch.equal(sequence(small_backbone(RANDOM, seed=1), iteration, range(3, 6)), whole[3:])
    assert len(whole.flatten(1).unique(dim=0)) == 6


def test_seeds_and_ranks_differ(iteration, monkeypatch):
    torch.manual_seed(0)
    first = sequence(small_backbone(RANDOM), iteration)
    monkeypatch.setattr(draws, 'get_rank', lambda: 1)
    assert not torch.equal(sequence(small_backbone(RANDOM), iteration), first)
    monkeypatch.undo()
    torch.manual_seed(0)
    assert torch.equal(sequence(small_backbone(RANDOM), iteration), first)
    torch.manual_seed(1)
    assert not torch.equal(sequence(small_backbone(RANDOM), iteration), first)


def test_two_passes_of_a_step_differ(iteration):
    iteration(7)
    backbone = small_backbone(RANDOM)
    first, second = masks(backbone), masks(backbone)
    assert not same(first, second)
    iteration(8)
    masks(backbone)
    iteration(7)  # as after a resume
    assert same(masks(backbone), first) and same(masks(backbone), second)


def test_without_a_runner_passes_differ():
    backbone = small_backbone(RANDOM)
    assert not same(masks(backbone), masks(backbone))


def test_evaluation_between_does_not_matter(iteration):
    """Validation in the middle of training leaves the sequence alone."""
    iteration(0)
    backbone = small_backbone(RANDOM)
    expected = [masks(backbone), masks(backbone)]
    backbone = small_backbone(RANDOM)
    actual = [masks(backbone)]
    backbone.eval()(image(1))
    backbone.train()
    actual.append(masks(backbone))
    assert same(actual[0], expected[0]) and same(actual[1], expected[1])


def replayed(backbone, use_reentrant):
    return lambda x: cp.checkpoint(lambda x: tuple(backbone(x)), x, use_reentrant=use_reentrant)


def oracle(backbone, drawn):
    state = dict(backbone.named_parameters())
    return lambda x: oracle_convnext(state, x, backbone.depths, drawn)


@pytest.mark.parametrize('implementation', ['fused', 'reference'])
def test_replay_in_the_backward_pass(implementation, iteration):
    """Somebody's checkpoint around the whole backbone: the mask of the forward pass, not a new one."""
    iteration(3)
    x = image(1)
    expected_masks = masks(small_backbone(RANDOM))
    backbone = small_backbone(RANDOM | dict(implementation=implementation))
    actual = gradients(backbone, x, replayed(backbone, use_reentrant=False))
    assert_near(actual, gradients(backbone, x, oracle(backbone, expected_masks)), 1e-10)


def test_replay_of_two_passes(iteration):
    """Each replay uses the mask of its own forward pass, though both come after the second of them."""
    iteration(3)
    backbone, x = small_backbone(RANDOM), [image(1, seed=1), image(1, seed=2)]
    drawn = [masks(backbone), masks(backbone)]
    backbone = small_backbone(RANDOM)
    forward = replayed(backbone, use_reentrant=False)
    parameters = list(backbone.parameters())

    def differentiate(forwards):
        loss = sum(loss_of(forward(x.requires_grad_())) for forward, x in zip(forwards, x, strict=True))
        return dict(enumerate(torch.autograd.grad(loss, parameters)))

    assert_near(differentiate([forward] * 2), differentiate([oracle(backbone, d) for d in drawn]), 1e-10)


def test_reentrant_replay_draws_a_mask_for_each_step(iteration):
    """The first pass of a reentrant checkpoint runs without gradients; the replay is what the mask is for."""
    backbone, x = small_backbone(RANDOM), image(1).requires_grad_()
    forward, seen, drawn = replayed(backbone, use_reentrant=True), record_keep(backbone), []
    for step in range(4):
        iteration(step)
        backbone.zero_grad()
        loss_of(forward(x)).backward()
        drawn.append(masks_of(seen, 64, 64))
        actual = {name: p.grad for name, p in backbone.named_parameters()}
        expected = gradients(backbone, x, oracle(backbone, drawn[-1]))
        del expected['image']
        assert_near(actual, expected, 1e-10)
    assert not any(same(a, b) for a, b in zip(drawn[:-1], drawn[1:], strict=True))
