"""The paper's table runs from end to end on a tiny set: launched by torchrun, killed, resumed, read and written."""

import copy
import json
import os
import shutil
import sys

import pytest
from helpers import RESEARCH, ROOT, make_dataset, run_forked
from mmdet.datasets import CocoDataset

from sbp_mmdet.plan.variants import load_config

import experiment  # isort: skip  (helpers puts research/ on the path)

COCO = experiment.read_experiment(RESEARCH / 'experiments/coco.py')
T, SBP_T, *_ = COCO.labels
KILL = """
import os, signal
from pathlib import Path
from mmdet.registry import HOOKS
from mmengine.hooks import Hook


@HOOKS.register_module()
class KillOnceHook(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        done = Path(runner.work_dir) / 'killed'
        if runner.rank == 0 and runner.epoch == 1 and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
# The tool, whose processes are forks: torchrun, with what the launch script would give to Python, and what it starts.
IN_FORKS = """
import os, subprocess, sys, types
import training_study, trainings
from helpers import ForkedProcess
try:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
except ImportError:  # torch 2.1
    from torch.distributed.elastic.multiprocessing import api as subprocess_handler

INTERPRETER = os.path.abspath('interpreter')


def run(words, stdout, env, **options):
    if words[0] != 'bash':
        return subprocess.run(words, stdout=stdout, env=env, **options)
    told = subprocess.run(words, env={**env, 'PYTHON': INTERPRETER}, check=True, capture_output=True, text=True).stdout
    given, _, variables = told.partition('\\0\\0')
    env = dict(one.split('=', 1) for one in variables.split('\\0') if one)
    process = ForkedProcess([sys.executable, *given.split('\\0')], os.getcwd(), env, stdout)
    return subprocess.CompletedProcess(words, process.wait())


def start(args, env, stdout, stderr, start_new_session=False):
    words = [word for word in args if word != '-u']
    return ForkedProcess(words, os.getcwd(), env, types.SimpleNamespace(fileno=lambda: 1), None, start_new_session)


trainings.subprocess = types.SimpleNamespace(**dict(vars(subprocess), run=run))
subprocess_handler.Popen = start
subprocess_handler.subprocess = types.SimpleNamespace(**dict(vars(subprocess), Popen=start))
training_study.main()
"""
INTERPRETER = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" ""\nenv -0\n'
WIDTHS = [
    *('model.neck.out_channels', 'model.rpn_head.in_channels', 'model.rpn_head.feat_channels'),
    *(f'model.roi_head.{kind}_roi_extractor.out_channels' for kind in ('bbox', 'mask')),
    *(f'model.roi_head.{kind}_head.in_channels' for kind in ('bbox', 'mask')),
    'model.roi_head.mask_head.conv_out_channels',
]
# The schedule has the parts of the real one: warm-up by steps, two drops by epochs, evaluation after each.
SMALL = {
    'model.backbone.arch': dict(_delete_=True, depths=[1, 1, 2, 1], channels=[8, 16, 32, 64]),
    'model.backbone.init_cfg': None,
    'model.neck.in_channels': [8, 16, 32, 64],
    **dict.fromkeys(WIDTHS, 16),
    'model.train_cfg.rpn_proposal.nms_pre': 50,
    'model.train_cfg.rpn_proposal.max_per_img': 20,
    'model.train_cfg.rcnn.sampler.num': 16,
    'model.roi_head.bbox_head.fc_out_channels': 32,
    'model.roi_head.mask_head.num_convs': 1,
    'model.test_cfg.rcnn.max_per_img': 10,
    'model.test_cfg.rcnn.score_thr': 0.0,  # it learns nothing in six steps, and mmdet gives no AP of no boxes
    'model.test_cfg.rpn.nms_pre': 50,
    'model.test_cfg.rpn.max_per_img': 20,
    'optim_wrapper.type': 'OptimWrapper',  # mmcv's CPU operators refuse bf16
    'train_cfg.max_epochs': 3,
    'param_scheduler.0.end': 2,
    'param_scheduler.1.milestones': [1, 2],
    'param_scheduler.1.end': 3,
    'default_hooks.logger.interval': 1,
    'custom_imports.imports': ['sbp_mmdet', 'killonce'],
}
PIPELINE = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]


def make_config(label, path):
    """Write the paper's config in a small size."""
    config = load_config(str(RESEARCH / 'experiments' / COCO.configs[label]))
    options = copy.deepcopy(SMALL)
    for split in ('train', 'val', 'test'):
        options[f'{split}_dataloader.num_workers'] = 0
        options[f'{split}_dataloader.persistent_workers'] = False
        options[f'{split}_dataloader.dataset.pipeline'] = PIPELINE
    if label == SBP_T:
        options['custom_hooks'] = [dict(type='KillOnceHook')]
    config.merge_from_dict(options)
    config.dump(path)


