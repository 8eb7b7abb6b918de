"""The command ``sbp-mmdet plan`` answers and prints the right variant for given measurements."""

import json
import logging
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import CONFIGS
from mmengine.logging import MMLogger

from sbp_mmdet.plan import command, counts, planner
from sbp_mmdet.plan.cuda_rules import autocast_rules
from sbp_mmdet.plan.inputs import Inputs
from sbp_mmdet.plan.planner import Row, choose_row, count_needed_bytes, plan
from sbp_mmdet.plan.variants import load_config, make_plain

FRCNN = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
RETINA = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
DINO = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
STOCK_T = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
OURS = str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py')
ALL = ('exact', 'exact_min', 'int8', 'sampled', 'sbp', 'none', 'with_cp', 'reference')
GB = 10**9


def _count_of_variant(peak, gradients, gaps=0, update=0):
    """Return the counts of a variant. With expandable segments there are no gaps."""
    held = dict(reserved=2 * peak, capacity=peak + gaps, expandable=peak)
    return dict(held, peak=peak, gradients=gradients, peaks={'optimizer step': update, 'backward': peak})


@pytest.fixture(autouse=True)
def round_numbers(monkeypatch):
    """Set the margin to 10 % and all other memory to 0.6 GB."""
    for name, value in dict(MARGIN=0.1, WORKSPACES=10**8, CONTEXT=5 * 10**8).items():
        monkeypatch.setattr(planner, name, value)


