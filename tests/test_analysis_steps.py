"""Times of training steps: what is compared with what, and that all settings do the same work otherwise."""

import copy
import json
import runpy
import sys
from unittest import mock

import pytest
import torch
from helpers import CONFIGS, TOOLS
from mmdet.structures.mask import BitmapMasks

from sbp_mmdet.analysis import detector, report, step_times
from sbp_mmdet.analysis.detector import timed_step
from sbp_mmdet.analysis.report import steps_markdown, steps_picture, steps_table
from sbp_mmdet.analysis.step_times import in_turn, measure_steps, summary, timed_variants
from sbp_mmdet.analysis.variants import load_config

sys.path[:0] = [str(TOOLS / 'analysis_tools')]
import benchmark_steps  # noqa: E402

ATTO = str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py')
SMALL = dict(batch=1, height=96, width=100, boxes=4, device='cpu')
ROWS = [
    dict(variant='none', step_s=10.04, ratio=1.0, ratio_min=1.0, ratio_max=1.0),
    dict(variant='recompute+targets', step_s=0.8123, ratio=0.854, ratio_min=0.8, ratio_max=1.25),
]


@pytest.fixture(scope='module')
def atto():
    config = load_config(ATTO)
    config.model.backbone.arch = dict(depths=[1, 1, 2, 1], channels=[8, 16, 32, 64])
    config.model.neck.in_channels = [8, 16, 32, 64]
    config.optim_wrapper.type = 'AmpOptimWrapper'
    return config


@pytest.fixture
def built(monkeypatch):
    """The models and optimizer wrappers that are built, in order."""
    found = []

    def build(*args, **case):
        found.append(detector.build_training(*args, **case))
        return found[-1]

    monkeypatch.setattr(step_times, 'build_training', build)
    return found


def test_settings_take_turns():
    log = []

    def step(case, i):
        log.append((i, case))
        return float(len(log))

    assert in_turn('ab', step, 2) == [[1, 2], [3, 4]]
    assert log == [(1, 'a'), (1, 'b'), (2, 'a'), (2, 'b')]


def test_ratios_are_taken_within_a_round():
    times = [[1.0, 2.0], [10.0, 15.0], [100.0, 300.0]]  # the machine becomes slower
    assert summary(['none', 'fused'], times) == [
        dict(variant='none', step_s=10.0, ratio=1.0, ratio_min=1.0, ratio_max=1.0),
        dict(variant='fused', step_s=15.0, ratio=2.0, ratio_min=1.5, ratio_max=3.0),  # of medians it would be 1.5
    ]


def test_a_step_is_timed_without_the_copy_of_its_batch(monkeypatch):
    now = 0

    class Batch:
        changed = False

        def __deepcopy__(self, memo):
            nonlocal now
            now += 100
            return Batch()

    class Model(torch.nn.Linear):
        def train_step(self, batch, wrapper):
            nonlocal now
            batch.changed = True
            now += wrapper

    monkeypatch.setattr(detector.time, 'perf_counter', lambda: now)
    batch = Batch()
    assert timed_step(Model(1, 1), 7, batch) == 7
    assert not batch.changed


def test_all_settings_begin_at_the_same_point(atto, built, monkeypatch):
    """Same weights, batch and random numbers; masks are cropped in pieces where the setting says so only."""
    crop = BitmapMasks.crop_and_resize
    seen, bar = [], []

    def step(model, wrapper, data):
        weights = [id(p) for p in model.parameters()]
        rates = {group['lr'] for group in wrapper.optimizer.param_groups}
        own = BitmapMasks.crop_and_resize is crop
        seen.append((id(model), weights, id(wrapper), id(data), torch.initial_seed(), rates, own))
        return (1.0, 3.0, 2.0)[len(seen) % 3]

    monkeypatch.setattr(step_times, 'timed_step', step)
    settings = ['none+targets', 'none', 'recompute+cp-heads+sbp-rpn']
    rows = measure_steps(atto, settings, rounds=2, done=lambda: bar.append(1), **SMALL)
    models, weights, wrappers, batches, seeds, rates, own = zip(*seen, strict=True)
    assert models == (*map(id, (model for model, *_ in built)),) * 3 and len(set(models)) == 3
    assert all(w == weights[0] for w in weights) and len(set(wrappers)) == len(set(batches)) == 1
    assert seeds == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert set(map(tuple, rates)) == {(0.0,)} and own == (False, True, True) * 3
    assert BitmapMasks.crop_and_resize is crop
    assert [row['ratio'] for row in rows] == [1.0, 2 / 3, 1 / 3] and len(bar) == 9


