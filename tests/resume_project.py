"""A project whose training can be killed at a chosen place; a resumed run has to end like an uninterrupted one.

mmengine restores weights, optimiser, schedules, the iteration and the order of the images, but no random number
generator. So what draws from those (augmentation, proposal sampling) is switched off here; the SBP masks, and
stochastic depth by leaving out, are drawn from (seed, rank, iteration) and stay on.
"""

from pathlib import Path

import torch
from helpers import make_project

__all__ = ['make_resume_project', 'read_masks', 'read_weights']

EPOCHS = 3
CONFIG = """
_base_ = './tiny.py'
custom_imports = dict(imports=['sbp_mmdet', 'trouble'], allow_failed_imports=False)
custom_hooks = [dict(type='TroubleHook')]
model = dict(
    backbone=dict(
        drop_path_rate=0.5, sbp_cfg=dict(preset='sbp', sampler='random')
    ),
    train_cfg=dict(rpn=dict(sampler=dict(num=100000)), rcnn=dict(sampler=dict(num=100000))),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
train_cfg = dict(max_epochs={epochs})
val_dataloader = val_cfg = val_evaluator = None
randomness = dict(seed=3)
"""

# Environment variables name the place; iterations and epochs count from 1. With Slurm, RESTART is the number of
# requeues, so that each start can be killed at another place.
TROUBLE = '''
import hashlib
import os
import resource
import signal
import time
from pathlib import Path

from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper


def place(variable):
    return int(os.environ.get(f"{variable}_{os.environ.get('SLURM_RESTART_COUNT', 0)}", 0))


@HOOKS.register_module()
class TroubleHook(Hook):
    def before_train(self, runner):
        """Writes down the masks that the blocks of the third stage are given."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model

        def write(block, args):
            state = block._lean
            keep = state.draws.positions(state.layer, args[0].shape[-2:].numel()).keep
            digest = hashlib.sha1(keep.numpy().tobytes()).hexdigest()
            with open(Path(runner.work_dir) / 'masks.txt', 'a') as file:
                file.write(f'{runner.rank} {runner.iter} {digest}\\n')

        model.backbone.stages[2][0].register_forward_pre_hook(write)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == place('KILL_AFTER_ITERATION'):
            os.kill(os.getpid(), signal.SIGKILL)
        if runner.iter + 1 == place('HANG_AFTER_ITERATION'):
            (Path(runner.work_dir) / f"hanging-{runner.rank}-{os.environ.get('SLURM_RESTART_COUNT', 0)}").touch()
            time.sleep(600)

    def before_save_checkpoint(self, runner, checkpoint):
        """The kernel ends a process that writes more than the limit: in the middle of its write."""
        if checkpoint['meta']['epoch'] == place('KILL_WRITING_EPOCH'):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
'''


def make_resume_project(folder: Path, train: int = 8) -> str:
    """Write the project.

    Args:
        folder (Path): Folder to write to, which has to be in the ``PYTHONPATH`` of the training run.
        train (int): Number of training images, with two per batch. Default: 8.

    Returns:
        str: Name of the config in ``folder``.
    """
    make_project(folder, train=train)
    (folder / 'resume.py').write_text(CONFIG.format(epochs=EPOCHS))
    (folder / 'trouble.py').write_text(TROUBLE)
    return 'resume.py'


def read_masks(work_dir: Path) -> dict:
    """Return the digest of the mask by (rank, iteration), and assert that repeated iterations have the same one."""
    drawn = {}
    for line in (work_dir / 'masks.txt').read_text().splitlines():
        rank, step, digest = line.split()
        assert drawn.setdefault((int(rank), int(step)), digest) == digest
    return drawn


def read_weights(work_dir: Path) -> dict:
    """Return weights and optimizer state at the end of the training."""
    saved = torch.load(work_dir / f'epoch_{EPOCHS}.pth', weights_only=False, map_location='cpu')
    moments = {
        f'{index}.{name}': value
        for index, state in saved['optimizer']['state'].items()
        for name, value in state.items()
        if name != 'param_groups'
    }
    return saved['state_dict'] | moments
