"""SBPHook in the stock Mask R-CNN of Swin-T, by mmdet's own train.py, on photographs: it learns, is killed, goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mmdet
import pytest
import torch
from helpers import ROOT, environment, run
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from sbp_mmdet import apply_sbp

DATA = Path(os.environ.get('FRUITS_NUTS', ROOT.parent / 'shared/data/fruits_nuts')).resolve()
TRAIN = Path(mmdet.__file__).parent / '.mim/tools/train.py'
EPOCHS, EACH = 4, 9  # 18 photographs, 2 at a time

# The stock config of a narrower Swin on small images: the two lines of SBP are the last ones.
CONFIG = """
_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
model = dict(
    backbone=dict(
        embed_dims=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4], init_cfg=None, convert_weights=False
    ),
    neck=dict(in_channels=[16, 32, 64, 128]),
    roi_head=dict(
        bbox_head=dict(num_classes=3, fc_out_channels=64),
        mask_head=dict(num_classes=3, num_convs=1, conv_out_channels=32),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre=100, max_per_img=50), rcnn=dict(sampler=dict(num=32))),
)
metainfo = dict(classes=('date', 'fig', 'hazelnut'))
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(128, 96)),
    dict(type='PackDetInputs'),
]
dataset = dict(
    data_root={data!r}, ann_file='trainval.json', data_prefix=dict(img='images/'), metainfo=metainfo, pipeline=pipeline
)
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False, dataset=dataset)
train_cfg = dict(max_epochs={epochs}, val_interval=100)
val_cfg = val_dataloader = val_evaluator = test_cfg = test_dataloader = test_evaluator = None
param_scheduler = []
optim_wrapper = dict(optimizer=dict(lr=1e-3))
default_hooks = dict(logger=dict(interval=1))
randomness = dict(seed=1)

custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
custom_hooks = [dict(type='SBPHook', keep_ratio=0.5, recompute=True)]
"""


def start(folder, *options):
    command = [sys.executable, TRAIN, 'swin.py', '--work-dir', 'run', *options]
    variables = environment(PYTHONPATH=ROOT)
    with (folder / 'log').open('a') as log:
        return subprocess.Popen(list(map(str, command)), cwd=folder, env=variables, stdout=log, stderr=log)


@pytest.mark.skipif(not (DATA / 'trainval.json').exists(), reason='needs the photographs, see FRUITS_NUTS')
@pytest.mark.skipif(not TRAIN.exists(), reason='mmdet was installed without its tools')
def test_training(tmp_path):
    (tmp_path / 'swin.py').write_text(CONFIG.format(data=f'{DATA}/', epochs=EPOCHS))
    killed = start(tmp_path)
    deadline = time.monotonic() + 250
    while not (tmp_path / 'run/epoch_2.pth').exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)  # into the third epoch
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, (tmp_path / 'log').read_text()[-3000:]
    assert start(tmp_path, '--resume').wait(300) == 0, (tmp_path / 'log').read_text()[-3000:]
    log = (tmp_path / 'log').read_text()
    assert 'resumed epoch: 2, iter: 18' in log and 'SBPHook: 13 layers changed' in log
    rows = [
        json.loads(line)
        for path in sorted((tmp_path / 'run').glob('*/vis_data/*.json'))
        for line in path.read_text().splitlines()
        if path.stem.isdigit() or path.stem.count('_') == 1
    ]
    losses = {row['step']: row['loss'] for row in rows if 'loss' in row}
    assert sorted(losses) == list(range(1, EPOCHS * EACH + 1))
    first, last = (sum(losses[i] for i in steps) / EACH for steps in (range(1, EACH + 1), range(28, 37)))
    assert last < 0.9 * first
    assert_stock(tmp_path)


def assert_stock(folder, epoch=EPOCHS):
    """The checkpoint is the stock model's, and puts out the same in it as in a model that was changed."""
    init_default_scope('mmdet')
    config = Config.fromfile(folder / 'swin.py')
    state = torch.load(folder / f'run/epoch_{epoch}.pth', map_location='cpu', weights_only=False)['state_dict']
    x, outs = torch.randn(1, 3, 96, 128), []
    for change in (False, True):
        model = MODELS.build(config.model)
        if change:
            apply_sbp(model, dict(keep_ratio=0.5))
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            outs.append(model.backbone(x))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.skipif(not (DATA / 'trainval.json').exists(), reason='needs the photographs, see FRUITS_NUTS')
def test_two_ranks_with_averaged_weights_and_checkpoints(tmp_path):
    """gloo through dist_train.sh; EMA's copy is made behind the hook, and every block runs again."""
    more = "custom_hooks.append(dict(type='EMAHook', ema_type='ExpMomentumEMA'))\nmodel['backbone']['with_cp'] = True\n"
    (tmp_path / 'swin.py').write_text(CONFIG.format(data=f'{DATA}/', epochs=1) + more)
    command = ('bash', ROOT / 'tools/dist_train.sh', 'swin.py', 2, '--work-dir', 'run')
    done = run(*command, cwd=tmp_path, PYTHONPATH=ROOT)
    log = done.stdout + done.stderr
    assert 'GPU number: 2' in log and 'SBPHook: 13 layers changed' in log
    assert 'Epoch(train) [1][5/5]' in log and 'loss: nan' not in log
    assert_stock(tmp_path, epoch=1)
    saved = torch.load(tmp_path / 'run/epoch_1.pth', map_location='cpu', weights_only=False)
    average = {name.removeprefix('module.'): value for name, value in saved['ema_state_dict'].items()}
    assert set(saved['state_dict']) <= set(average)
    moved = [name for name, value in saved['state_dict'].items() if not torch.equal(value, average[name])]
    assert len(moved) > 50