def test_need_is_the_peak_with_margin_and_context():
    row = _count_of_variant(GB, GB // 2)
    assert count_needed_bytes(row) == 1_700_000_000 and count_needed_bytes(row, ddp=True) == 2_250_000_000
    row = _count_of_variant(GB, 0, gaps=GB // 10)  # the margin is one of what is allocated
    assert count_needed_bytes(row) == 1_800_000_000 and count_needed_bytes(row, held_by='expandable') == 1_700_000_000


def run_plan(budget, peaks, path=FRCNN, presets=ALL, **options):
    """Return (variant -> fits), the measured variants and the rows; variants without a peak need 9 GB."""
    seen = []

    def measure(variant):
        seen.append(variant)
        return _count_of_variant(int(peaks.get(variant, 9) * GB), GB)

    rows = plan(make_plain(load_config(path)), int(budget * GB), measure, presets, **options)
    return {row.variant: row.fits for row in rows}, seen, rows


def test_a_config_that_fits_is_all_there_is():
    assert run_plan(5, dict(none=4))[:2] == ({'none': True}, ['none'])  # 4 GB + 10 % + 0.6 GB
    assert not run_plan(5, dict(none=4), ddp=True)[0]['none']


def test_for_each_preset_the_cheapest_that_fits():
    most = '+cp-heads+cp-rpn+cp-neck'
    peaks = {'exact_min': 4, 'int8' + most: 4, 'sbp' + most: 5.5}
    fits, seen, rows = run_plan(6, peaks)
    assert [*fits.items()] == [
        ('none', False),
        ('with_cp', False),
        ('exact', False),
        ('exact_min', True),
        ('none+amp', False),
        ('int8' + most, True),
        ('sbp' + most, False),
    ]
    assert len(seen) == len(set(seen))
    assert choose_row(rows).variant == 'exact_min'
    assert rows[3] == Row('exact_min', 'exact', 5 * GB, True, 4 * GB, 8 * GB, 5 * GB, 600_000_000)


def test_with_cp_is_the_answer_where_nothing_else_is_exact():
    assert choose_row(run_plan(6, {'with_cp': 1, 'int8': 2})[2]).variant == 'with_cp'
    assert choose_row(run_plan(6, {'with_cp': 1, 'exact_min': 2})[2]).variant == 'exact_min'
    assert choose_row(run_plan(6, {'int8': 2})[2]).variant == 'int8'
    assert choose_row(run_plan(6, {})[2]) is None


def test_presets_that_do_not_apply_are_left_out():
    assert [*run_plan(20, dict(none=30, exact=4, int8=3), presets=('none', 'exact', 'int8'))[0]] == [
        *('none', 'exact', 'none+amp', 'int8')
    ]


@pytest.mark.parametrize(
    ('peaks', 'shown'),
    [
        ({'none+amp': 4, 'exact+amp': 2}, 'none+amp'),
        ({'none+amp': 8, 'exact+amp': 4}, 'exact+amp'),
        ({'exact_min+amp': 4}, 'exact_min+amp'),
        ({'none+amp': 8, 'exact+amp': 7}, 'exact+amp'),
    ],
)
def test_a_config_in_full_precision_is_counted_in_mixed_precision(peaks, shown):
    exact = ('none', 'exact', 'exact_min')
    fits, _, rows = run_plan(6, peaks, presets=exact)
    assert [*fits][3:] == [shown] and rows[-1].gradients == 'exact, fp16'
    assert fits[shown] == (choose_row(rows) is not None)
    assert [*run_plan(6, peaks, STOCK_T, exact)[0]] == [*exact]  # it is in mixed precision


def test_pieces_in_the_middle_may_fit_where_all_of_them_do_not():
    fits, _, rows = run_plan(6, {'int8+cp-heads': 4}, presets=('none', 'int8'))
    assert fits['int8+cp-heads'] and choose_row(rows).variant == 'int8+cp-heads'


@pytest.mark.parametrize(
    ('path', 'eight_bit', 'last'),
    [
        (FRCNN, False, 'exact_min'),
        (FRCNN, True, 'exact_min'),  # SGD
        (DINO, False, 'exact_min'),
        (DINO, True, 'exact_min+adamw8bit'),
    ],
)
def test_where_nothing_fits_the_smallest_is_shown(path, eight_bit, last):
    presets = ('none', 'exact_min')
    fits, seen, _ = run_plan(3, {last: 8}, path, presets, eight_bit=eight_bit)
    assert [*fits] == ['none', last, 'none+amp'] and len(seen) == len(set(seen))
    # Pieces may cost more than they save.
    fits = run_plan(3, {'exact_min': 4}, path, presets, eight_bit=eight_bit)[0]
    assert [*fits] == ['none', 'exact_min', 'none+amp']


@pytest.fixture
def planning(monkeypatch):
    """Replace measurements by given peaks, the optimizer's among them, and record the hooks of the configs."""
    peaks, hooks = {}, []

    def measure(config, **case):
        hooks.append([dict(hook) for hook in config.custom_hooks])
        name = config.custom_hooks[0]['preset'] if config.custom_hooks else 'none'
        return _count_of_variant(int(peaks.get(name, 20) * GB), 0, update=int(peaks.get('update', 0) * GB))

    monkeypatch.setattr(counts, 'measure_detector', measure)
    monkeypatch.setattr(counts, 'build_detector', lambda config, device: (None, None))
    monkeypatch.setattr(counts, 'find_presets', lambda model: dict.fromkeys(ALL) | {'sbp': 'has no blocks'})
    return SimpleNamespace(peaks=peaks, hooks=hooks)


def test_cudnn_benchmark_is_not_counted_and_turned_off(planning, capsys):
    """The page says that cudnn_benchmark is not counted and switches it off: SSD needs five times as much with it."""
    planning.peaks.update(none=1)
    for option, said in (('True', True), ('False', False)):
        command.main(['plan', FRCNN, '--budget', '8GiB', '--cfg-options', f'env_cfg.cudnn_benchmark={option}'])
        page = capsys.readouterr().out
        assert ('Not counted: cudnn_benchmark=True' in page) == said
        assert ('env_cfg = dict(cudnn_benchmark=False)' in page) == said
        assert ('as it is' in page) != said


def test_what_the_run_needs_beside_its_steps(planning, capsys):
    """The answer mentions validation, and a missing package."""
    planning.peaks.update(none=1)
    pages = []
    for path, option in ((FRCNN, []), (FRCNN, ['--cfg-options', 'val_cfg=None']), (STOCK_T, [])):
        command.main(['plan', path, '--budget', '8GiB', '--size', '64x64', *option])
        pages.append(capsys.readouterr().out)
    said = 'Validation is not counted; sbp-mmdet rehearse runs a step of it'
    assert said in pages[0] and 'Validation' not in pages[1]
    assert 'Validation, which pastes masks into full-size images, is not counted;' in pages[2]
    assert "needs mmpretrain for mmpretrain.ConvNeXt, which is not installed. type='SBPConvNeXt'" in pages[2]
    assert 'mmpretrain' not in pages[0]
    assert 'num_classes' not in pages[0]
    few = ['train_dataloader.dataset.metainfo.classes=a,b,c', 'model.roi_head.bbox_head.num_classes=2']
    command.main(['plan', FRCNN, '--budget', '8GiB', '--size', '64x64', '--cfg-options', *few])
    assert 'model.roi_head.bbox_head: num_classes=2, but the training data have 3 classes' in capsys.readouterr().out


def test_images_without_boxes_have_none(planning, capsys, monkeypatch):
    planning.peaks.update(none=1)
    inputs = Inputs(2, 64, 64, False, False, 'as given', boxes=0)
    monkeypatch.setattr(command, 'find_training_inputs', lambda *args, **kwargs: inputs)
    command.main(['plan', FRCNN, '--budget', '8GiB'])
    assert '64 x 64 with 0 boxes each' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('usual', 'rare', 'said'),
    [
        ((64, 64), (64, 64), ''),
        ((32, 64), (64, 64), '; the median is 32 x 64'),
        ((32, 64), (64, 32), '; the median is 32 x 64'),
        ((32, 64), (48, 64), '; one batch in 1,000 reaches 48 x 64, the median is 32 x 64'),
    ],
)
def test_sizes_of_other_batches_are_said_where_they_differ(usual, rare, said, planning, capsys, monkeypatch):
    planning.peaks.update(none=1)
    inputs = Inputs(1, 64, 64, False, False, 'as given', boxes=1, usual=usual, rare=rare)
    monkeypatch.setattr(command, 'find_training_inputs', lambda *args, **kwargs: inputs)
    command.main(['plan', FRCNN, '--budget', '8GiB'])
    page = capsys.readouterr().out
    assert f'1 image of 64 x 64 with 1 box each (as given; boxes: of the annotations{said}). Each' in page


def test_warnings_that_nobody_can_act_upon_are_not_shown(planning, monkeypatch, recwarn):
    def measure(*args, **kwargs):
        warnings.warn('Default ``avg_non_ignore`` is False, if you would like to ignore', stacklevel=1)
        with autocast_rules():
            torch.ones(2).new_tensor(torch.ones(2))  # of mmdet's DETRs
        torch.ones(2).new_tensor(torch.ones(2))  # of the user's own code
        return _count_of_variant(GB, 0)

    monkeypatch.setattr(counts, 'measure_detector', measure)
    command.main(['plan', FRCNN, '--budget', '8GiB', '--size', '64x64', '--boxes', '1'])
    said = [one for one in recwarn if 'avg_non_ignore' in str(one.message) or 'copy construct' in str(one.message)]
    assert [one.filename for one in said] == [__file__]


def test_gaps_that_expandable_segments_close(planning, capsys, monkeypatch):
    """The config needs 5 GB, and 1.1 GB more with gaps, so one line in the environment makes it fit into 6 GB."""
    peaks = dict(none=4, exact=2)

    def measure(config, **case):
        name = config.custom_hooks[0]['preset'] if config.custom_hooks else 'none'
        return _count_of_variant(int(peaks.get(name, 20) * GB), 0, gaps=GB if name == 'none' else 0)

    monkeypatch.setattr(counts, 'measure_detector', measure)
    command.main(['plan', FRCNN, '--budget', '5.5GB', '--verbose'])
    page = capsys.readouterr().out
    assert 'fits into 5.12 GiB with exact' in page and 'reserved' in page.splitlines()[0]
    assert 'expandable_segments:True in the environment, the config as it is needs 4.66 GiB, which fits' in page
    assert 'the first variant that fits, or else the smallest; the rest is left out' in page
    assert page.splitlines()[1].split()[2:] == ['3.73', 'GiB', '7.45', 'GiB', '5.59', 'GiB', 'too', 'much']
    command.main(['plan', FRCNN, '--budget', '4.9GB'])
    page = capsys.readouterr().out
    assert 'expandable' not in page and 'reserved' not in page and 'is left out' not in page


def test_what_is_printed(planning, capsys, monkeypatch):
    planning.peaks.update(exact=5)
    command.main(['plan', FRCNN, '--budget', '8GiB'])
    page = capsys.readouterr().out
    assert 'fits into 8.00 GiB with exact. Train with this config:\n\n_base_ = ' in page and "preset='sbp'" not in page
    assert '2 images of 800 x 1333 with 60 boxes each (size: of the pipeline; sizes of images: COCO' in page
    assert '; boxes: of a crowded batch of COCO; the median is 800 x 1' in page and '1,000' not in page
    # A step may drop no image.
    assert dict(type='LeanHook', preset='exact', skip_dropped_images=False) in planning.hooks[2]
    given = ['--batch', '2', '--size', '800x1333', '--boxes', '60']  # otherwise each call would run the pipeline
    with pytest.raises(SystemExit) as stopped:
        command.main(['plan', FRCNN, *given, '--budget', '1GiB'])
    assert stopped.value.code == 1 and 'Nothing fits into 1.00 GiB' in (page := capsys.readouterr().out)
    assert '--adamw8bit' not in page  # it trains with SGD
    with pytest.raises(SystemExit, match='Nothing fits into 512 MiB: CUDA takes 956 MiB with any model.'):
        command.main(['plan', STOCK_T, *given, '--budget', '0.5GiB'])
    with pytest.raises(SystemExit):
        command.main(['plan', STOCK_T, *given, '--budget', '1GiB'])
    page = capsys.readouterr().out
    assert '--adamw8bit' in page and 'Nothing fits into 1.00 GiB, of which CUDA itself takes 956 MiB.' in page
    assert 'Each figure includes gaps between tensors, a margin of 8 %, and 956 MiB for CUDA.' in page
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: properties)
    command.main(['plan', FRCNN, *given])
    assert 'It fits into 80.00 GiB as it is.' in capsys.readouterr().out


