"""Masks follow from seed, rank, iteration and pass, are drawn once in a pass, and each layer gets its own."""

import contextlib
import threading

import pytest
import torch
from cases import FAMILIES, build, get_draws, get_kept_masks
from oracles import compute_gradients, random_images

from sbp_mmdet import apply_lean
from sbp_mmdet.stochastic_backprop import masks as positions
from sbp_mmdet.stochastic_backprop import step_draws as draws
from sbp_mmdet.stochastic_backprop.masks import mask_generator, sample_mask

RANDOM = dict(preset='sbp', sampler='random')


def draw_masks(model, x=None):
    """Return the masks of one training pass."""
    x = random_images(1, 64, 64) if x is None else x
    model(x)
    return get_kept_masks(model, x)


def are_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def draw_sequence(model, iteration, steps=range(5)):
    """Return the first stage's masks of some training steps."""
    masks = []
    for step in steps:
        iteration(step)
        masks.append(next(iter(draw_masks(model).values())))
    return torch.stack(masks)


@pytest.fixture(name='calls')
def fixture_calls(monkeypatch):
    """Count the draws of masks."""
    calls, stage_masks = [], draws.stage_masks
    monkeypatch.setattr(draws, 'stage_masks', lambda *args, **kw: calls.append(args) or stage_masks(*args, **kw))
    return calls


