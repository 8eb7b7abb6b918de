"""Two ranks draw masks of their own, and DDP and FSDP average their gradients."""

import pytest
import torch
from distributed_worker import CASES, FIRST_ITERATION, SEED, STEPS, build_case, main, make_images
from helpers import run_ranks
from mmengine.logging import MessageHub
from oracles import SMALL, assert_near, build_backbone, compute_gradients, compute_loss, run_convnext_oracle

RANKS = 2
# Other estimates than the definition's: compared with those of one process, which other tests compare with theirs.
OPTIONS = [case for case in CASES if any(word in case for word in ('sampled', 'skip', 'in place'))]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """Run both ranks and return the steps of each rank by case."""
    out = tmp_path_factory.mktemp('ranks')
    run_ranks(main, out, number=RANKS)
    return {case: [torch.load(out / f'{case}-{rank}.pt') for rank in range(RANKS)] for case in CASES}


def compute_expected_gradients(case, rank, iteration, masks):
    """Compute gradients by the definition of SBP in plain autograd."""
    parameters = dict(build_backbone(CASES[case][0], **CASES[case][1]).named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    loss = compute_loss(run_convnext_oracle(parameters, make_images(rank, iteration), SMALL['depths'], masks))
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize('case', OPTIONS)
def test_options_are_the_mean_of_single_process_ones(results, case, monkeypatch):
    for step in range(STEPS):
        expected = {}
        for rank in range(RANKS):
            for place in ('stochastic_backprop.step_draws', 'adapters.row_draws'):
                monkeypatch.setattr(f'sbp_mmdet.{place}.get_rank', lambda rank=rank: rank)
            MessageHub.get_current_instance().update_info('iter', step)
            backbone = build_case(case)
            torch.manual_seed(SEED)
            actual = compute_gradients(backbone, make_images(rank, step))
            actual.pop('image')
            expected = {name: expected.get(name, 0) + grad / RANKS for name, grad in actual.items()}
        for rank in range(RANKS):
            assert_near(results[case][rank][step]['grads'], expected, 1e-11)


@pytest.mark.parametrize('case', [case for case in CASES if case not in OPTIONS])
def test_gradients_are_the_mean_of_single_process_ones(results, case):
    iteration = FIRST_ITERATION.get(case, 0)
    for step in range(STEPS):
        ranks = [steps[step] for steps in results[case]]
        micro_steps = len(ranks[0]['masks'])
        expected = {}
        for rank, result in enumerate(ranks):
            for micro, masks in enumerate(result['masks']):
                grads = compute_expected_gradients(case, rank, iteration + micro, masks)
                expected = {name: expected.get(name, 0) + grad / RANKS for name, grad in grads.items()}
        iteration += micro_steps
        for result in ranks:
            assert_near(result['grads'], expected, 1e-11)
    assert ('accumulate' in case) == (micro_steps == 2)
    if 'frozen' in case:
        assert not any(name.startswith(('stages.0', 'downsample_layers.0')) for name in expected)
    if case == 'find_unused_parameters':
        assert ranks[0]['unused'] is None


def get_stage_masks(masks):
    """Return the masks of one forward pass by stage, after checking that all layers of a stage share one."""
    by_stage = {}
    for (stage, _), mask in masks.items():
        assert torch.equal(by_stage.setdefault(stage, mask), mask)
    return {stage: mask.flatten().tolist() for stage, mask in by_stage.items()}


def test_every_rank_and_step_has_its_own_masks(results):
    seen = []
    for steps in results['plain']:
        for step in steps:
            (masks,) = step['masks']
            assert len(masks) == sum(SMALL['depths'][:3]) + 2  # the blocks of stages 1 to 3, the layers into 2 and 3
            for mask in masks.values():
                assert mask.any() and not mask.all()
            seen.append(get_stage_masks(masks))
    assert len(seen) == RANKS * STEPS
    for i, one in enumerate(seen):
        assert all(one[2] != other[2] for other in seen[:i])


def test_all_implementations_draw_the_same_masks(results):
    """Masks depend on seed, rank and step only, not on the wrapper or the implementation."""
    sharded = ['FSDP'] if 'FSDP' in CASES else []
    for case in ['reference', 'skip', 'static_graph', 'find_unused_parameters', *sharded]:
        for rank in range(RANKS):
            for step in range(STEPS):
                expected = get_stage_masks(results['plain'][rank][step]['masks'][0])
                assert get_stage_masks(results[case][rank][step]['masks'][0]) == expected
    # Accumulation: mmengine counts every micro-batch.
    for rank in range(RANKS):
        micro = [get_stage_masks(m) for m in results['accumulate'][rank][0]['masks']]
        assert micro == [get_stage_masks(results['plain'][rank][step]['masks'][0]) for step in range(STEPS)]


def test_a_run_that_starts_later_continues_the_sequence(results):
    for rank in range(RANKS):
        first, second = (get_stage_masks(step['masks'][0]) for step in results['later'][rank])
        assert first == get_stage_masks(results['plain'][rank][1]['masks'][0]) != second
