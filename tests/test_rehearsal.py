"""The paper's table from end to end on a tiny set: torchrun and Slurm, killed and resumed, read, checked, written."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, TOOLS, environment, make_set
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from test_slurm import PROGRAMS

from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.study.experiments import read_experiment
from sbp_mmdet.study.paper_table import differences, metafile, paper_markdown

COCO = read_experiment(ROOT / 'experiments/coco.py')
STUDY, TABLE = (TOOLS / f'analysis_tools/{name}.py' for name in ('training_study', 'results_table'))
T, SBP_T, B, SBP_B = COCO.labels
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
# The schedule has the parts of the real one: warm-up by steps, two drops by epochs, evaluation after each.
SMALL = {
    'model.backbone.arch': dict(_delete_=True, depths=[1, 1, 2, 1], channels=[8, 16, 32, 64]),
    'model.backbone.init_cfg': None,
    'model.neck.in_channels': [8, 16, 32, 64],
    'model.train_cfg.rpn_proposal.nms_pre': 50,
    'model.train_cfg.rpn_proposal.max_per_img': 20,
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
    """The real config, small."""
    config = load_config(str(ROOT / 'experiments' / COCO.configs[label]))
    options = copy.deepcopy(SMALL)
    heads = config.model.roi_head.bbox_head
    for i in range(len(heads)) if isinstance(heads, list) else ():
        options[f'model.roi_head.bbox_head.{i}.norm_cfg'] = dict(type='BN')  # SyncBN refuses CPU ranks
        options[f'model.roi_head.bbox_head.{i}.fc_out_channels'] = 32
    for split in ('train', 'val', 'test'):
        options[f'{split}_dataloader.num_workers'] = 0
        options[f'{split}_dataloader.persistent_workers'] = False
        options[f'{split}_dataloader.dataset.pipeline'] = PIPELINE
    if label in (SBP_T, SBP_B):
        options['custom_hooks'] = [dict(type='KillOnceHook')]
    config.merge_from_dict(options)
    config.dump(path)


def make_coco(folder):
    """Shapes that are called COCO's first classes, where COCO's config looks for COCO."""
    make_set(folder / 'made', train=8, val=2, size=64)
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
    configs = {label: f'{i}.py' for i, label in enumerate(COCO.labels)}
    (folder / 'coco.py').write_text(f"_base_ = '{ROOT}/experiments/coco.py'\nconfigs = {configs}\ngpus = 2\n")
    for label, name in configs.items():
        make_config(label, folder / name)
    for page in ('README.md', 'configs/sbp_convnext/README.md', 'configs/sbp_convnext/metafile.yml'):
        target = folder / 'pages' / page
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, target)
    yield folder
    sys.path.remove(str(folder))


def run(project, tool, *args, **variables):
    command = [sys.executable, tool, 'coco.py', *map(str, args)]
    variables = environment(PYTHONPATH=f'{project}{os.pathsep}{ROOT}', **variables)
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, timeout=600)


def ends_after_one_kill(project, labels, *args, **variables):
    """The first call ends with the training that was killed, the second one resumes it."""
    first = run(project, STUDY, '--labels', *labels, *args, **variables)
    assert first.returncode == 1 and f'{labels[1]}, seed 0: a training failed' in first.stderr, first.stderr[-3000:]
    second = run(project, STUDY, '--labels', *labels, *args, **variables)
    logs = {path: path.read_text() for path in project.glob('work_dirs/coco/*/log.txt')}
    assert second.returncode == 0, second.stderr[-3000:] + str([text[-2000:] for text in logs.values()])
    log = (project / f'work_dirs/coco/{labels[1]}-0/log.txt').read_text()
    assert 'resumed epoch: 1, iter: 2' in log and 'GPU number: 2' in log
    return second


def evaluates_what_ended(project, name):
    """A training that was killed after its last checkpoint, in its last evaluation, is evaluated when it is resumed."""
    folder = project / 'work_dirs/coco' / name
    known = json.loads((folder / 'result.json').read_text())
    (folder / 'result.json').unlink()
    (scalars,) = folder.glob('*/vis_data/scalars.json')
    lines = scalars.read_text().splitlines(keepends=True)
    assert 'coco/bbox_mAP' in lines[-1] and '"step": 3' in lines[-1]
    scalars.write_text(''.join(lines[:-1]))
    done = run(project, STUDY, '--labels', name.rpartition('-')[0])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / 'result.json').read_text())
    assert found['loss'] == known['loss'] and found['curve'][:2] == known['curve'][:2]
    assert found['ap'] == pytest.approx(known['ap'], abs=1e-3)
    assert found['curve'][2]['step'] == known['curve'][2]['step']


def test_torchrun(project):
    done = ends_after_one_kill(project, [T, SBP_T])
    assert f'{SBP_T}' in done.stdout
    for label in (T, SBP_T):
        result = json.loads((project / f'work_dirs/coco/{label}-0/result.json').read_text())
        assert [point['evaluated'] for point in result['curve']] == [1, 2, 3]
        assert [step for step, _ in result['loss']] == [1, 2, 3, 4, 5, 6]
        assert result['finished'] and result['seconds'] > 0 and 'box AP' in result['ap']
    evaluates_what_ended(project, f'{T}-0')
    # Half of the table is measured, the rest stays empty.
    page = project / 'pages/README.md'
    table = run(project, TABLE, '--write', page)
    assert table.returncode == 0, table.stderr
    lines = [line.split('|')[1:-1] for line in page.read_text().splitlines() if 'Mask R-CNN, ' in line and '|' in line]
    assert [[bool(cell.strip()) for cell in line[1:]] for line in lines] == [
        [True, False, *measured] for measured in ([True] * 4, [True] * 4, [True, False] * 2, [True, False] * 2)
    ]  # memory is not logged on a CPU


@pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason='no Slurm here; on Debian: slurm-wlm munge')
def test_slurm_fills_the_table(project):
    script = ROOT / 'tests/slurm_cluster.sh'
    subprocess.run(['bash', script, 'up', project / 'cluster', '1'], check=True, env=environment())
    variables = dict(SLURM_CONF=project / 'cluster/slurm.conf', MASTER_ADDR='127.0.0.1', CPUS_PER_TASK=1)
    try:
        ends_after_one_kill(project, [B, SBP_B], '--slurm', 'test', '--jobs', '2', **variables)
    finally:
        subprocess.run(['bash', script, 'down', project / 'cluster'], check=True, env=environment())
    pages = [project / 'pages' / name for name in ('README.md', 'configs/sbp_convnext/README.md')]
    metafile = project / 'pages/configs/sbp_convnext/metafile.yml'
    done = run(project, TABLE, '--write', *pages, metafile, '--json', project / 'out.json')
    assert done.returncode == 0, done.stderr
    assert set(json.loads((project / 'out.json').read_text())['measured']) >= {B, SBP_B}
    lines = [line.split('|')[1:-1] for line in pages[1].read_text().splitlines() if '| difference |' in line]
    assert len(lines) >= 2 and all(float(line[3]) < -30 for line in lines)  # tiny detectors against the paper's
    assert metafile.read_text().count('Source of Results: this repository') >= 2


def trained(project, folder, config, scalars, gpus=2):
    """A work directory as mmengine leaves it."""
    (folder / 'now/vis_data').mkdir(parents=True)
    config.dump(folder / 'now/vis_data/config.py')
    (folder / 'now/now.log').write_text(f'2026/11/21 12:00:00 - x\n    GPU number: {gpus}\n')
    (folder / 'now/vis_data/scalars.json').write_text('\n'.join(map(json.dumps, scalars)))
    return folder


AP = [dict(iter=6, loss=1.0, time=0.5, memory=2048), {'step': 3, 'coco/bbox_mAP': 0.4, 'coco/segm_mAP': 0.3}]


@pytest.mark.parametrize(
    ('options', 'gpus', 'scalars', 'message'),
    [
        ({}, 2, AP[:1], 'has no AP'),
        ({'train_cfg.max_epochs': 2}, 2, AP, 'schedule.max_epochs is 2, not 3'),
        (
            {'val_dataloader.dataset.ann_file': 'x/mine.json'},
            2,
            AP,
            "evaluation.ann_file is 'mine.json', not 'instances_",
        ),
        ({'train_dataloader.dataset.ann_file': 'mine.json'}, 2, AP, "training data.ann_file is 'mine.json'"),
        ({}, 8, AP, 'images of a step is 16, not 4'),
        ({'load_from': '/some/where/weights.pth'}, 2, AP, "weights.load_from is 'weights.pth', not None"),
        ({'model.backbone.sbp_cfg': dict(keep_ratio=0.25)}, 2, AP, 'SBP is'),
        ({'custom_hooks': [dict(type='SBPHook', keep_ratio=0.5)]}, 2, AP, 'SBP is'),
        (
            {'custom_hooks': [dict(type='SBPModulesHook', modules=['neck'])]},
            2,
            AP,
            "custom_hooks is [{'modules': ['neck'], 'type'",
        ),
        ({'custom_hooks': [dict(type='EMAHook')]}, 2, AP, "custom_hooks is [{'type': 'EMAHook'}], not []"),
        ({'custom_hooks': [dict(type='TheirOwnHook')]}, 2, AP, "custom_hooks is [{'type': 'TheirOwnHook'}], not []"),
        ({'train_dataloader.dataset.indices': 100}, 2, AP, 'training data.indices is 100, not None'),
        ({'model.neck.out_channels': 128}, 2, AP, 'model.neck.out_channels is 128, not 256'),
        ({'model.backbone.arch': 'tiny'}, 2, AP, "backbone.arch is 'tiny', not "),
    ],
    ids=str,
)
def test_what_is_not_equal_is_named(project, tmp_path, options, gpus, scalars, message):
    config = Config.fromfile(project / '0.py')
    config.merge_from_dict(options)
    done = run(project, TABLE, '--log', f'{T}={trained(project, tmp_path / "x", config, scalars, gpus)}')
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_logs_of_somebody_else(project, tmp_path):
    """Accumulated over two steps on half of the GPUs, in another folder, with a faster way to the same gradients."""
    config = Config.fromfile(project / '1.py')
    config.merge_from_dict(
        {
            'optim_wrapper.accumulative_counts': 2,
            'model.backbone.sbp_cfg': dict(_delete_=True, recompute=True, sampler='grid'),  # the rest is the default
            'custom_hooks': [
                *config.custom_hooks,
                dict(type='CheckpointModulesHook', modules=['roi_head.mask_head']),
            ],
            'val_dataloader.dataset.ann_file': 'elsewhere/instances_val2017.json',
        }
    )
    folder = trained(project, tmp_path / 'x', config, AP, gpus=1)
    done = run(project, TABLE, '--work-dir', tmp_path / 'none', '--log', f'{SBP_T}={folder}')
    assert done.returncode == 0, done.stderr
    (tmp_path / f'none/{T}-0').mkdir(parents=True)
    (tmp_path / f'none/{T}-0/config.py').touch()
    (tmp_path / f'none/{T}-0/log.txt').touch()  # a job that waits in the queue
    done = run(project, TABLE, '--work-dir', tmp_path / 'none', '--log', f'{SBP_T}={folder}')
    assert done.returncode == 0 and f'{T}-0 has not started' in done.stdout, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ['here', '2.0', '40.0', '30.0', '0.50'] in lines and ['difference', '-3.9', '-5.5', '-11.1'] in lines


def test_bad_input_of_the_table(project, tmp_path):
    for args, message in (
        (('--log', 'x'), 'must be LABEL=FOLDER'),
        (('--log', f'{T}=nowhere'), 'must be LABEL=FOLDER'),
        (('--write', project / '0.py'), 'has no marker'),
    ):
        done = run(project, TABLE, *args)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_differences():
    assert [*differences(dict(a=1, b=[1, dict(c='x/y')]), dict(a=2, b=[1, dict(c='z/y')]))] == ['a is 1, not 2']
    assert [*differences([1], [1, 2], 'a')] == ['a is [1], not [1, 2]']
    assert [*differences(None, dict(a=1), 'x')] == ["x is None, not {'a': 1}"]


def test_pages_of_the_repository_are_what_the_tool_writes():
    found = ROOT / 'docs/results/coco.json'
    measured = json.loads(found.read_text())['measured'] if found.exists() else {}
    for page, short in (('README.md', True), ('configs/sbp_convnext/README.md', False)):
        path = ROOT / page
        assert paper_markdown(COCO, measured, path.parent, short) in path.read_text()
    folder = ROOT / 'configs/sbp_convnext'
    assert metafile(COCO, measured, folder) in (folder / 'metafile.yml').read_text()