def make_coco(folder):
    """Write shapes as a data set with COCO's first classes, in the folder where COCO's config expects COCO."""
    make_dataset(folder / 'made', train=4, val=2, size=64)
    for split in ('train', 'val'):
        source = folder / f'made/annotations/instances_{split}.json'
        content = json.loads(source.read_text())
        content['categories'] = [dict(id=i, name=name) for i, name in enumerate(CocoDataset.METAINFO['classes'], 1)]
        target = folder / f'data/coco/annotations/instances_{split}2017.json'
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content))
        shutil.move(folder / f'made/images/{split}', folder / f'data/coco/{split}2017')


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp('rehearsal')
    make_coco(folder)
    sys.path.insert(0, str(folder))
    (folder / 'killonce.py').write_text(KILL)
    (folder / 'study.py').write_text(IN_FORKS)
    (folder / 'interpreter').write_text(INTERPRETER)
    (folder / 'interpreter').chmod(0o755)
    configs = {label: f'{i}.py' for i, label in enumerate((T, SBP_T))}
    text = f"_base_ = '{RESEARCH}/experiments/coco.py'\ngpus = 1\n"
    for key in ('compare', 'paper'):  # of these two
        own = {label: value for label, value in getattr(COCO, key).items() if label in configs}
        text += f'{key} = dict(_delete_=True, **{own})\n'
    (folder / 'coco.py').write_text(text + f'configs = dict(_delete_=True, **{configs})\n')
    for label, name in configs.items():
        make_config(label, folder / name)
    (folder / 'page.md').write_text('<!-- results: coco -->\n<!-- end -->\n')
    yield folder
    sys.path.remove(str(folder))


def run(project, *words):
    """Run the tool in a fork of this process. What it launches are forks, too."""
    return run_forked(
        project / 'study.py', 'coco.py', *words, cwd=project, seconds=600, PYTHONPATH=f'{project}{os.pathsep}{ROOT}'
    )


def read_result(project, label):
    return json.loads((project / f'work_dirs/coco/{label}-0/result.json').read_text())


def cut_last_evaluation(folder):
    """Leave a folder as a training leaves it that was killed in its last evaluation."""
    (folder / 'result.json').unlink()
    (scalars,) = folder.glob('*/vis_data/scalars.json')
    lines = scalars.read_text().splitlines(keepends=True)
    assert 'coco/bbox_mAP' in lines[-1] and '"step": 3' in lines[-1]
    scalars.write_text(''.join(lines[:-1]))


def test_torchrun(project):
    """The first call reports that the second training was killed; the next one resumes it, and evaluates the first."""
    first = run(project, '--labels', T, SBP_T)
    assert first.returncode == 1 and f'{SBP_T}, seed 0: a training failed' in first.stdout, first.stdout[-3000:]
    known = read_result(project, T)
    cut_last_evaluation(project / f'work_dirs/coco/{T}-0')
    second = run(project, '--labels', T, SBP_T)
    logs = {path: path.read_text() for path in project.glob('work_dirs/coco/*/log.txt')}
    assert second.returncode == 0, second.stdout[-3000:] + str([text[-2000:] for text in logs.values()])
    assert f'{SBP_T}' in second.stdout
    log = (project / f'work_dirs/coco/{SBP_T}-0/log.txt').read_text()
    assert 'resumed epoch: 1, iter: 2' in log and 'Distributed launcher: pytorch' in log
    for label in (T, SBP_T):
        result = read_result(project, label)
        assert [point['evaluated'] for point in result['curve']] == [1, 2, 3]
        assert [step for step, _ in result['loss']] == [*range(1, 7)]
        assert result['finished'] and 'box AP' in result['ap']
    again = read_result(project, T)
    assert again['loss'] == known['loss'] and again['curve'][:2] == known['curve'][:2]
    assert again['ap'] == pytest.approx(known['ap'], abs=1e-3)
    assert again['curve'][2]['step'] == known['curve'][2]['step']
    table = run(project, '--no-run', '--write', 'page.md')
    assert table.returncode == 0, table.stdout
    lines = [line.split('|')[1:-1] for line in (project / 'page.md').read_text().splitlines()]
    found = [
        [bool(cell.strip()) for cell in line[2:5]] for line in lines if len(line) > 2 and line[1].strip() == 'here'
    ]
    assert found == [[False, True, True]] * 2  # memory is not logged on a CPU
