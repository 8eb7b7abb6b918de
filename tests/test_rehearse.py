"""The rehearsal stops a run that would not fit, and restores bit for bit what it changes."""

import collections
import copy
import json
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_project
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox_overlaps
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from test_plan_sizes import coco, config_of

from sbp_mmdet.plan import rehearse
from sbp_mmdet.plan.command import main
from sbp_mmdet.plan.planner import CONTEXT, MARGIN, WORKSPACES, Row
from sbp_mmdet.plan.quiet import without_reading_of_files
from sbp_mmdet.plan.rehearse import DoesNotFit, build_largest_batch
from sbp_mmdet.plan.restored import restored_state

STATE = {}


@HOOKS.register_module(force=True)
class NoteState(Hook):
    """Hook that records the state at the first iteration and ends the run after it."""

    priority = 'LOWEST'

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        model = runner.model
        STATE.update(
            weights={name: value.clone() for name, value in model.state_dict().items()},
            gradients=[p.grad for p in model.parameters()],
            optimizer=copy.deepcopy(runner.optim_wrapper.state_dict()),
            numbers=(random.random(), np.random.rand(), torch.rand(1).item()),
            images=[sample.img_id for sample in data_batch['data_samples']],
        )

    def after_train_iter(self, runner, *args, **kwargs):
        STATE['after'] = {name: value.clone() for name, value in runner.model.state_dict().items()}
        raise KeyboardInterrupt


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp('project')
    return folder, make_project(folder)


def train_and_get_state(project, monkeypatch, *hooks):
    """Return the state at the first iteration of a run with these hooks."""
    folder, path = project
    monkeypatch.chdir(folder)
    config = Config.fromfile(path)
    config.update(work_dir=str(folder / 'run'), randomness=dict(seed=3), load_from=None)
    config.model.backbone.update(drop_path_rate=0.5, sbp_cfg=dict(preset='sbp'))
    config.custom_hooks = [*hooks, dict(type='NoteState')]
    STATE.clear()
    with pytest.raises(KeyboardInterrupt):
        Runner.from_cfg(config).train()
    return dict(STATE)


def test_the_run_goes_on_as_if_nothing_had_been(project, monkeypatch):
    without = train_and_get_state(project, monkeypatch)
    rehearsed = train_and_get_state(project, monkeypatch, dict(type='RehearseHook', budget='8GiB'))
    for key in ('numbers', 'images', 'gradients', 'optimizer'):
        assert rehearsed[key] == without[key], key
    for key in ('weights', 'after'):  # the second with what the step drew
        assert rehearsed[key].keys() == without[key].keys()
        assert all(torch.equal(rehearsed[key][name], value) for name, value in without[key].items()), key


def test_a_run_that_would_not_fit_is_stopped(project, monkeypatch):
    folder, path = project
    monkeypatch.chdir(folder)
    config = Config.fromfile(path)
    config.update(work_dir=str(folder / 'run'))
    config.custom_hooks = [dict(type='RehearseHook', budget='5MB')]
    runner = Runner.from_cfg(config)
    before = copy.deepcopy(runner.model.state_dict())
    asked = []

    def rows(config, budget, case):
        asked.append((budget, case))
        return [Row('none', 'exact', 9, False), Row('exact', 'exact', 8, True)]

    monkeypatch.setattr('sbp_mmdet.plan.counts.count_variants', rows)
    with pytest.raises(DoesNotFit, match=r'needs \d+ MiB; 5 MiB may be used.*exact fits') as caught:
        runner.train()
    assert "dict(type='LeanHook', preset='exact')" in str(caught.value)
    assert asked == [(5 * 10**6, build_largest_batch(runner)[1])]
    # The runner initializes weights before it: those of normalization tell that no step was taken.
    after = runner.model.state_dict()
    assert before.keys() == after.keys() and all(p.grad is None for p in runner.model.parameters())
    assert not runner.optim_wrapper.optimizer.state and runner.iter == 0