@pytest.mark.parametrize('large', [0, 1])
def test_what_does_not_fit_into_the_gpu(atto, built, monkeypatch, large):
    """Settings that do are timed all the same; without the baseline nothing can be compared."""
    seconds = iter(range(1, 100))

    def step(model, wrapper, data):
        if model is built[large][0]:
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return float(next(seconds))

    monkeypatch.setattr(step_times, 'timed_step', step)

    def measure():
        return measure_steps(atto, ['none', 'recompute', 'none'], rounds=1, **SMALL)

    if large == 0:
        with pytest.raises(ValueError, match='none, which all others are compared with, does not fit'):
            measure()
    else:  # two steps that are not counted, then 3 and 4
        first, left_out, last = measure()
        assert left_out == dict(variant='recompute', reason='does not fit into the GPU')
        assert [(row['variant'], row['step_s'], row['ratio']) for row in (first, last)] == [
            ('none', 3, 1),
            ('none', 4, 4 / 3),
        ]


def test_on_a_gpu(atto, monkeypatch):
    """A fixed loss scale, so that no step goes without the optimizer's, on the GPU that was named."""
    chosen, built = [], []
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    monkeypatch.setattr(detector, 'build_detector', lambda config, device: built.append(config) or (None, None))
    monkeypatch.setattr(detector, 'proposals_of_a_trained_rpn', lambda model: None)
    for device in ('cuda:1', 'cpu'):
        detector.build_training(atto, **{**SMALL, 'device': device})
    assert chosen == [torch.device('cuda:1')]
    assert [config.optim_wrapper.get('loss_scale') for config in built] == [1.0, None]
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    detector.check_case(batch=1, boxes=0, rounds=1, device='cuda:0')
    with pytest.raises(ValueError, match="'cuda:1': torch sees 1 GPUs"):
        detector.check_case(batch=1, boxes=0, rounds=1, device='cuda:1')


def test_another_optimizer_has_states_of_its_own_and_the_same_weights(atto, built, monkeypatch):
    config = copy.deepcopy(atto)
    monkeypatch.setattr(step_times, 'timed_step', lambda *args: 1.0)
    measure_steps(config, ['none', 'recompute+adamw8bit', 'recompute'], rounds=1, **SMALL)
    (plain, wrapper, _), (other, others, _), (third, *_) = built
    assert type(others.optimizer) is not type(wrapper.optimizer)
    for a, b, c in zip(plain.parameters(), other.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b) and a is not b and a is c
    assert {id(p) for group in others.optimizer.param_groups for p in group['params']} == {
        id(p) for p in other.parameters() if p.requires_grad
    }


def test_real_steps(atto, built):
    before = []
    rows = measure_steps(
        atto,
        ['none', 'recompute+targets+cp-heads', 'none'],
        rounds=1,
        done=lambda: before.append([p.detach().clone() for p in built[0][0].parameters()]),
        **SMALL,
    )
    assert [row['variant'] for row in rows] == ['none', 'recompute+targets+cp-heads', 'none']
    assert rows[0]['ratio'] == 1 and all(row['step_s'] > 0 for row in rows)
    model, wrapper, _ = built[0]
    states = wrapper.optimizer.state
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {states[p]['step'].item() for p in trained} == {6}  # three settings, and a round to warm up
    for name in ('backbone.downsample_layers.0.0', 'rpn_head.rpn_conv', 'roi_head.mask_head.conv_logits'):
        assert states[model.get_submodule(name).weight]['exp_avg'].any()  # so there were gradients
    assert all(torch.equal(a, b) for a, b in zip(before[0], before[-1], strict=True))


def test_what_has_no_time_of_its_own(atto):
    settings = ['none', 'recompute+adamw8bit', 'none+cp-neck']
    good, bad = timed_variants(atto, settings, 'cpu')
    assert good == ['none', 'none+cp-neck'] and 'a stand-in that updates nothing' in bad['recompute+adamw8bit']
    assert timed_variants(atto, settings, 'cuda') == (settings, {})
    retina = load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    good, bad = timed_variants(retina, ['none', 'recompute'], 'cpu')
    assert good == ['none'] and 'SBP does not apply' in bad['recompute']
    retina.optim_wrapper.accumulative_counts = 4
    with pytest.raises(ValueError, match='accumulative_counts=4.*--cfg-options optim_wrapper.accumulative_counts=1'):
        timed_variants(retina, ['none'], 'cpu')


@pytest.mark.parametrize(('change', 'word'), [(dict(rounds=0), 'rounds=0 must be 1'), (dict(batch=0), 'batch=0')])
def test_numbers_that_are_too_small(atto, built, change, word):
    with pytest.raises(ValueError, match=word):
        measure_steps(atto, ['none'], **{**SMALL, **change})
    assert not built