def test_a_budget_below_the_optimizers_step_is_not_met_by_a_smaller_batch(planning, capsys):
    """4 GB, a margin of 10 % and 0.6 GB are 5 GB, or 4.66 GiB."""
    planning.peaks.update(update=4)
    given = ['--batch', '2', '--size', '800x1333', '--boxes', '60']
    alone = "Weights, gradients and the optimizer's step alone need 4.66 GiB, whatever the batch. Try "
    no_foreach = '--cfg-options optim_wrapper.optimizer.foreach=False or '

    def end_of_page(path, budget, *more):
        with pytest.raises(SystemExit):
            command.main(['plan', path, *given, '--budget', budget, *more])
        return capsys.readouterr().out.splitlines()[-1].partition(' takes ')[2].partition('. ')[2]

    assert end_of_page(FRCNN, '4GiB') == f'{alone}{no_foreach}a smaller model.'
    assert end_of_page(STOCK_T, '4GiB') == f'{alone}--adamw8bit or {no_foreach}a smaller model.'
    off = ['--cfg-options', 'optim_wrapper.optimizer.foreach=False']
    assert end_of_page(FRCNN, '4GiB', *off) == f'{alone}a smaller model.'
    assert end_of_page(FRCNN, '4.9GiB') == 'Try a smaller batch, smaller images, or a smaller model.'