def test_heads_get_what_a_trained_detector_finds(project, monkeypatch):
    """Eight proposals lie near each box although the detector is untrained; afterwards its own proposals are used
    again."""
    folder, path = project
    monkeypatch.chdir(folder)
    config = Config.fromfile(path)
    config.update(work_dir=str(folder / 'run'), load_from=None)
    config.custom_hooks = [dict(type='RehearseHook'), dict(type='NoteState')]
    config.model.train_cfg.rpn_proposal.update(nms_pre=400, max_per_img=400)
    runner, near = Runner.from_cfg(config), []
    loss = runner.model.roi_head.loss

    def note(x, proposals, samples):
        for found, sample in zip(proposals, samples, strict=True):
            truth = sample.gt_instances.bboxes
            truth = getattr(truth, 'tensor', truth)
            overlaps = bbox_overlaps(found.bboxes, truth)
            near.append((overlaps.amax(1) > 0.5).sum() / len(truth))
        return loss(x, proposals, samples)

    runner.model.roi_head.loss = note
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    assert len(near) == 4 and min(near[:2]) >= 6 > 3 >= max(near[2:]), near
    assert 'loss_and_predict' not in vars(runner.model.rpn_head)


def test_margins_and_gaps_are_those_of_the_planner():
    """A layer of 4.004 MB and a map of 4 MiB share a segment of 20 MiB; the bias has one of 2 MiB."""
    layer, optimizer = torch.nn.Linear(1000, 1000), SimpleNamespace(param_groups=[], state={})
    runner = SimpleNamespace(optim_wrapper=SimpleNamespace(optimizer=optimizer), hooks=[])
    need = rehearse._measure_needed_bytes(runner, layer, lambda: torch.ones(2**20))
    assert need == int(22 * 2**20 + (4_004_000 + 2**22) * MARGIN + WORKSPACES + CONTEXT)
    more = rehearse._measure_needed_bytes(runner, layer, lambda: torch.ones(2**20), buckets=10**6)
    assert more - need == pytest.approx(10**6 * (1 + MARGIN), abs=1)


def test_averaged_copies_are_part_of_a_rehearsal(project, monkeypatch):
    """A rehearsal with EMA needs more memory, by the averaged copy of the model."""
    folder, path = project
    monkeypatch.chdir(folder)
    monkeypatch.setattr('sbp_mmdet.plan.planner.count_needed_bytes', lambda row, **options: row['peak'])
    peaks, most = [], rehearse._measure_training_peak
    monkeypatch.setattr(rehearse, '_measure_training_peak', lambda *args: peaks.append(most(*args)) or peaks[-1])
    for hooks in ([], [dict(type='EMAHook')]):
        config = Config.fromfile(path)
        config.update(work_dir=str(folder / 'run'), load_from=None)
        config.custom_hooks = [*hooks, dict(type='RehearseHook', budget='8GiB'), dict(type='NoteState')]
        runner = Runner.from_cfg(config)
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    weights = sum(t.nbytes for t in (*runner.model.parameters(), *runner.model.buffers()))
    assert peaks[1] - peaks[0] == pytest.approx(weights, rel=1e-2)


def test_a_budget_is_said_in_few_digits(project, monkeypatch):
    """A batch that needs a few bytes more than the rounded budget is accepted."""
    folder, path = project
    monkeypatch.chdir(folder)
    for peak, ends in ((8_004_000, KeyboardInterrupt), (8_012_000, DoesNotFit)):
        monkeypatch.setattr(rehearse, '_measure_training_peak', lambda *args, peak=peak: peak)
        monkeypatch.setattr(rehearse, 'build_largest_validation', lambda runner: None)
        monkeypatch.setattr(rehearse, '_advise', lambda *args: '')
        config = Config.fromfile(path)
        config.update(work_dir=str(folder / 'run'), load_from=None)
        config.custom_hooks = [dict(type='RehearseHook', budget='8MB'), dict(type='NoteState')]
        with pytest.raises(ends):
            Runner.from_cfg(config).train()


def test_validation_is_rehearsed_too(project, monkeypatch):
    """The validation step has the largest possible number of detections; thresholds and modes are restored."""
    folder, path = project
    monkeypatch.chdir(folder)
    config = Config.fromfile(path)
    config.update(work_dir=str(folder / 'run'), load_from=None)
    config.custom_hooks = [dict(type='RehearseHook', budget='8GiB')]
    runner = Runner.from_cfg(config)
    thresholds, peaks = [], []
    peak = rehearse.measure_validation_peak
    step = type(runner.model).val_step

    def val_step(self, data):
        thresholds.append((self.roi_head.test_cfg.score_thr, self.training))
        return step(self, data)

    def too_much(runner, batch):
        peaks.append(peak(runner, batch))
        return 9 * 2**30

    monkeypatch.setattr(type(runner.model), 'val_step', val_step)
    monkeypatch.setattr(rehearse, 'measure_validation_peak', too_much)
    with pytest.raises(DoesNotFit, match=r'validation on 1 image of \d+ x \d+ needs 9.00 GiB; 8.00 GiB may be used'):
        runner.train()
    assert thresholds == [(0.0, False)] and runner.model.training
    assert runner.model.roi_head.test_cfg.score_thr == config.model.test_cfg.rcnn.score_thr > 0
    assert peaks[0] > sum(p.nbytes for p in runner.model.parameters())