def test_tables(tmp_path):
    assert steps_table(ROWS).splitlines() == [
        'variant            step, s   ratio (min to max)',
        'none                    10  1.00 (1.00 to 1.00)',
        'recompute+targets    0.812  0.85 (0.80 to 1.25)',
    ]
    lines = steps_markdown(ROWS).splitlines()
    assert lines[0] == '| variant | step, s | ratio (min to max) |'
    assert lines[3] == '| `recompute+targets` | 0.812 | 0.85 (0.80 to 1.25) |'
    machine = dict(date='2026-01-01', device='here', torch='2', command='python x')
    update = runpy.run_path(str(TOOLS / 'analysis_tools/update_tables.py'))
    table = update['table'](dict(machine=machine, case={}, rows=ROWS))
    assert table.splitlines() == [*lines, '', '*2026-01-01, here, torch 2: `python x`*']


def test_picture(monkeypatch):
    drawn = []
    monkeypatch.setattr(report, 'save_picture', lambda figure, path, **rest: drawn.append((*figure.axes, path)))
    steps_picture(ROWS, 'title', 'bars.png')
    ((axes, path),) = drawn
    labels = axes.get_title(loc='left'), axes.get_xlabel(), path
    assert labels == ('title', 'time of a training step, relative to none', 'bars.png')
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.854]
    assert [label.get_text() for label in axes.get_yticklabels()] == ['none', 'recompute + targets']
    (spread,) = axes.collections
    assert [list(segment[:, 0]) for segment in spread.get_segments()] == [[1.0, 1.0], pytest.approx([0.8, 1.25])]
    assert [text.get_text().strip() for text in axes.texts] == ['1.00x  (10 s)', '0.85x  (0.812 s)']


def typed(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', ['tool', *map(str, arguments)])
    benchmark_steps.main()


def test_the_tool(monkeypatch, capsys, tmp_path):
    calls = []

    def measure(config, settings, *, rounds, costs, done, **case):
        calls.append((settings, rounds, case))
        assert not costs
        for _ in range((1 + rounds) * len(settings)):
            done()
        return rows

    rows = [*ROWS, dict(variant='fused', reason='does not fit into the GPU')]

    bars = []
    monkeypatch.setattr(benchmark_steps, 'measure_steps', measure)
    monkeypatch.setattr(benchmark_steps, 'ProgressBar', lambda total: bars.append(mock.Mock(total=total)) or bars[-1])
    modes = '--modes', 'none', 'recompute+targets', 'none+adamw8bit', 'fused'
    options = '--rounds', 2, '--size', '320x533', '--boxes', 20, '--batch', 3, '--device', 'cpu'
    out, plot = tmp_path / 'new/steps.json', tmp_path / 'bars.png'
    typed(monkeypatch, ATTO, *modes, *options, '--json', out, '--plot', plot)
    case = dict(batch=3, height=320, width=533, boxes=20, device='cpu')
    assert calls == [(['none', 'recompute+targets', 'fused'], 2, case)]
    printed = capsys.readouterr().out
    assert printed.count('does not fit into the GPU') == 1
    assert 'does not apply: none+adamw8bit (AdamW8bit: on a CPU' in printed
    assert steps_table(rows) in printed
    assert bars[0].total == bars[0].update.call_count == 9
    results = json.loads(out.read_text())
    assert results['rows'] == rows and results['machine']['torch'] == torch.__version__
    name = 'mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes'
    assert results['case'] == dict(case, config=name, rounds=2, trained_proposals=True)
    assert plot.stat().st_size > 5000
    typed(monkeypatch, ATTO, *modes, '--device', 'cpu')
    printed = capsys.readouterr().out
    assert steps_table(rows) in printed and 'written' not in printed


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('--rounds', '0'), 'rounds=0 must be 1 or more'),
        (('--boxes', '-1'), 'boxes=-1 must be 0 or more'),
        (('--size', 'large'), "size 'large' cannot be read"),
        (('--device', 'tpu'), "device 'tpu' is unknown"),
        (('--modes', 'fast'), "preset 'fast' is unknown"),
        (('--modes', 'none+adamw8bit'), 'none of the variants applies'),
        (('--cfg-options', 'optim_wrapper.accumulative_counts=2'), 'accumulative_counts=2'),
        (('--plot', CONFIGS), 'configs is a folder'),
    ],
)
def test_bad_input(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(benchmark_steps, 'measure_steps', None)  # would fail
    with pytest.raises(SystemExit) as end:
        typed(monkeypatch, ATTO, *('--device', 'cpu'), *arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err
