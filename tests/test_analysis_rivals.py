"""Rivals: each does what it says, its bytes are counted, and what is wrong with its gradients is seen."""

import functools
import json
import sys
from unittest import mock

import pytest
import torch
from helpers import CONFIGS, TOOLS

from sbp_mmdet.analysis import rivals, step_times
from sbp_mmdet.analysis.benchmark import build_unit, measure
from sbp_mmdet.analysis.memory import held_bytes, saved_bytes
from sbp_mmdet.analysis.report import against_time, steps_markdown
from sbp_mmdet.analysis.rivals import RIVALS, Rival, drawn_errors, graphs_over_sizes, missing, prepare
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.families import FAMILIES
from sbp_mmdet.settings import PRESETS

sys.path[:0] = [str(TOOLS / 'analysis_tools')]
import benchmark_block  # noqa: E402

SHAPE = (2, 16, 12, 16)
SMALL = dict(depths=[1, 1, 1, 1], channels=[16, 16, 16, 16])
# Partitions as inductor does, and needs no C++ compiler.
BACKEND = 'aot_eager_decomp_partition'
RUNS = [name for name in RIVALS if missing(name, 'cpu') is None]
COMPILES = pytest.mark.skipif('compile-0.1' not in RUNS, reason='this torch has no memory budget, or no compiler')


def build(preset):
    return build_unit(FAMILIES['ConvNeXt'], 'block', SMALL, preset, 1, SHAPE, 'cpu')


@pytest.fixture(scope='module')
def prepared():
    return prepare([*RIVALS], build, SHAPE, device='cpu', dtype=None, backend=BACKEND)


@pytest.mark.parametrize('preset', ['none', 'with_cp', 'exact'])
def test_the_allocator_and_hooks_count_the_same(preset):
    module, run, _ = build(preset)
    x = torch.randn(SHAPE, requires_grad=True)
    run(x).sum().backward()
    module.zero_grad()
    held, peak = held_bytes(lambda: run(x.clone()))
    # A checkpoint keeps the state of the random numbers too: 5 kB.
    assert held == pytest.approx(saved_bytes(lambda: run(x), module.parameters()), abs=6000 * (preset == 'with_cp'))
    assert peak > held


@COMPILES
def test_bytes_fall_with_the_budget(prepared):
    units, records = prepared
    assert [*units] == [*RIVALS] == [*records]
    found = {}
    for name, row in measure(
        {'none': build('none'), **units}, SHAPE, device='cpu', dtype=None, rounds=0, by_allocator=[*units]
    ):
        found[name] = row.get('saved_bytes')
    ratios = {name: found[name] / found['none'] for name in units}
    assert ratios['compile'] < 1.05 and ratios['save-on-cpu'] < 1.05
    for name in ('compile-0.5', 'compile-0.25', 'compile-0.1'):
        assert ratios[name] < RIVALS[name].budget + 0.15
    assert ratios['compile-0.1'] < ratios['compile-0.25'] < ratios['compile-0.5'] < 0.7
    assert 0.2 < ratios['selective'] < 0.8
    assert all(records[name]['graphs'] == 1 for name in units if RIVALS[name].compiled)


def test_gradients_while_images_are_dropped():
    errors = drawn_errors(
        ['none', 'with_cp', 'exact', 'recompute', 'selective', 'save-on-cpu'], build, SHAPE, device='cpu'
    )
    assert errors.pop('recompute') > 0.3  # SBP
    assert max(errors.values()) < 1e-6


class Longer(Rival):
    """Its gradients are a tenth too long."""

    def wrap(self, run, *, backend='inductor'):
        def wrapped(x):
            return 1.1 * run(x)

        wrapped.graphs = []
        return wrapped


def test_a_rival_with_wrong_gradients_is_seen(monkeypatch):
    monkeypatch.setitem(RIVALS, 'longer', Longer('longer', 'wrong'))
    assert drawn_errors(['longer'], build, SHAPE, device='cpu')['longer'] == pytest.approx(0.1, rel=1e-3)


@COMPILES
def test_a_budget_that_draws_again_is_seen():
    errors = drawn_errors(['compile', 'compile-0.1'], build, SHAPE, device='cpu', backend=BACKEND)
    assert errors['compile'] < 1e-5
    assert errors['compile-0.1'] > 0.1 or errors['compile-0.1'] < 1e-5  # a torch that mends it is welcome


@COMPILES
def test_graphs_over_sizes():
    shapes = [(2, 16, 12 + 4 * i, 16 + 8 * i) for i in range(4)]
    assert 1 <= graphs_over_sizes(build, shapes, 'cpu') <= 3


def test_what_a_torch_does_not_have_is_a_record(monkeypatch):
    monkeypatch.delattr(torch.utils.checkpoint, 'create_selective_checkpoint_contexts', raising=False)
    monkeypatch.setenv('CXX', 'no-such-compiler')
    units, records = prepare(['selective', 'compile', 'save-on-cpu'], build, SHAPE, device='cpu', dtype=None)
    assert [*units] == ['save-on-cpu']
    assert 'has no selective checkpointing' in records['selective']['reason']
    assert 'no-such-compiler' in records['compile']['reason'] or 'has no torch.compile' in records['compile']['reason']
    with pytest.raises(ValueError, match="rival 'mesa' is unknown"):
        missing('mesa', 'cpu')


