"""The benchmark reports bytes, ratios and gradient errors as defined, and what cannot run."""

import copy
import json
import sys

import pytest
import torch
import torch.utils.checkpoint as cp
from helpers import RESEARCH, ROOT, make_project, run_forked
from mmengine.config import Config
from torch import nn

import benchmark  # isort: skip  (helpers puts research/ on the path)
import module_runs
import pictures
import step_runs
from case import Case, compare_gradients, make_smooth_noise, parse_name
from module_runs import measure_module
from rivals import RIVALS
from step_runs import measure_steps
from tables import benchmark_table
from turns import compute_ratios

from sbp_mmdet.plan.variants import make_plain

CASE = dict(batch=1, height=64, width=64, boxes=2, device='cpu')
PRESETS = ['none', 'with_cp', 'exact', 'int8', 'sampled', 'sbp', 'reference']


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    return make_plain(Config.fromfile(make_project(tmp_path_factory.mktemp('project'), train=1, val=1)))


def test_a_block_stores_what_the_picture_of_the_design_says(config):
    """The picture counts feature maps of the block's input; masks and deviations take a little more."""
    rows = measure_module(config, PRESETS, 'backbone.stages.0.0', amp='off', rounds=0, **CASE)
    unit = 8 * 16 * 16 * 4  # channels x positions x fp32
    for row in rows:
        expected = pictures.units('exact' if row['preset'] == 'sampled' else row['preset'])
        assert expected <= row['saved_bytes'] / unit <= 1.08 * expected + 0.2, row


def test_gradients_of_a_backbone(config):
    """Exact presets are exact while stochastic depth drops images; the errors of the others are in their documented
    range."""
    config = copy.deepcopy(config)
    config.model.backbone.drop_path_rate = 0.4
    rows = measure_module(config, PRESETS, 'backbone', amp='bf16', rounds=2, **CASE)
    error = {row['preset']: row['error'] for row in rows}
    assert error['none'] == 0 and max(error['with_cp'], error['exact']) < 1e-5 < error['int8'] < 0.05
    assert 0.05 < error['sampled'] and 0.2 < error['sbp']
    assert rows[0]['ratio'] == rows[0]['ratio_min'] == rows[0]['ratio_max'] == 1
    assert all(row['saved_bytes'] < rows[0]['saved_bytes'] for row in rows[1:])
    assert all(row['peak_bytes'] > row['saved_bytes'] for row in rows)
    # Under autocast the plain gradients are off by rounding, and exact ones by about as much.
    rounding = rows[0]['amp_error']
    assert 1e-4 < rounding < 0.1 and all(rows[i]['amp_error'] < 2 * rounding for i in (1, 2))
    config.model.backbone.drop_path_rate = 0.0  # bytes are of a step that drops no image
    (exact,) = measure_module(config, ['exact'], 'backbone', amp='bf16', rounds=0, **CASE)
    assert rows[2]['saved_bytes'] == pytest.approx(exact['saved_bytes'], rel=0.01)


def test_keys_and_modules_without_positions(config):
    """The benchmark accepts any submodule of a detector."""
    few, many = measure_module(
        config, ['sbp,keep_ratio=0.25', 'sbp,keep_ratio=0.75'], 'backbone', amp='off', rounds=0, **CASE
    )
    assert few['saved_bytes'] < many['saved_bytes']
    first, exact = measure_module(config, ['none', 'exact'], 'neck', amp='off', rounds=0, **CASE)
    assert exact['error'] < 1e-5 and first['error'] == 0 < exact['saved_bytes']
    with pytest.raises(ValueError, match='--module nick does not exist; the detector has .*neck'):
        measure_module(config, ['none'], 'nick', amp='off', rounds=0, **CASE)


@pytest.mark.skipif(not hasattr(cp, 'create_selective_checkpoint_contexts'), reason='torch before 2.4')
def test_rivals(config):
    names = ['none', 'selective', 'save-on-cpu', 'conv-bn-eval', 'exact,attention=head']
    rows = measure_module(config, names, 'backbone.stages.0.0', amp='off', rounds=1, **CASE)
    assert [row.get('error') for row in rows[:3]] == [0, pytest.approx(0, abs=1e-6), 0]
    assert rows[1]['saved_bytes'] < rows[0]['saved_bytes'] == rows[2]['saved_bytes']  # on a CPU nothing moves
    assert "preset='exact' drops no position, so it takes no attention" in rows[-1]['reason']
    assert 'ratio' not in rows[-1]


def test_what_cannot_run_is_a_row(config, monkeypatch):
    def fail(run):
        raise RuntimeError('no compiler here\nmore')

    def need_too_much(run):
        raise torch.cuda.OutOfMemoryError

    def wrong(run):
        raise RuntimeError('a bug of ours')

    for name, wrap in (('compile', fail), ('compile-0.5', need_too_much)):
        monkeypatch.setitem(RIVALS, name, RIVALS[name].__class__(name, '', wrap=wrap))
    noted, names = [], ['none', 'compile', 'compile-0.5']
    case = dict(amp='off', rounds=1, note=lambda row: noted.append(dict(row)), **CASE)
    rows = measure_module(config, names, 'neck', **case)
    assert [row.get('reason') for row in rows] == [None, 'no compiler here', 'out of memory']
    steps = measure_steps(config, ['none', 'compile'], rounds=1, **CASE)
    assert steps[0]['ratio'] == 1 and steps[1]['reason'] == 'no compiler here'
    monkeypatch.setattr(module_runs, 'Case', wrong)
    with pytest.raises(TypeError):
        measure_module(config, ['none'], 'neck', **case)
    seen = [(row['preset'], row.get('state') or row.get('reason', 'seconds' in row)) for row in noted]
    ended = dict(zip(names, [False, 'no compiler here', 'out of memory'], strict=True))
    assert seen[:6] == [(name, said) for name in names for said in ('begun', ended[name])]
    assert seen[6:8] == [('none', True), ('none', 'begun')] and 'argument' in seen[8][1]  # noted, then raised
    assert 'no compiler here' in benchmark_table(rows)


