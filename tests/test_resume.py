"""A training that was killed goes on as if it had not been.

mmengine restores weights, optimiser, schedules, the iteration and the order of the images, but no random number
generator. So what draws from those (augmentation, proposal sampling, stochastic depth) is switched off here; the SBP
masks are drawn from (seed, rank, iteration) and stay on.
"""

import importlib.metadata

import pytest
import torch
from helpers import TOOLS, make_project, run

# 4 iterations an epoch; the process kills itself in the second epoch, after the checkpoint of the first.
REPRODUCIBLE = """
_base_ = './tiny.py'
custom_imports = dict(imports=['sbp_mmdet', 'kill_hook'], allow_failed_imports=False)
custom_hooks = [dict(type='KillHook')]
model = dict(
    backbone=dict(sbp_cfg=dict(sampler='random', keep_ratio=0.5)),
    train_cfg=dict(rpn=dict(sampler=dict(num=100000)), rcnn=dict(sampler=dict(num=100000))),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = val_cfg = val_evaluator = None
randomness = dict(seed=3)
"""

KILL_HOOK = """
import os
import signal

from mmdet.registry import HOOKS
from mmengine.hooks import Hook


@HOOKS.register_module()
class KillHook(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == int(os.environ.get('KILL_AFTER_ITERATION', 0)):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(
    _version('mmengine') is not None and torch.__version__ >= '2.6',
    reason=f'mmengine {_version("mmengine")} cannot resume on torch {torch.__version__}: it does not tell torch.load '
    'that its own classes are safe; onedl-mmengine does',
)
def test_killed_and_resumed_run_ends_with_the_same_weights(tmp_path):
    make_project(tmp_path, train=8)
    (tmp_path / 'resume.py').write_text(REPRODUCIBLE)
    (tmp_path / 'kill_hook.py').write_text(KILL_HOOK)

    def train(work_dir, *options, **variables):
        command = ('python', TOOLS / 'train.py', 'resume.py', '--work-dir', work_dir, *options)
        return run(*command, cwd=tmp_path, check=False, PYTHONPATH=tmp_path, **variables)

    def weights(work_dir):
        saved = torch.load(tmp_path / work_dir / 'epoch_2.pth', weights_only=False, map_location='cpu')
        assert saved['meta']['iter'] == 8
        return saved['state_dict']

    whole = train('whole')
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = train('killed', KILL_AFTER_ITERATION=6)
    assert killed.returncode == -9
    assert not (tmp_path / 'killed/epoch_2.pth').exists() and (tmp_path / 'killed/epoch_1.pth').exists()
    resumed = train('killed', '--resume')
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    log = resumed.stdout + resumed.stderr
    assert 'resumed epoch: 1, iter: 4' in log and 'Epoch(train) [1]' not in log

    expected, found = weights('whole'), weights('killed')
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different