@pytest.mark.parametrize('family', ['SBPConvNeXt', 'SBPSwinTransformer'])
@pytest.mark.parametrize('sampler', ['grid', 'random'])
@pytest.mark.parametrize('size', [(64, 64), (70, 93), (36, 37)], ids=str)
def test_same_positions_across_layers(family, sampler, size, calls):
    """All layers of a stage drop the same positions, and a kept position of a stage is a kept patch of the stage
    before."""
    model, x = build(family, dict(preset='sbp', sampler=sampler)), random_images(1, *size)
    model(x)
    assert len(calls) == 1
    masks = get_kept_masks(model, x)
    assert {stage for stage, _ in masks} == {0, 1, 2}
    for (stage, _), mask in masks.items():
        assert torch.equal(mask, masks[stage, 0])
        if stage:
            height, width = (n // 2 for n in masks[stage - 1, 0].shape)  # of whole patches
            patches = masks[stage - 1, 0][: 2 * height, : 2 * width].unflatten(0, (height, 2)).unflatten(2, (width, 2))
            mask = mask[:height, :width]
            assert torch.equal(patches.all(3).all(1), mask) and torch.equal(patches.any(3).any(1), mask)


@pytest.mark.parametrize('family', FAMILIES)
def test_all_tokens_of_a_vit_and_all_blocks_of_a_stage_share_their_positions(family):
    model = build(family, RANDOM)
    model(random_images(1, 64, 64))
    found = get_draws(model)
    lengths = {stage: height * width for stage, (height, width) in enumerate(found.stages.sizes(64, 64, 3))}
    with found.latest_pass():
        own = {key: found.positions(key, lengths[key[0]]) for key in found.stages.keep_ratios()}
    assert all(
        positions is own[key[0], max(k[1] for k in own if k[0] == key[0] and k[1] != 'downsample')]
        for key, positions in own.items()
    )


def test_ratio_of_each_block():
    ratios = [0.25, 1, 0.5, 0.75, 0.125]
    masks = draw_masks(build('SBPConvNeXt', dict(preset='sbp', keep_ratio=ratios)), random_images(1, 256, 256))
    kept = {key: mask.double().mean().item() for key, mask in masks.items()}
    assert kept == {(0, 0): 0.25, (1, 1): 0.5, (2, 0): 0.75, (2, 1): 0.125, (2, 'downsample'): 0.75}


def test_masks_by_hand(iteration):
    iteration(5)
    masks = draw_masks(
        build('SBPSwinTransformer', RANDOM | dict(blocks=[1, 1, 0, 0], downsample=False)), random_images(1, 36, 20)
    )
    base = sample_mask(5, 3, 0.5, 'random', mask_generator(torch.initial_seed(), 0, 5))
    assert torch.equal(masks[1, 0], base)
    assert torch.equal(masks[0, 0], base.repeat_interleave(2, 0).repeat_interleave(2, 1)[:9, :5])


def test_nothing_is_drawn_without_need(calls):
    model, x = build('SBPConvNeXt', RANDOM), random_images(1, 64, 64)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    for cfg, options in (
        (None, {}),
        (dict(preset='exact'), dict(drop_path_rate=0.5)),
        (dict(preset='sbp', keep_ratio=1.0), {}),
        (RANDOM, dict(frozen_stages=4)),
        (RANDOM | dict(blocks=(1, 2, 0, 0)), dict(frozen_stages=3)),
    ):
        compute_gradients(build('SBPConvNeXt', cfg, **options), x)
    assert not calls
    compute_gradients(model.train(), x)
    assert len(calls) == 1


def test_frozen_stages_need_no_masks(calls):
    """The mask is drawn at the deepest stage that is thinned and not frozen."""
    cfg = dict(preset='sbp', blocks=(1, 2, 0, 0), downsample=False)
    assert draw_masks(build('SBPConvNeXt', cfg, frozen_stages=1)).keys() == {(1, 0), (1, 1)}
    assert len(calls[0][0]) == 2


@pytest.mark.parametrize('family', FAMILIES)
def test_a_resumed_run_continues(family, iteration):
    whole = draw_sequence(build(family, RANDOM), iteration, range(6))
    assert torch.equal(draw_sequence(build(family, RANDOM, seed=1), iteration, range(3, 6)), whole[3:])
    assert len(whole.flatten(1).unique(dim=0)) == 6


def test_seeds_and_ranks_differ(iteration, monkeypatch):
    def found():
        return draw_sequence(build('stock Swin', RANDOM), iteration)

    first = found()
    monkeypatch.setattr(draws, 'get_rank', lambda: 1)
    assert not torch.equal(found(), first)
    monkeypatch.undo()
    torch.manual_seed(0)
    assert torch.equal(found(), first)
    torch.manual_seed(1)
    assert not torch.equal(found(), first)


def test_passes_of_a_step_differ(iteration):
    model = build('SBPConvNeXt', RANDOM)
    iteration(7)
    first, second = draw_masks(model), draw_masks(model)
    assert not are_equal(first, second)
    iteration(8)
    draw_masks(model)
    iteration(7)  # as after a resume
    assert are_equal(draw_masks(model), first)
    model.eval()(random_images(1))  # validation leaves the sequence alone
    model.train()
    assert are_equal(draw_masks(model), second)


def test_without_a_runner_passes_differ():
    model = build('SBPConvNeXt', RANDOM)
    assert not are_equal(draw_masks(model), draw_masks(model))


def test_heads_are_drawn_for_each_block():
    model = build('SBPViT', dict(preset='sbp', attention='head', blocks=[3], keep_ratio=0.34, sampler='random'))
    found = []
    for _ in range(8):
        model(random_images(1, 64, 64))
        with get_draws(model).latest_pass():
            found.append([get_draws(model).heads((0, i)).tolist() for i in range(3)])
    assert all(len(heads) == 1 for step in found for heads in step)
    assert len({str(step) for step in found}) > 3 and any(a != b for a, b, _ in found)
    model = build('SBPViT', dict(preset='sbp', attention='head', keep_ratio=0.67))
    model(random_images(1, 64, 64))
    with get_draws(model).latest_pass():
        assert len(get_draws(model).heads((0, 2))) == 2 and get_draws(model).heads((0, 0)) is None


def test_images_that_are_left_out_follow_the_rate(iteration):
    iteration(0)
    model = build('stock Swin', dict(preset='exact'), drop_path_rate=0.5)
    found = get_draws(model)
    model(random_images(256, 8, 8))
    rates = found.stages.rates()
    assert {key[2] for key in rates} == {'attention', 'mlp'} and (0, 0, 'mlp') not in rates  # whose rate is 0
    with found.latest_pass():
        kept = {key: found.images(key, 256).double().mean().item() for key in rates}
        assert all(abs(kept[key] - (1 - rate)) < 0.15 for key, rate in rates.items())
        assert not torch.equal(found.images((3, 0, 'mlp'), 256), found.images((3, 0, 'attention'), 256))
        assert found.images((3, 0, 'mlp'), 255) is None  # of another batch: the branch draws itself


@pytest.mark.parametrize(
    'preset, options, refused',
    [
        ('sbp', dict(), True),
        ('sampled', dict(skip_dropped_images=False), True),
        ('exact', dict(), True),
        ('exact', dict(skip_dropped_images=False), False),
    ],
)
def test_cuda_graphs_of_draws_are_refused(preset, options, refused, monkeypatch):
    """A graph would replay copies from the host's memory of its capture, and the images of its capture."""
    model = build('stock ConvNeXt', drop_path_rate=0.5).float().train()
    apply_lean(model, preset, verify=False, **options)
    monkeypatch.setattr(positions, '_HAS_CUDA', True)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    with pytest.raises(RuntimeError, match='CUDA graph') if refused else contextlib.nullcontext():
        model(torch.randn(2, 3, 64, 64))


def test_two_threads_that_call_a_backbone_at_once():
    """Each has a pass of its own: that of one thread ends while the other is between two stages."""
    model = build('SBPConvNeXt', RANDOM | dict(verify=False))
    first, second = random_images(1, 64, 64), random_images(2, 96, 96)
    begun, both = threading.Event(), threading.Event()
    other = threading.Thread(target=model, args=(first,))

    def meet(module, args):
        if len(args[0]) == len(first):
            begun.set()
            both.wait(60)
        else:
            both.set()
            other.join()

    model.stages[1][0].register_forward_pre_hook(meet)
    other.start()
    assert begun.wait(60)
    compute_gradients(model, second)
    assert get_kept_masks(model, second)[0, 0].shape == (24, 24)


def find_dropped_images(model, number=1024):
    """Return the images that each branch drops in one pass, for each object that draws them."""
    model(random_images(number, 8, 8))
    found = []
    for drawn in model.step_draws:
        with drawn.latest_pass():
            found.append({branch: ~drawn.images(branch, number) for branch in drawn.stages.rates()})
    return found


def are_independent(a, b):
    """Return whether two draws drop an image both as often as independent ones do, to four standard deviations."""
    a, b = a.double(), b.double()
    return abs(((a - a.mean()) * (b - b.mean())).mean()) < 4 * (a.var() * b.var() / len(a)).sqrt()


def test_parts_of_a_backbone_that_were_changed_one_by_one(iteration):
    """Parts that were changed one by one skip images independently of each other."""
    iteration(3)
    model = build('stock Swin', drop_path_rate=0.5)
    for part in ('stages.2', 'stages.3'):
        apply_lean(model, 'exact', modules=[part], verify=False)
    first, second = find_dropped_images(model)
    assert all(are_independent(a, b) for a in first.values() for b in second.values())
