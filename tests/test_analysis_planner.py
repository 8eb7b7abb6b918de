"""The planner's choice among given measurements, what it prints, and training under a cap."""

import contextlib
import copy
import functools
import json
import sys

import pytest
import torch
from helpers import CONFIGS, TOOLS
from mmengine.config import Config, DictAction

from sbp_mmdet.analysis.cap import run_under_cap
from sbp_mmdet.analysis.planner import (
    candidates,
    cfg_options,
    choose,
    measured_times,
    needed,
    parse_bytes,
    parse_size,
    snippet,
)
from sbp_mmdet.analysis.variants import applicable, with_variant
from sbp_mmdet.analysis.variants import load_config as read_config
from sbp_mmdet.settings import SBPSettings

sys.path[:0] = [str(TOOLS), str(TOOLS / 'analysis_tools')]
import benchmark_memory  # noqa: E402
import plan_memory  # noqa: E402
import run_under_cap as cap_tool  # noqa: E402

T = str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py')
STOCK_T = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
STOCK_R = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
TEACHER = 'mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py'

read_once = functools.cache(read_config)


def load_config(path):
    return copy.deepcopy(read_once(path))


def row(peak, gradients=0):
    return dict(
        parameters=0, optimizer=0, saved={}, forward=0, peak=peak, gradients=gradients, peak_phase='', reserved=peak
    ) | dict(step_s=None)


def test_budgets_and_sizes():
    assert parse_bytes('8GiB') == 8 * 2**30
    assert parse_bytes(' 7.5 gb') == 7_500_000_000
    assert parse_bytes('6000MiB') == 6000 * 2**20
    for text in ('8', 'much', '-1GB', '0GiB', '8 GiBi'):
        with pytest.raises(ValueError, match='cannot be read.*8GiB'):
            parse_bytes(text)
    assert parse_size('800x1333') == parse_size('800, 1333') == (800, 1333)
    for text, message in (('800', 'cannot be read'), ('axb', 'cannot be read'), ('16x1333', '32 or more')):
        with pytest.raises(ValueError, match=message):
            parse_size(text)


def test_need_is_the_peak_with_margin():
    assert needed(row(1_000_000_000)) == 1_700_000_000
    assert needed(row(1_000_000_000, gradients=500_000_000), ddp=True) == 2_250_000_000


@pytest.mark.parametrize('budget, expected', [(20, 'fast'), (12, 'fast'), (10, 'middle'), (5, 'small'), (3, None)])
def test_the_first_that_fits_is_chosen(budget, expected):
    peaks = dict(fast=10, middle=8, large=30, small=4)
    seen = []
    found = choose(
        list(peaks),
        int(budget * 1.1e9),
        lambda setting: row(peaks[setting] * 1e9),
        tell=lambda setting, need, fits: seen.append((setting, fits)),
    )
    assert found == expected
    assert seen[0] == ('fast', expected == 'fast')
    # Where the smallest is far from fitting, nothing else is looked at.
    assert expected == 'fast' or seen[1] == ('small', expected is not None)
    assert len(seen) == {'fast': 1, 'middle': 3, 'small': 4, None: 2}[expected]


def test_the_last_need_not_be_the_smallest():
    peaks = dict(fast=9e9, slow=4e9, slowest=4.2e9)  # slow needs 5.0e9, slowest 5.22e9
    assert choose(list(peaks), int(5.1e9), lambda setting: row(peaks[setting])) == 'slow'
    assert choose(list(peaks), int(4.9e9), lambda setting: row(peaks[setting])) is None
    peaks = dict(fast=9e9, slow=3e9, slowest=4e9)  # slow needs 3.9e9, slowest 5.0e9
    assert choose(list(peaks), int(4.1e9), lambda setting: row(peaks[setting])) == 'slow'


