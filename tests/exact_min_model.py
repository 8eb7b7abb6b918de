"""A small detector with every part that ``exact_min`` changes, and what each rank of its distributed test runs.

Gradients of each case and step go to ``OUT/{case}-{rank}.pt``.
"""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from mmdet.registry import MODELS
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import init_default_scope
from torch import nn

from sbp_mmdet import apply_lean

# case: preset, arguments of DistributedDataParallel, passes before an optimizer step
CASES = {
    'exact_min': ('exact_min', {}, 1),
    'exact_min, find_unused_parameters': ('exact_min', dict(find_unused_parameters=True), 1),
    'exact_min, static_graph': ('exact_min', dict(static_graph=True), 1),
    'exact_min, accumulate': ('exact_min', dict(gradient_as_bucket_view=True), 2),
    'int8': ('int8', {}, 1),
    'int8, find_unused_parameters': ('int8', dict(find_unused_parameters=True), 1),
    'int8, accumulate': ('int8', {}, 2),
}
STEPS = 2  # DDP rebuilds its buckets after the first step
ANCHORS = dict(type='AnchorGenerator', ratios=[1.0], octave_base_scale=4, scales_per_octave=1, strides=[4, 8])
EXTRACTOR = dict(type='SingleRoIExtractor', roi_layer=dict(type='RoIAlign', output_size=7), out_channels=16)


class Detector(nn.Module):
    """Detector of a ResNet, an FPN, a dense head, and a box and a mask head; its loss is a sum of squares.

    Args:
        depth (int): Depth of the ResNet.
        unused (bool): Whether there is a layer that no loss depends on. Default: False.
    """

    def __init__(self, depth, unused=False):
        super().__init__()
        init_default_scope('mmdet')
        outs = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1), frozen_stages=0)
        self.backbone = MODELS.build(dict(type='ResNet', depth=depth, base_channels=8, **outs))
        del self.backbone.layer1[1:], self.backbone.layer2[3:]  # a block alone, and a chain of two or three
        wide = 4 if depth == 50 else 1
        self.neck = MODELS.build(dict(type='FPN', in_channels=[8 * wide, 16 * wide], out_channels=16, num_outs=2))
        head = dict(type='ATSSHead', num_classes=2, in_channels=16, feat_channels=16, stacked_convs=1)
        self.bbox_head = MODELS.build(dict(head, norm_cfg=dict(type='GN', num_groups=4), anchor_generator=ANCHORS))
        box = dict(type='Shared4Conv1FCBBoxHead', in_channels=16, conv_out_channels=16, fc_out_channels=24)
        box |= dict(num_classes=3, bbox_coder=dict(type='DeltaXYWHBBoxCoder'))
        mask = dict(type='FCNMaskHead', num_convs=2, in_channels=16, conv_out_channels=16, num_classes=3)
        rois = dict(bbox_roi_extractor=dict(EXTRACTOR, featmap_strides=[4]), bbox_head=box, mask_head=mask)
        rois |= dict(mask_roi_extractor=dict(EXTRACTOR, featmap_strides=[4]))
        self.roi_head = MODELS.build(dict(type='StandardRoIHead', **rois))
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, images):
        maps = self.neck(self.backbone(images))
        pieces = maps[0].unfold(2, 7, 3).unfold(3, 7, 3).permute(0, 2, 3, 1, 4, 5).flatten(0, 2).contiguous()
        outs = [*sum(self.bbox_head(maps), []), *self.roi_head.bbox_head(pieces), self.roi_head.mask_head(pieces)]
        return sum(out.float().square().mean() if out.dtype is torch.bfloat16 else out.square().mean() for out in outs)


def build_detector(preset: str = 'none', depth: int = 50, unused: bool = False) -> Detector:
    """Return a detector in fp64 with weights that look trained."""
    model = Detector(depth, unused)
    torch.manual_seed(0)
    for p in (p for name, p in model.named_parameters() if 'unused' not in name):  # the same weights with such a layer
        nn.init.normal_(p, std=0.6 / p[0].numel() ** 0.5 if p.dim() > 1 else 0.3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1)
            module.running_mean.normal_(std=0.2), module.running_var.uniform_(0.5, 2)
    model.double().train()
    if preset != 'none':
        apply_lean(model, preset)
    return model


def make_images(number: int) -> torch.Tensor:
    """Return two images. The RoI heads get 98 RoIs of each, which is more than a chunk."""
    return torch.randn(2, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def accumulate_gradients(model: nn.Module, numbers, sync=None) -> dict[str, torch.Tensor]:
    """Return the gradients by name that several passes accumulate. Only the last pass synchronises them."""
    model.zero_grad()
    numbers = [*numbers]
    for number in numbers:
        last = number == numbers[-1]
        with contextlib.nullcontext() if last or sync is None else sync():
            model(make_images(number)).backward()
    named = ((name.removeprefix('module.'), p.grad) for name, p in model.named_parameters())
    return {name: grad.clone() for name, grad in named if grad is not None}


def get_image_numbers(case: str, rank: int, step: int) -> range:
    """Return the numbers of the images that a rank gets in a step."""
    passes = CASES[case][2]
    start = 100 * rank + passes * step
    return range(start, start + passes)


def main(out: str) -> None:
    """Run all cases and write their results."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    for case, (preset, how, _) in CASES.items():
        model = MMDistributedDataParallel(build_detector(preset, unused='unused' in case), device_ids=None, **how)
        gradients = [
            accumulate_gradients(model, get_image_numbers(case, rank, step), model.no_sync) for step in range(STEPS)
        ]
        torch.save(gradients, Path(out) / f'{case}-{rank}.pt')
    dist.barrier()