@pytest.mark.parametrize(
    ('base', 'line', 'gradients'),
    [
        (FRCNN, "custom_hooks = [dict(type='LeanHook', preset='exact_min')]", 'exact'),
        (FRCNN, "custom_hooks = [dict(type='LeanHook', preset='int8')]", 'int8'),
        (FRCNN, 'model = dict(backbone=dict(with_cp=True))', 'exact'),
        (OURS, 'model = dict(backbone=dict(sbp_cfg=dict(keep_ratio=0.3)))', 'sbp, keep ratio 0.3'),
    ],
)
def test_a_config_with_a_preset_of_its_own_is_counted_as_it_is(planning, capsys, tmp_path, base, line, gradients):
    (tmp_path / 'child.py').write_text(f"_base_ = '{base}'\n{line}\n")
    command.main(['plan', str(tmp_path / 'child.py'), '--budget', '80GiB'])
    page = capsys.readouterr().out
    assert 'It fits into 80.00 GiB as it is.' in page and 'Add to' not in page
    assert re.search(rf'as it is +{gradients} ', page)
    (hooks,) = planning.hooks
    assert all(hook.get('skip_dropped_images', False) is False for hook in hooks)


def test_an_unknown_optimizer_is_named(tiny, capsys):
    """mmengine itself reports ``TypeError: None is not a callable object``."""
    options = ['--cfg-options', 'optim_wrapper.optimizer.type=Adamm']
    case = ['--size', '64x64', '--batch', '1', '--budget', '8GiB']
    for words in (['report', tiny], ['plan', tiny, *case]):
        with pytest.raises(SystemExit):
            command.main([*words, *options])
        said = capsys.readouterr().err
        assert re.search(r"tiny.py: optim_wrapper.optimizer.type='Adamm' is not registered; write .*AdamW", said)


