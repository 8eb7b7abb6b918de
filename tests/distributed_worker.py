"""What each rank of the tests of distributed training runs.

For each case and step the gradients of a backbone in a distributed wrapper and the masks that it used go to
``OUT/{case}-{rank}.pt``. The images of a rank and step are those of :func:`make_images`.
"""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from cases import get_kept_masks
from mmdet.models.backbones import SwinTransformer
from mmdet.models.backbones.swin import SwinBlock
from mmengine.logging import MessageHub
from mmengine.model import MMDistributedDataParallel
from oracles import build_backbone, compute_loss, random_images
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from sbp_mmdet import apply_lean
from sbp_mmdet.models.convnext import ConvNeXtBlock

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6, whose FSDP does not run on a CPU either
    fully_shard = None

SEED = 11
SIZE = (72, 104)  # not divisible by 32, so that the number of kept positions differs between masks
RANDOM = dict(preset='sbp', sampler='random')
REFERENCE = dict(preset='reference', sampler='random')
DEEP = dict(drop_path_rate=0.7)  # with one image per rank, some blocks run on one rank only
SWIN = dict(embed_dims=8, depths=(1, 2, 2, 1), num_heads=(1, 2, 2, 4), window_size=3, mlp_ratio=2, drop_path_rate=0.0)
# case: (sbp_cfg, arguments of the backbone, arguments of DistributedDataParallel or the name of another wrapper)
CASES = {
    'plain': (RANDOM, {}, {}),
    'later': (RANDOM, {}, {}),
    'grid': (dict(preset='sbp', keep_ratio=0.4), {}, {}),
    'reference': (REFERENCE, {}, dict(static_graph=True)),
    'exact': (dict(preset='exact'), {}, dict(gradient_as_bucket_view=True)),
    'find_unused_parameters': (RANDOM, {}, dict(find_unused_parameters=True)),
    'static_graph': (RANDOM, {}, dict(static_graph=True)),
    'accumulate': (RANDOM, {}, dict(gradient_as_bucket_view=True)),
    'frozen': (RANDOM, dict(frozen_stages=1), {}),
    'sampled': (dict(preset='sampled'), {}, dict(static_graph=True)),
    'skip': (RANDOM, DEEP, {}),
    'skip exact': (dict(preset='exact'), DEEP, dict(static_graph=True)),
    'skip FSDP': (RANDOM, DEEP, 'FSDP'),
    'skip fully_shard': (RANDOM, DEEP, 'fully_shard'),
    'FSDP': (RANDOM, {}, 'FSDP'),
    'FSDP reference': (REFERENCE, {}, 'FSDP'),
    'fully_shard': (dict(preset='exact'), {}, 'fully_shard'),
    'in place': (RANDOM, SWIN, {}),
    'in place skip': (RANDOM, SWIN | DEEP, dict(static_graph=True)),
    'in place FSDP': (RANDOM, SWIN, 'FSDP'),
    'in place fully_shard': (dict(preset='exact'), SWIN | DEEP, 'fully_shard'),
}
if fully_shard is None:
    CASES = {case: values for case, values in CASES.items() if values[2] not in ('FSDP', 'fully_shard')}
FIRST_ITERATION = {'later': 1}  # as after a resume
STEPS = 2  # DDP rebuilds its buckets after the first step


class Detector(nn.Module):
    """A backbone, and in one case a layer that no loss depends on."""

    def __init__(self, backbone, unused):
        super().__init__()
        self.backbone = backbone
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x):
        return self.backbone(x)


def build_case(case: str) -> nn.Module:
    """Return the backbone of a case: this package's, or mmdet's Swin changed in place."""
    sbp_cfg, arguments, _ = CASES[case]
    if 'in place' not in case:
        return build_backbone(sbp_cfg, **arguments)
    backbone = SwinTransformer(**arguments).double()
    backbone.train()  # returns None
    generator = torch.Generator().manual_seed(0)
    for p in backbone.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data = noise / p[0].numel() ** 0.5 if p.dim() > 1 else 0.6 + 0.2 * noise
    apply_lean(backbone, **sbp_cfg)
    return backbone


def make_images(rank: int, step: int) -> torch.Tensor:
    """Return the images of a rank and a step."""
    return random_images(1, *SIZE, seed=100 * rank + step)


def wrap_model(model: Detector, how: dict | str) -> nn.Module:
    """Wrap a model as a case requires. Wrappers that shard parameters use the block as their unit."""
    if how == 'FSDP':
        policy = ModuleWrapPolicy({ConvNeXtBlock, SwinBlock})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device('cpu')
        )
    if how == 'fully_shard':
        mesh = init_device_mesh('cpu', (dist.get_world_size(),))
        for stage in model.backbone.stages:
            for block in getattr(stage, 'blocks', stage):
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return MMDistributedDataParallel(model, device_ids=None, **how)


def gather_gradients(model: nn.Module) -> dict:
    """Return the gradients of the backbone by name, gathered if the wrapper shards them."""
    sharded = isinstance(model, FullyShardedDataParallel)
    whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True) if sharded else contextlib.nullcontext()
    with whole:
        gradients = {}
        for name, p in model.named_parameters():
            if 'backbone.' in name and p.grad is not None:
                grad = p.grad.full_tensor() if hasattr(p.grad, 'full_tensor') else p.grad
                gradients[name.replace('_fsdp_wrapped_module.', '').split('backbone.')[1]] = grad.clone()
        return gradients


def run_case(case: str, rank: int) -> list[dict]:
    """Return the gradients and masks of each step of a case.

    Args:
        case (str): Key of :data:`CASES`.
        rank (int): Rank of this process.
    """
    backbone, how = build_case(case), CASES[case][2]
    detector = Detector(backbone, 'find_unused_parameters' in how)
    model = wrap_model(detector, how)
    torch.manual_seed(SEED)  # as mmengine does before the training
    micro_steps = 2 if 'accumulate' in case else 1
    results = []
    iteration = FIRST_ITERATION.get(case, 0)
    for _ in range(STEPS):
        model.zero_grad()
        masks = []
        for micro in range(micro_steps):
            # mmengine counts micro-batches as iterations.
            MessageHub.get_current_instance().update_info('iter', iteration)
            last = micro == micro_steps - 1
            with contextlib.nullcontext() if last else model.no_sync():
                x = make_images(rank, iteration)
                compute_loss(model(x)).backward()
            masks.append(get_kept_masks(backbone, x))
            iteration += 1
        unused = None if detector.unused is None else detector.unused.weight.grad
        results.append(dict(grads=gather_gradients(model), masks=masks, unused=unused))
    return results


def main(out: str) -> None:
    """Run all cases and write their results."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    for case in CASES:
        torch.save(run_case(case, rank), Path(out) / f'{case}-{rank}.pt')
    dist.barrier()