def test_candidates():
    config = load_config(T)
    settings = candidates(config)
    assert settings[0] == 'fused+skip' and settings[-1] == 'block+skip+targets+cp-heads+cp-rpn+cp-neck'
    exact = candidates(config, 'exact')
    assert {s.split('+')[0] for s in exact} == {'none', 'exact', 'exact-block'}
    # A rate of 0.4 in the last block makes 7/6 of the time less than 1; a small one does not, and 0 leaves nothing out.
    assert exact[0] == 'exact+skip' and exact[-1] == 'exact-block+skip+targets+cp-heads+cp-rpn+cp-neck'
    fp32 = load_config(T)  # there checkpointing may store less than the others
    fp32.optim_wrapper.type = 'OptimWrapper'
    assert {s.split('+')[0] for s in candidates(fp32, 'exact')} == {'none', 'with_cp', 'exact', 'exact-block'}
    config.model.backbone.drop_path_rate = 0.1
    exact = candidates(config, 'exact')
    assert exact[0] == 'none' and exact[-1] == 'exact-block+skip+targets+cp-heads+cp-rpn+cp-neck'
    config.model.backbone.drop_path_rate = 0.0
    settings = candidates(config)
    assert settings[0] == 'fused' and settings[-1] == 'block+targets+cp-heads+cp-rpn+cp-neck'
    assert {s.split('+')[0] for s in candidates(config, 'nearest')} == {'nearest', 'nearest-int8'}
    assert {s.split('+')[0] for s in candidates(config, 'int8')} == {'int8', 'int8-block'}
    with_states = candidates(config, eight_bit=True)
    assert with_states[: len(settings)] == settings and with_states[-1] == settings[-1] + '+adamw8bit'
    retina = load_config(STOCK_R)
    assert candidates(retina) == []
    settings = candidates(retina, 'exact', eight_bit=True)  # SGD: no 8-bit AdamW; no RPN to checkpoint
    assert settings[0] == 'none' and settings[-1] == 'with_cp+targets+cp-heads+cp-neck'


def steps(**times):
    """What benchmark_steps.py writes; '__' stands for '+'."""
    rows = [dict(variant=name.replace('__', '+'), step_s=2 * t, ratio=t) for name, t in times.items()]
    return dict(case=dict(config='t'), machine=dict(device='a GPU', date='2026'), rows=rows)


def test_measured_times_replace_guesses():
    """The order is that of the table where there is one: of variants, else of presets and what pieces were seen to add,
    else of guesses, brought to the scale of the table."""
    config = load_config(T)
    config.model.backbone.drop_path_rate = 0.0
    assert candidates(config, 'exact')[0] == 'none'
    slow = measured_times(steps(none=1.0, exact=0.9, recompute=0.7, recompute__targets=0.72, block=0.5, with_cp=1.2))
    exact, paper = candidates(config, 'exact', measured=slow), candidates(config, measured=slow)
    assert exact[0] == 'exact' and exact[-1] == 'exact-block+targets+cp-heads+cp-rpn+cp-neck'
    assert paper[0] == 'block' and paper.index('block+targets') < paper.index('recompute')
    # 'targets' was seen to add 0.02; so 'block+targets' is at 0.52, and 'cp-heads' adds its guess of 0.08.
    assert paper.index('block+targets+cp-heads') < paper.index('recompute')
    config.model.backbone.drop_path_rate = 0.4
    skip = measured_times(steps(none=1.0, recompute=0.9, recompute__skip=0.5, fused__skip=0.6))
    assert candidates(config, measured=skip)[:2] == ['recompute+skip', 'recompute+skip+targets']


def test_tables_of_times():
    table = steps(none=0.5, recompute=0.4)
    table['rows'] += [dict(variant='compile', reason='no compiler'), dict(variant='none', step_s=3.0, ratio=1.5)]
    table['rows'].append(dict(variant='exact', fits=False))
    assert measured_times(table) == {'none': 1.0, 'recompute': 0.4}
    with pytest.raises(ValueError, match="no time of 'none', only of \\['recompute'\\]"):
        measured_times(dict(rows=table['rows'][1:2]))


def test_where_images_cannot_be_left_out():
    config = load_config(T)
    good, bad = applicable(config, ['none+skip', 'with_cp+skip', 'reference+skip', 'exact+skip+targets'])
    assert good == ['reference+skip', 'exact+skip+targets']
    assert all('has no sbp_cfg' in bad[setting] for setting in ('none+skip', 'with_cp+skip'))
    assert with_variant(config, good[1]).model.backbone.sbp_cfg.skip_dropped_images is True
    config.model.backbone.drop_path_rate = 0.0
    assert 'drop_path_rate of the backbone is 0' in applicable(config, ['exact+skip'])[1]['exact+skip']
    assert 'does not apply to the backbone, ResNet' in applicable(load_config(STOCK_R), ['none+skip'])[1]['none+skip']


def merged(config, lines, tmp_path):
    """The config with the snippet pasted into a child of it."""
    (tmp_path / 'parent.json').write_text(json.dumps(config.to_dict()))
    (tmp_path / 'child.py').write_text(f"_base_ = './parent.json'\n{lines}\n")
    return Config.fromfile(tmp_path / 'child.py')


