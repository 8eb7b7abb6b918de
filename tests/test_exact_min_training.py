"""``exact_min`` and ``int8`` in trainings: two ranks, accumulation, EMA, resumed runs, mixed precision."""

import copy
import functools
import io

import pytest
import torch
from exact_min_model import (
    CASES,
    STEPS,
    accumulate_gradients,
    build_detector,
    get_image_numbers,
    main,
    make_images,
)
from helpers import run_ranks
from mmengine.model import ExponentialMovingAverage

from sbp_mmdet import apply_lean
from sbp_mmdet.surgery import stock_class

RANKS = 2
DEPTHS = (18, 50)


def assert_near(actual, expected, most=1e-11):
    assert actual.keys() == expected.keys()
    for name, own in expected.items():
        assert (actual[name] - own).norm() <= most * own.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('depth', DEPTHS)
def test_everything_is_changed_and_gradients_are_plain(depth):
    plain, lean = build_detector(depth=depth), build_detector('exact_min', depth)
    classes = {
        name: type(lean.get_submodule(name)) for name in ('backbone.layer2', 'neck', 'bbox_head', 'roi_head.mask_head')
    }
    assert all(kind is not stock_class(kind) for kind in classes.values()), classes
    assert_near(accumulate_gradients(lean, [0]), accumulate_gradients(plain, [0]))
    assert_near(accumulate_gradients(lean, [1, 2]), accumulate_gradients(plain, [1, 2]))  # accumulated


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp('ranks')
    run_ranks(main, out, number=RANKS)
    return {case: [torch.load(out / f'{case}-{rank}.pt') for rank in range(RANKS)] for case in CASES}


@functools.cache
def _compute_alone(preset, numbers):
    return accumulate_gradients(build_detector(preset), numbers)


@pytest.mark.parametrize('case', CASES)
def test_two_ranks_give_the_mean_of_single_processes(results, case):
    """The single processes are plain. For eight bits they use that preset too, whose rounding is deterministic."""
    preset = 'int8' if CASES[case][0] == 'int8' else 'none'
    for step in range(STEPS):
        alone = [_compute_alone(preset, get_image_numbers(case, rank, step)) for rank in range(RANKS)]
        expected = {name: sum(actual[name] for actual in alone) / RANKS for name in alone[0]}
        for rank in range(RANKS):
            assert_near(results[case][rank][step], expected)


def _steps(model, optimizer, numbers, average=None):
    for number in numbers:
        optimizer.zero_grad()
        model(make_images(number)).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


@pytest.mark.parametrize('first', [True, False], ids=['averaged before', 'averaged after'])
def test_averaged_copies(first):
    """mmengine's EMA averages the same weights as in the plain model, made before or after the model is changed."""
    plain, lean = build_detector(), build_detector()
    averages = {}
    for model in (plain, lean):
        average = ExponentialMovingAverage(model, momentum=0.3) if first else None
        if model is lean:
            apply_lean(model, 'exact_min')
        average = average or ExponentialMovingAverage(model, momentum=0.3)
        _steps(model, _optimizer(model), range(3), average)
        averages[model is lean] = average
    assert_near(dict(averages[True].named_parameters()), dict(averages[False].named_parameters()), 1e-9)
    with torch.no_grad():
        own, ours = (averages[key].module.eval()(make_images(9)) for key in (False, True))
    torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-9)


@functools.cache
def _train_plain():
    """Return the parameters of the plain model after four steps."""
    plain = build_detector()
    _steps(plain, _optimizer(plain), range(4))
    return dict(plain.named_parameters())


@pytest.mark.parametrize('other', ['none', 'with_cp', 'exact'])
@pytest.mark.parametrize('back', [False, True])
def test_resume_with_another_preset(other, back):
    file = io.BytesIO()
    for i, preset in enumerate((other, 'exact_min') if back else ('exact_min', other)):
        model = build_detector(preset)
        optimizer = _optimizer(model)
        if i:
            file.seek(0)
            state = torch.load(file)
            model.load_state_dict(state['model']), optimizer.load_state_dict(state['optimizer'])
        _steps(model, optimizer, range(2 * i, 2 * i + 2))
        file = io.BytesIO()
        torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict()), file)
    assert_near(dict(model.named_parameters()), _train_plain(), 1e-9)


def test_resume_with_eight_bits():
    """Names and shapes are the same in both directions; the loss of the first step is that of the plain model."""
    plain, rounded = build_detector(), build_detector('int8')
    _steps(rounded, _optimizer(rounded), range(2))
    plain.load_state_dict(rounded.state_dict())
    again = build_detector('int8')
    again.load_state_dict(plain.state_dict())
    torch.testing.assert_close(again(make_images(5)), plain(make_images(5)), rtol=1e-11, atol=0)


@functools.cache
def _compute_truth(depth):
    return accumulate_gradients(build_detector(depth=depth), [0])


@functools.cache
def _error_of_bf16(preset, depth):
    model, truth = build_detector(preset, depth).float(), _compute_truth(depth)
    with torch.autocast('cpu', torch.bfloat16):
        model(make_images(0).float()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth.keys() and all(g.dtype == torch.float32 for g in gradients.values())
    return torch.stack([(gradients[name] - g).norm() / g.norm() for name, g in truth.items()]).mean()


@pytest.mark.parametrize('depth', DEPTHS)
@pytest.mark.parametrize('preset', ['exact_min', 'int8'])
def test_bf16_is_as_near_to_the_truth_as_the_plain_model(preset, depth):
    assert _error_of_bf16(preset, depth) < 1.3 * _error_of_bf16('none', depth)


@pytest.mark.skipif(not hasattr(torch, 'amp') or not hasattr(torch.amp, 'GradScaler'), reason='torch 2.2 and older')
def test_scaled_losses():
    """Scaling by a power of two changes no digit. A step with overflowing gradients is skipped, and the next one is
    not."""
    model = build_detector('exact_min').float()
    model(make_images(0).float()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler('cpu', init_scale=2.0**10)

    def step(factor):
        optimizer.zero_grad()
        scaler.scale(model(factor * make_images(0).float())).backward()
        scaler.unscale_(optimizer)
        actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        scaler.step(optimizer), scaler.update()
        return actual

    before = copy.deepcopy(model.state_dict())
    step(float('inf'))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert scaler.get_scale() == 2.0**9
    actual = step(1)
    assert all(torch.equal(actual[name], own) for name, own in expected.items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