def test_the_largest_image_of_a_validation_may_be_so_behind_the_pipeline(tmp_path):
    """An elongated image with few pixels is enlarged until its shorter side is long enough."""
    folder, load = coco(tmp_path, [(64, 64), (20, 100), (60, 64)]), dict(type='LoadImageFromFile')
    for steps, wanted in {'shortest': ['64 x 64', '20 x 100'], 'all alike': ['64 x 64']}.items():
        resize = (
            dict(type='ResizeShortestEdge', scale=40) if steps == 'shortest' else dict(type='Resize', scale=(32, 32))
        )
        dataset = config_of(folder, [resize], load=[load]).train_dataloader.dataset
        loader = Runner.build_dataloader(
            dict(
                batch_size=1, num_workers=0, dataset=dict(dataset, test_mode=True), sampler=dict(type='DefaultSampler')
            )
        )
        runner = SimpleNamespace(_val_loop=SimpleNamespace(dataloader=loader), cfg=Config(dict(model=dict())))
        found = rehearse.build_largest_validation(runner)
        assert [called for _, called in found] == [f'1 image of {size}' for size in wanted]
    assert found[0][0]['inputs'][0].shape == (3, 32, 32)


def test_the_largest_batch_is_that_of_the_annotations(project, monkeypatch):
    folder, path = project
    monkeypatch.chdir(folder)
    config = Config.fromfile(path)
    config.update(work_dir=str(folder / 'run'))
    runner = Runner.from_cfg(config)
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    batch, case = build_largest_batch(runner)
    file = folder / config.train_dataloader.dataset.data_root / config.train_dataloader.dataset.ann_file
    results = json.loads(file.read_text())
    numbers = sorted(sum(a['image_id'] == i['id'] for a in results['annotations']) for i in results['images'])
    assert case['boxes'] == -(-sum(numbers[-2:]) // 2) and case['batch'] == 2
    assert {len(sample.gt_instances) for sample in batch['data_samples']} == {case['boxes']}


def test_each_branch_of_a_batch_is_described():
    def sample(boxes):
        return DetDataSample(gt_instances=InstanceData(bboxes=torch.zeros(boxes, 4)))

    inputs = dict(sup=[torch.zeros(3, 64, 96)], student=[torch.zeros(3, 128, 64), torch.zeros(3, 96, 80)])
    batch = dict(inputs=inputs, data_samples=dict(sup=[sample(5)], student=[sample(0), DetDataSample()]))
    assert rehearse._describe_batch(batch, {}) == (
        'sup: 1 image of 64 x 96 with 5 boxes each; student: 2 images of 128 x 80 with 0 boxes each'
    )
    shape = dict(batch=1, height=64, width=96, boxes=1, channels=3, usual=None)
    assert rehearse._describe_batch(dict(inputs=inputs['sup']), shape) == '1 image of 64 x 96 with 1 box each'


def test_a_training_with_a_teacher_gets_advice_that_needs_no_count(monkeypatch):
    monkeypatch.setattr('sbp_mmdet.plan.counts.count_variants', lambda *args: pytest.fail('it was counted'))
    runner = SimpleNamespace(cfg=Config(dict(model=dict(type='SoftTeacher', detector=dict(type='FasterRCNN')))))
    assert "preset='exact_min'" in rehearse._advise(runner, 2**30, {})


def test_the_smallest_variant_is_named_where_none_fits(monkeypatch):
    rows = [Row(name, 'exact', need * 2**30, False) for name, need in (('none', 9), ('exact_min', 3), ('int8', 4))]
    monkeypatch.setattr('sbp_mmdet.plan.counts.count_variants', lambda *args: rows)
    said = rehearse._advise(SimpleNamespace(cfg=Config(dict(model=dict(type='FasterRCNN')))), 2**30, {})
    assert 'no variant fits; the smallest, exact_min, needs 3.00 GiB' in said


class Helper:
    """An object of the user's class."""

    steps = 0


def test_what_a_step_changes_is_put_back(monkeypatch):
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.history, self._size, self.norm = [1], None, torch.nn.BatchNorm1d(2)
            self.seen, self.stats, self.last = {1}, {'steps': [0]}, collections.deque([1], maxlen=3)
            self.centre, self.array = torch.zeros(2), np.zeros(2)
            self.helper, self.rng = Helper(), np.random.default_rng(0)

    model, hub = Counts(), MessageHub.get_instance('restored')
    monkeypatch.setattr(MessageHub, 'get_current_instance', lambda: hub)
    hub.update_scalar('mine', 1.0)
    history, drawn = model.history, np.random.default_rng(0).random()
    weight = model.norm.weight.detach().clone()
    with restored_state(model):
        model.history.append(2), model.seen.add(2), model.stats['steps'].append(1), model.last.append(2)
        model.centre += 1
        model.array += 1
        model.helper.steps += 1
        model.fresh = model.stats['fresh'] = 1
        model.norm.weight.data += 1
        model.rng.random()
        hub.update_scalar('mine', 2.0), hub.update_scalar('other', 2.0), hub.update_info('steps', 1)
        model._size = (3, 4)
        model.norm(torch.randn(5, 2)).sum().backward()
        torch.rand(3)
    assert model.history is history and (model.seen, model.stats, [*model.last]) == ({1}, {'steps': [0]}, [1])
    assert not model.centre.any() and not model.array.any() and model.helper.steps == 0 and not hasattr(model, 'fresh')
    assert torch.equal(model.norm.weight, weight) and model.rng.random() == drawn
    assert [*hub.log_scalars] == ['mine'] and len(hub.get_scalar('mine').data[0]) == 1 and not hub.runtime_info
    assert (model.history, model._size) == ([1], None) and model.norm.num_batches_tracked == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        (
            "train_dataloader = dict(dataset=dict(ann_file='gone.json'))",
            r"train_dataloader.dataset.ann_file='gone.json' \(\S+/gone.json\) does not exist; correct it",
        ),
        (
            "train_dataloader = dict(dataset=dict(pipeline=[dict(type='Gone')]))",
            "train_dataloader.dataset.pipeline.0.type='Gone' is not registered",
        ),
        ("model = dict(backbone=dict(type='Gone'))", "model.backbone.type='Gone' is not registered"),
        (
            "load_from = 'gone.pth'\nval_cfg = val_dataloader = val_evaluator = None",
            "load_from='gone.pth' does not exist; correct it",
        ),
        (
            "val_dataloader = dict(dataset=dict(ann_file='gone.json'))",
            r"val_dataloader.dataset.ann_file='gone.json' \(\S+/gone.json\) does not exist; correct it",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_a_line(project, monkeypatch, line, said, capfd):
    folder, path = project
    monkeypatch.chdir(folder)
    (folder / 'wrong.py').write_text(f"_base_ = './{path.name}'\n{line}\n")
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(['rehearse', 'wrong.py', '--budget', '8GiB'])
    output = capfd.readouterr()
    assert stopped.value.code == 2 and output.out == ''
    assert re.match(f'sbp-mmdet: error: wrong.py: {said}', output.err.splitlines()[-1]), output.err


def test_the_command(project, monkeypatch, capfd):
    """The answer is one line, without the output of mmengine's runner."""
    folder, path = project
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as caught:
        main(['rehearse', str(path), '--budget', '8GiB'])
    assert caught.value.code == 0
    said = capfd.readouterr()
    (line,) = said.out.splitlines()
    assert 'boxes each, needs' in line and ': it fits' in line and 'validation on 1 image' in line
    assert 'Hook' not in (said.out + said.err).replace('RehearseHook', '')


def test_only_lines_of_pycocotools_are_dropped(capsys):
    encoding = sys.stdout.encoding
    with without_reading_of_files():
        print('loading annotations into memory...\nDone (t=0.01s)')
        print('creating index...', 'of mine')
        print('index created!')
        print('Loads checkpoint by local backend from path: a.pth')
        print('not ended', end='')
        assert sys.stdout.encoding == encoding and not sys.stdout.isatty()
        sys.stdout.flush()
        print(', and more', end='')
    assert capsys.readouterr().out == 'creating index... of mine\nnot ended, and more'