@pytest.mark.parametrize('path', [T, STOCK_T])
@pytest.mark.parametrize('setting', ['none', 'fused', 'exact-block+skip+targets+cp-heads', 'reference+adamw8bit'])
def test_a_pasted_snippet_is_the_setting(path, setting, tmp_path):
    config = load_config(path)
    config.custom_hooks = [dict(type='EMAHook')]
    wanted, found = with_variant(config, setting), merged(config, snippet(config, setting), tmp_path)
    assert found.model.backbone == wanted.model.backbone
    assert found.custom_hooks == wanted.custom_hooks
    assert json.dumps(found.optim_wrapper, sort_keys=True) == json.dumps(wanted.optim_wrapper, sort_keys=True)
    assert found.custom_imports['imports'] == ['sbp_mmdet']


def test_a_setting_replaces_the_one_before(tmp_path):
    config = load_config(T)
    config.model.backbone.sbp_cfg = dict(keep_ratio=0.25, recompute='block', sampler='random')
    found = merged(config, snippet(config, 'fused'), tmp_path)
    assert found.model.backbone.sbp_cfg == dict(keep_ratio=0.25, recompute=False, sampler='random')


@pytest.mark.parametrize('setting', ['reference', 'recompute', 'exact', 'int8', 'none'])
def test_a_mode_does_not_inherit_what_another_is_about(setting, tmp_path):
    config = load_config(T)
    config.model.backbone.sbp_cfg = dict(
        dropped='nearest', storage='int8', sampler='random', implementation='fused', skip_dropped_images=True
    )
    found = merged(config, snippet(config, setting), tmp_path).model.backbone.sbp_cfg
    if setting == 'none':
        assert found is None
        return
    settings = SBPSettings.parse(found, (3, 3, 9, 3))
    assert settings.sampler == 'random'
    assert (settings.dropped, settings.storage) == ('zero', 'int8' if setting == 'int8' else 'native')
    assert not settings.skip_dropped_images
    assert settings.implementation == ('reference' if setting == 'reference' else 'fused')


def test_options_for_the_command_line():
    config = load_config(T)
    words = cfg_options(config, 'recompute+adamw8bit').split()
    assert words[0] == '--cfg-options'
    values = {}
    for word in words[1:]:
        key, value = word.split('=')
        values[key] = DictAction._parse_iterable(value)
    config.merge_from_dict(values)
    wanted = dict(keep_ratio=0.5, recompute=True)
    assert {key: config.model.backbone.sbp_cfg[key] for key in wanted} == wanted
    assert config.optim_wrapper.optimizer.type == 'AdamW8bit'
    assert cfg_options(config, 'fused+targets') is None  # hooks cannot be typed
    assert cfg_options(load_config(STOCK_T), 'fused') is None  # nor can the import


def typed(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, 'argv', ['tool', *map(str, arguments)])
    tool.main()