def test_out_of_memory_is_a_row(config, monkeypatch):
    """Accumulated gradients are freed, and the next variant that runs is the baseline of the others."""
    bytes_of = module_runs.Runner.bytes

    def need_too_much(self, case, by_allocator):
        if case.name in ('none', 'with_cp'):
            self.step(case)
            raise torch.cuda.OutOfMemoryError
        return bytes_of(self, case, by_allocator)

    monkeypatch.setattr(module_runs.Runner, 'bytes', need_too_much)
    names = ['none', 'exact', 'with_cp', 'exact_min', 'int8']
    rows = measure_module(config, names, 'backbone', amp='off', rounds=2, **CASE)
    assert [row.get('reason') for row in rows] == ['out of memory', None, 'out of memory', None, None]
    assert max(rows[i]['error'] for i in (0, 1, 3)) < 1e-5 < rows[4]['error'] < 0.05
    assert [row.get('compared_with') for row in rows] == [None, 'exact', None, 'exact', 'exact']
    assert rows[1]['ratio'] == 1 and 'ratio' not in rows[0]


def test_steps_leave_the_weights_alone(config, monkeypatch):
    found = []
    build = step_runs.build_training
    monkeypatch.setattr(step_runs, 'build_training', lambda *a, **k: found.append(build(*a, **k)) or found[-1])
    rows = measure_steps(config, ['none', 'exact+cp-heads', 'sbp,keep_ratio=0.5', 'none'], rounds=2, **CASE)
    assert all(row['ratio_min'] <= row['ratio'] <= row['ratio_max'] and row['seconds'] > 0 for row in rows)
    (first, wrapper, _), *others = found
    assert all(p is q for model, *_ in others for p, q in zip(first.parameters(), model.parameters(), strict=True))
    assert all(group['lr'] == 0 for group in wrapper.optimizer.param_groups)


def test_ratios_are_those_of_each_round():
    first, second = compute_ratios([[1.0, 2.0], [2.0, 2.0], [4.0, 12.0]])
    assert first == dict(seconds=2.0, ratio=1.0, ratio_min=1.0, ratio_max=1.0)
    assert second == dict(seconds=2.0, ratio=2.0, ratio_min=1.0, ratio_max=3.0)


def test_compared():
    exact, gradients = dict(a=torch.tensor([3.0, 0]), b=torch.zeros(2)), dict(a=torch.tensor([3.0, 4]))
    assert compare_gradients(exact, gradients) == pytest.approx(dict(cosine=9 / 15, error=4 / 3))


def test_names():
    assert parse_name('sbp,keep_ratio=[0.25,0.5],sampler=random') == (
        'sbp',
        dict(keep_ratio=[0.25, 0.5], sampler='random'),
    )
    assert parse_name('selective') == ('with_cp', {})
    for name, message in (('papre', 'papre'), ('fused', "preset='fused'"), ('sbp,0.5', 'unknown|key=value')):
        with pytest.raises(ValueError, match=message):
            parse_name(name)


def test_smooth_neighbours_are_alike():
    for shape, axis in (((2, 3, 40, 40), 3), ((2, 90, 5), 1)):
        x = make_smooth_noise(shape)
        assert x.shape == shape
        assert (x.diff(dim=axis).std() / x.std()).item() < 0.6


def test_rivals_keep_the_forward_pass():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    expected = module(x)
    for name in ('save-on-cpu', 'conv-bn-eval'):
        rival = RIVALS[name]
        if rival.change:
            rival.change(module)
        assert torch.allclose((rival.wrap or (lambda run: run))(module)(x), expected, atol=1e-6)


def test_a_part_runs_alone_with_positions_of_its_backbone(config):
    torch.manual_seed(0)
    model = step_runs.build_training(config, **CASE)[0]
    case = Case('sbp', model, 'backbone.stages.2.1', {})
    x = torch.randn(1, 32, 4, 4, requires_grad=True)
    with pytest.raises(ValueError, match='call the backbone, not the layer'):
        case.run(x)
    with case.alone(torch.Size((1, 3, 64, 64))):
        case.run(x).sum().backward()
    assert x.grad is not None and case.module.pointwise_conv1.weight.grad.any()


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--presets', 'fused'], "preset='fused'"),
        (['--size', '0x64'], '--size 0x64'),
        (['--cap', '8'], '--cap 8.0 needs --step and a GPU'),
        (['--rivals', 'mine'], 'invalid choice'),
    ],
    ids=str,
)
def test_bad_input(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', str(make_project(tmp_path, 1, 1)), *words])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert message in capsys.readouterr().err


def test_command_line(tmp_path):
    config, out = make_project(tmp_path, train=1, val=1), tmp_path / 'new/out.json'
    words = ('--presets', 'none', 'exact', '--size', '64x64', '--rounds', '1', '--json', out)
    done = run_forked(RESEARCH / 'benchmark.py', config, *words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert not done.returncode, done.stdout
    results = json.loads(out.read_text())
    assert [row['preset'] for row in results['rows']] == ['none', 'exact'] and 'exact' in done.stdout
    assert results['case']['module'] == 'backbone' and results['machine']['command'].startswith('python research/')