def test_a_rival_that_fails_is_a_record(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError('no kernel\nfor this')

    monkeypatch.setattr(rivals, '_step', fail)
    units, records = prepare(['save-on-cpu'], build, SHAPE, device='cpu', dtype=None)
    assert units == {} and records == {'save-on-cpu': dict(reason='RuntimeError: no kernel')}


def test_the_tool(monkeypatch, capsys, tmp_path):
    out = tmp_path / 'rivals.json'
    words = '--arch atto --stage 2 --size 64 64 --rounds 1 --presets none with_cp --device cpu --rivals save-on-cpu'
    monkeypatch.setattr(sys, 'argv', ['tool', *words.split(), 'selective', '--json', str(out)])
    benchmark_block.main()
    assert 'gradient error' in capsys.readouterr().out
    rows = {row['preset']: row for row in json.loads(out.read_text())['rows']}
    assert [*rows] == ['none', 'with_cp', 'save-on-cpu', 'selective']
    host = rows['save-on-cpu']
    assert host['saved_bytes'] == 0 and host['host_bytes'] > 0 and 'total_ratio' not in host
    if 'selective' in RUNS:
        assert rows['with_cp']['saved_bytes'] < rows['selective']['saved_bytes'] < rows['none']['saved_bytes']
        assert rows['selective']['drawn_error'] < 1e-6


def test_the_tool_with_channels_last(monkeypatch, capsys):
    """Every unit, in every pass: the measurement's own, the one before it, and those that compare gradients."""
    seen = []

    def watched(*args, **kwargs):
        unit = build_unit(*args, **kwargs)

        def run(x):
            weights = [p for p in unit.module.parameters() if p.dim() == 4]
            seen.append(all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, *weights)))
            return unit.run(x)

        return unit._replace(run=run)

    monkeypatch.setattr(benchmark_block, 'build_unit', watched)
    words = '--arch atto --stage 2 --size 64 64 --rounds 0 --presets none exact --device cpu --rivals save-on-cpu'
    monkeypatch.setattr(sys, 'argv', ['tool', *words.split(), '--gradients', '--channels-last'])
    benchmark_block.main()
    assert len(seen) > 10 and all(seen)


def test_the_tool_says_what_presets_and_rivals_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['tool', '--help'])
    with pytest.raises(SystemExit):
        benchmark_block.main()
    said = capsys.readouterr().out
    assert all(found.meaning in said for found in (*PRESETS.values(), *RIVALS.values()))


@pytest.fixture(scope='module')
def steps():
    """Whole steps of a small detector with stochastic depth."""
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    config.model.backbone.update(arch=dict(depths=[1, 1, 1, 1], channels=[8, 16, 32, 64]), drop_path_rate=0.6)
    config.model.neck.in_channels = [8, 16, 32, 64]
    variants, bad = step_times.timed_variants(config, ['none', 'with_cp', 'recompute', 'exact', *RIVALS], 'cpu')
    assert variants == ['none', 'with_cp', 'recompute', 'exact', *RIVALS] and not bad
    case = dict(batch=2, height=96, width=100, boxes=4, device='cpu')
    wrap = functools.partialmethod(Rival.wrap, backend=BACKEND)
    with mock.patch.object(Rival, 'wrap', wrap):
        return {row['variant']: row for row in step_times.measure_steps(config, variants, rounds=1, costs=True, **case)}


def test_whole_steps(steps):
    assert [*steps] == ['none', 'with_cp', 'recompute', 'exact', *RIVALS]
    assert 'nothing moves' in steps['save-on-cpu']['reason'] and 'step_s' not in steps['save-on-cpu']
    for name in ('none', 'with_cp', 'exact'):
        assert steps[name]['drawn_error'] < 1e-5
    assert steps['recompute']['drawn_error'] > 0.1
    assert steps['exact']['held_bytes'] < steps['none']['held_bytes'] < steps['none']['peak_bytes']
    if 'selective' in RUNS:
        assert steps['selective']['drawn_error'] < 1e-5 and steps['selective']['ratio'] > 0


@COMPILES
def test_compiled_steps(steps):
    for name in (name for name in RIVALS if RIVALS[name].compiled):
        assert steps[name]['graphs'] >= 1 and steps[name]['compile_s'] >= 0
    assert steps['compile-0.1']['held_bytes'] < steps['compile']['held_bytes'] <= 1.05 * steps['none']['held_bytes']
    assert steps['compile']['drawn_error'] < 1e-4  # draws as plain code does


def test_table_and_picture_of_steps(steps, tmp_path):
    rows = [*steps.values()]
    head, _, *lines = steps_markdown(rows).splitlines()
    assert [cell.strip() for cell in head.split('|')][2:-1][:7] == [
        'step, s',
        'ratio (min to max)',
        'held',
        'ratio',
        'peak',
        'ratio',
        'gradient error',
    ]
    assert 'on a CPU nothing moves to the host' in lines[-1] and lines[-1].startswith('| `save-on-cpu` |  |  |')
    against_time(rows, [*RIVALS], 'title', tmp_path / 'points.png')
    assert (tmp_path / 'points.png').stat().st_size > 5000


def test_a_rival_that_fails_in_a_step_is_a_row(monkeypatch):
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    seconds = iter([1.0, RuntimeError('no kernel\nfor this'), 2.0])

    def step(*args):
        found = next(seconds)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(step_times, 'timed_step', step)
    case = dict(batch=1, height=96, width=100, boxes=4, device='cpu')
    rows = step_times.measure_steps(config, ['none', 'selective'], rounds=1, **case)
    assert rows[1] == dict(variant='selective', reason='RuntimeError: no kernel') and rows[0]['step_s'] == 2.0