@pytest.mark.parametrize(
    'arguments, message',
    [
        ((T, '--budget', 'lots'), "budget 'lots' cannot be read"),
        ((T, '--budget', '8GiB', '--size', 'large'), "size 'large' cannot be read"),
        ((T, '--budget', '8GiB', '--boxes', '0'), '--boxes 0 must be 1 or more'),
        (('nowhere.py', '--budget', '8GiB'), 'nowhere.py does not exist'),
        ((T, '--budget', '8GiB', '--measured', 'nowhere.json'), '--measured nowhere.json: '),
    ],
)
def test_bad_input_of_the_planner(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        typed(monkeypatch, plan_memory, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('--batch', '0'), 'batch=0 must be 1 or more'),
        (('--boxes', '-1'), 'boxes=-1 must be 0 or more'),
        (('--rounds', '-1'), 'rounds=-1 must be 0 or more'),
        (('--device', 'tpu'), "device 'tpu' is unknown"),
        (('--device', 'cuda:0'), "device 'cuda:0': torch sees no GPU"),
        (('--json', CONFIGS), 'configs is a folder'),
    ],
)
def test_bad_input_of_the_benchmark(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(benchmark_memory, 'measure_detector', None)  # would fail
    with pytest.raises(SystemExit):
        typed(monkeypatch, benchmark_memory, T, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(('tool', 'more'), [(benchmark_memory, ()), (plan_memory, ('--budget', '8GiB'))])
def test_a_model_around_a_model_has_no_backbone(monkeypatch, capsys, tool, more):
    with pytest.raises(SystemExit):
        typed(monkeypatch, tool, TEACHER, *more)
    assert 'no backbone' in capsys.readouterr().err.replace('model.', '')


def test_the_planner_prints_what_to_paste(monkeypatch, capsys, tmp_path):
    peaks = {'fused': 9e9, 'recompute': 6e9, 'none': 20e9}

    def measure(config, **case):
        sbp = config.model.backbone.sbp_cfg
        assert not (sbp or {}).get('skip_dropped_images')  # some step may drop nothing
        name = 'none' if sbp is None else ('recompute' if sbp.get('recompute') else 'fused')
        return row(peaks[name] * (0.5 if config.custom_hooks else 1))

    monkeypatch.setattr(plan_memory, 'measure_detector', measure)
    typed(monkeypatch, plan_memory, T, '--budget', '8GiB')
    paper, exact = capsys.readouterr().out.split('With exact gradients:')
    assert 'fused+skip ' in paper and '10.50 GB  too much' in paper
    assert 'The fastest that fits: fused+skip+targets' in paper and 'skip_dropped_images=True' in paper
    assert "dict(type='TargetsInChunksHook')" in paper
    assert 'The fastest that fits: exact' in exact and 'keep_ratio=1.0' in exact
    (tmp_path / 'steps.json').write_text(json.dumps(steps(none=1.0, fused__skip=0.7, recompute__skip=0.5)))
    typed(monkeypatch, plan_memory, T, '--budget', '8GiB', '--measured', tmp_path / 'steps.json')
    printed = capsys.readouterr().out
    assert 'Order by times of t on a GPU' in printed and 'The fastest that fits: recompute+skip\n' in printed
    with pytest.raises(SystemExit, match='No variant fits into 1GiB.*--adamw8bit'):
        typed(monkeypatch, plan_memory, T, '--budget', '1GiB')
    typed(monkeypatch, plan_memory, STOCK_R, '--budget', '80GiB', '--cfg-options', 'model.backbone.sbp_cfg=None')
    assert 'SBP does not apply to the backbone, ResNet' in capsys.readouterr().out


def test_the_benchmark_says_what_does_not_apply(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        benchmark_memory, 'measure_detector', lambda config, **case: row(10**9) | {'saved': {'neck': 10**8}}
    )
    out = tmp_path / 'new/rows.json'
    arguments = (STOCK_R, '--variants', 'none', 'fused', '--json', out, '--plot', tmp_path / 'bars.png')
    typed(monkeypatch, benchmark_memory, *arguments, '--device', 'cpu')
    printed = capsys.readouterr().out
    assert 'does not apply: fused' in printed and 'ResNet' in printed
    results = Config.fromfile(out)
    assert [r.variant for r in results.rows] == ['none'] and results.machine.torch == torch.__version__
    assert (results.case.boxes, results.case.height) == (60, 800)
    with pytest.raises(SystemExit):
        typed(monkeypatch, benchmark_memory, STOCK_R, '--modes', 'fused')
    assert 'none of the variants applies' in capsys.readouterr().err


def test_under_a_cap():
    """A simulated GPU: memory runs out where a setting needs more than the cap in force."""
    in_force, log = [], []

    @contextlib.contextmanager
    def capped(cap, device):
        in_force.append(cap)
        yield
        in_force.pop()

    def measure(config, *, device, batch):
        log.append((device, batch))
        peak = 4e9 if config.model.backbone.sbp_cfg else 9e9
        if peak > in_force[-1]:
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return row(peak)

    options = dict(capped=capped, measure=measure, batch=2)
    config = load_config(T)
    rows = run_under_cap(config, ['none', 'fused'], 6 * 2**30, **options)
    assert [(r['variant'], r['fits']) for r in rows] == [('none', False), ('fused', True)]
    assert rows[1]['peak'] == 4e9 and in_force == [] and log == [('cuda', 2)] * 2
    assert [r['fits'] for r in run_under_cap(config, ['none', 'fused'], 10**9, **options)] == [False, False]


def test_the_cap_tool_wants_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit):
        typed(monkeypatch, cap_tool, T, '--cap', '8GiB')
    assert 'needs a GPU' in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'a GPU')
    results = [
        dict(variant='none', fits=False),
        dict(
            variant='recompute',
            fits=True,
            **row(5 * 10**9),
        ),
    ]
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(cap_tool, 'run_under_cap', lambda *args, **case: results)
    monkeypatch.setattr(cap_tool, 'cuda_cap', lambda *_: contextlib.nullcontext())
    typed(monkeypatch, cap_tool, T, '--cap', '8GiB')
    printed = capsys.readouterr().out
    assert 'out of memory' in printed and 'ok, peak 5.00 GB' in printed


def test_what_a_model_cannot_do_here_is_a_line(monkeypatch):
    def measure(*args, **kwargs):
        raise KeyError('a kernel that only a GPU has')

    monkeypatch.setattr(plan_memory, 'measure_detector', measure)
    with pytest.raises(SystemExit, match=r'retinanet_r50_fpn_1x_coco.py: no training step .*KeyError.*only a GPU has'):
        typed(monkeypatch, plan_memory, STOCK_R, '--budget', '8GiB')
