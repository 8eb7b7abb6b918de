"""What a rank runs that trains with and without verification, for test_verify_ranks.py."""

import contextlib
import copy
import logging
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mmcv.cnn import ConvModule
from mmengine.model import ExponentialMovingAverage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sbp_mmdet import LeanHook, SBPConvNeXt

STEPS, ACCUMULATED = 10, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        arch = dict(depths=[1, 1, 2, 1], channels=[4, 6, 8, 10])
        options = dict(gap_before_final_norm=False, layer_scale_init_value=1.0, drop_path_rate=0.3)
        self.backbone = SBPConvNeXt(arch, out_indices=[1, 3], **options)
        self.necks = nn.ModuleList(ConvModule(width, 4, 3, padding=1, norm_cfg=dict(type='BN')) for width in (6, 10))
        self.kept = []
        self.necks[1].register_forward_hook(lambda module, args, out: self.kept.append(out))  # for a loss

    def forward(self, x):
        self.kept.clear()
        outs = [neck(x) for neck, x in zip(self.necks, self.backbone(x), strict=True)]
        return sum(out.square().mean() for out in outs) + sum(out.abs().mean() for out in self.kept)

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            return self(data)


def train_net(preset: str, verify: bool, rank: int) -> tuple[dict, list[str]]:
    """Return weights, their moving average and statistics after ten steps, and the log."""
    torch.manual_seed(0)
    model = Net()
    said = []
    logger = SimpleNamespace(info=said.append, warning=said.append, log=lambda level, text: said.append(text))
    hook = LeanHook(preset, verify=verify)
    runner = SimpleNamespace(model=model, logger=logger, hooks=[hook], iter=0, cfg=None)
    runner.optim_wrapper = SimpleNamespace(optim_context=lambda model: contextlib.nullcontext())
    runner.visualizer = SimpleNamespace(add_scalars=lambda *args: None)
    hook.before_run(runner)
    average = ExponentialMovingAverage(model, momentum=0.1)
    runner.model = ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for runner.iter in range(STEPS):
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(10 * runner.iter + rank))
        hook.before_train_iter(runner, runner.iter, data_batch=x)
        last = runner.iter % ACCUMULATED == ACCUMULATED - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            ddp(x).backward()
        if last:
            optimizer.step(), optimizer.zero_grad()
            average.update_parameters(model)
        hook.after_train_iter(runner, runner.iter)
    return copy.deepcopy(dict(model.state_dict(), **average.state_dict())), said


def main(out: str) -> None:
    logging.disable(logging.CRITICAL)
    dist.init_process_group('gloo')
    rank, lines = dist.get_rank(), []
    for preset in ('exact', 'sbp'):
        (expected, silent), (actual, said) = (train_net(preset, verify, rank) for verify in (False, True))
        different = [name for name in expected if not torch.equal(actual[name], expected[name])]
        verified = any('against their own code' in line for line in said) and len(said) > len(silent)
        lines.append(f'{preset} different={len(different)} verified={verified}')
    Path(out, f'{rank}.txt').write_text('\n'.join(lines))
    dist.destroy_process_group()
