"""Convolutional detectors train with runner, hooks and wrappers like stock ones."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conv_models import BACKBONES, FCOS, TRAINED, build_detector, build_module, flatten_gradients, relative_distance
from helpers import needs_fp16, run_ranks
from mmdet.models.detectors import SemiBaseDetector
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from mmengine.model import MMDistributedDataParallel, convert_sync_batchnorm
from mmengine.runner import Runner
from oracles import DEVICE
from torch import nn

from sbp_mmdet import apply_lean


def train(folder, lean, iterations, resume=False):
    """Train with accumulated gradients and EMA; return all parameters and statistics."""
    model, batch = build_detector('yolox/yolox_tiny_8xb8-300e_coco.py')
    model.data_preprocessor = MODELS.build(dict(type='DetDataPreprocessor'))
    images = [{key: batch[key][i : i + 1] for key in ('inputs', 'data_samples')} for i in (0, 1)]
    hooks = [dict(type='EMAHook', momentum=0.1)] + [dict(type='LeanHook', preset='exact')] * lean
    runner = Runner(
        model,
        str(folder),
        torch.utils.data.DataLoader(images, collate_fn=lambda batch: batch[0]),
        train_cfg=dict(by_epoch=False, max_iters=iterations),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=1e-3, momentum=0.9), accumulative_counts=2),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=4, by_epoch=False)),
        custom_hooks=hooks,
        default_scope='mmdet',
        randomness=dict(seed=0),
        resume=resume,
        experiment_name=f'{folder.name}-{iterations}',
    )
    runner.train()
    ema = next(hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model'))
    return {f'{i}.{name}': x for i, m in enumerate((model, ema)) for name, x in m.state_dict().items()}


def test_runner_ema_accumulated_gradients_and_resume(tmp_path, monkeypatch):
    # mmengine waits two seconds after each pass over the data, for the workers of a loader.
    monkeypatch.setattr('mmengine.runner.loops.time', mock.Mock())
    stock, lean = (train(tmp_path / name, name == 'lean', 8) for name in ('stock', 'lean'))
    assert lean.keys() == stock.keys()
    assert relative_distance(*({n: x.double() for n, x in found.items()} for found in (lean, stock))) < 1e-4
    train(tmp_path / 'parts', True, 4)
    resumed = train(tmp_path / 'parts', True, 8, resume=True)
    assert all(torch.equal(x, lean[name]) for name, x in resumed.items())


@needs_fp16
@pytest.mark.parametrize('preset', ['exact', 'int8'])
def test_a_step_that_overflows_is_skipped(preset):
    model = build_module(BACKBONES['ResNet-18, training'][0]).float().to(DEVICE)
    apply_lean(model, preset)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler(DEVICE, init_scale=2.0**20)
    before, x = copy.deepcopy(model.state_dict()), torch.randn(2, 3, 64, 64, device=DEVICE)
    for factor, moved in ((1e4, False), (1e-3, True)):
        with torch.autocast(DEVICE, torch.float16):
            loss = sum(out.float().square().mean() for out in model(x)) * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.conv1.weight, before['conv1.weight']) != moved
        assert scaler.get_scale() == 2.0**19 and all(p.isfinite().all() for p in model.parameters())


class Unused(nn.Module):
    """A backbone, and a layer that no loss depends on."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.unused = backbone, nn.Linear(2, 2)

    def forward(self, x):
        return sum(out.sin().sum() for out in self.backbone(x))


def _rank():
    dist.init_process_group('gloo')
    x = torch.randn(5, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    whole = build_module(BACKBONES['ResNet-18, training'][0])
    lean = convert_sync_batchnorm(copy.deepcopy(whole))
    apply_lean(lean)
    # It wants a GPU for SyncBN; the lean norm does not.
    MMDistributedDataParallel._passing_sync_batchnorm_handle = lambda *args: None
    wrapped = MMDistributedDataParallel(Unused(lean), device_ids=None, find_unused_parameters=True)
    for _ in range(2):  # accumulated
        Unused(whole)(x).backward()
        wrapped([x[:2], x[2:]][dist.get_rank()]).backward()
    actual, expected = (flatten_gradients({n: p.grad for n, p in m.named_parameters()}) for m in (lean, whole))
    torch.testing.assert_close(2 * actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(lean.named_buffers()), dict(whole.named_buffers()), rtol=1e-10, atol=1e-10)
    dist.destroy_process_group()


def test_two_ranks_with_sync_bn_and_unused_parameters():
    """The result is that of batch norm over all images in one process; one rank has more images."""
    run_ranks(_rank)


def test_student_and_teacher():
    """The losses are bitwise those of the stock model; the frozen teacher is unchanged."""
    stock, batch = build_detector('fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', **FCOS | TRAINED)
    for sample in batch['data_samples']:
        sample.set_metainfo(dict(homography_matrix=np.eye(3, dtype=np.float32), ori_shape=(128, 128)))
    pair = SemiBaseDetector(dict(type='ReLU', _scope_='mmengine'), ConfigDict(cls_pseudo_thr=0.0))
    pair.student, pair.teacher, pair.data_preprocessor = stock, copy.deepcopy(stock), stock.data_preprocessor
    pair.freeze(pair.teacher)
    lean = copy.deepcopy(pair)
    assert {name.split('.')[0] for name in apply_lean(lean).changed} == {'student'}
    results = []
    for model in (pair, lean):
        branches = ('sup', 'unsup_teacher', 'unsup_student')
        samples = {branch: copy.deepcopy(batch['data_samples']) for branch in branches}
        losses = model.loss(dict.fromkeys(branches, batch['inputs']), samples)
        total = sum(sum(v) if isinstance(v, list) else v for key, v in losses.items() if 'loss' in key)
        total.backward()
        results.append((total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (expected, grads), (actual, lean_grads) = results
    assert actual == expected and lean_grads.keys() == grads.keys() and all('student' in name for name in grads)
    assert relative_distance(lean_grads, grads) < 1e-3