@pytest.mark.parametrize(
    ('name', 'words', 'what'),
    [
        ('counts.measure_detector', ('plan', FRCNN, '--budget', '8GiB'), 'a training step cannot be run here'),
        ('report.build_model', ('report', FRCNN), 'its model cannot be built here'),
        ('verify.build_training', ('verify', FRCNN, '--size', '64x64'), 'its model cannot be verified here'),
    ],
)
def test_what_a_model_cannot_do_here_is_a_line(name, words, what, planning, monkeypatch, capsys):
    def measure(*args, **kwargs):
        raise KeyError('a kernel that only a GPU has')

    monkeypatch.setattr(f'sbp_mmdet.plan.{name}', measure)
    with pytest.raises(SystemExit) as stopped:
        command.main([*words])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert line.startswith(f'sbp-mmdet: error: {FRCNN}: {what}: KeyError: a kernel that only a GPU has (test_plan_')


TINY = """
_base_ = '{base}'
model = dict(
    backbone=dict(arch=dict(_delete_=True, depths=[1, 1, 2, 1], channels=[8, 16, 32, 64]), with_cp=True),
    neck=dict(in_channels=[8, 16, 32, 64]),
    roi_head=dict(bbox_head=dict(fc_out_channels=32)),
)
"""


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / 'tiny.py').write_text(TINY.format(base=OURS))
    return str(tmp_path / 'tiny.py')


def test_from_a_config_to_an_answer(tiny, capsys, monkeypatch):
    monkeypatch.setattr(planner, 'ORDER', ('exact_min',))
    case = ['plan', tiny, '--batch', '2', '--size', '128x160', '--boxes', '5', '--json', '--budget']
    command.main([*case, '8GiB'])
    fits = json.loads(capsys.readouterr().out)
    assert (fits['answer'], fits['lines']) == ('as it is', '') and fits['inputs']['width'] == 160
    (row,) = fits['rows']
    command.main([*case, f'{row["need"] / 1e3 - 100:.0f}kB'])
    results = json.loads(capsys.readouterr().out)
    assert results['rows'][0] == dict(row, fits=False)
    chosen = next(row for row in results['rows'] if row['variant'] == results['answer'])
    assert chosen['fits'] and chosen['need'] <= results['budget'] < row['need']
    name = results['answer'].split('+')[0]  # in a model so small mixed precision alone may be the answer
    assert (f"dict(type='LeanHook', preset='{name}')" in results['lines']) == (name != 'none')
    assert "model.setdefault('backbone', {}).update(sbp_cfg=None, with_cp=False)" in results['lines']


def test_what_a_config_or_a_preset_changes(tiny, capsys, tmp_path):
    command.main(['report', tiny, '--preset', 'exact'])
    page = capsys.readouterr().out
    assert 'backbone.stages.0.0' in page and 'exact, stores less' in page and 'unchanged' in page
    command.main(['report', tiny])  # the config's sbp_cfg
    page = capsys.readouterr().out
    assert "backbone: preset='sbp'" in page and 'thinned blocks by stage: (1, 1, 2, 0) of (1, 1, 2, 1)' in page
    assert 'neck' not in page
    hooked = tmp_path / 'hooked.py'
    hooked.write_text(f"_base_ = '{FRCNN}'\ncustom_hooks = [dict(type='LeanHook', preset='int8')]\n")
    command.main(['report', str(hooked)])
    page = capsys.readouterr().out
    assert "preset='int8'" in page and 'changes nothing' not in page
    command.main(['report', FRCNN])
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert 'no LeanHook and no sbp_cfg, so it changes nothing' in first and "preset='exact': " in second
    assert MMLogger.get_current_instance().level == logging.ERROR
