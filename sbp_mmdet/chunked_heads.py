"""Heads of RoIs that compute each RoI independently of the others, so that they can run in chunks of RoIs."""

import mmcv.cnn
import mmengine.model
from mmdet.models.backbones import resnet
from mmdet.models.layers import ResLayer
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead, Shared4Conv1FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.shared_heads import ResLayer as SharedHead
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .ops.roi_chunks import ROIS
from .passes import PLANNER, has_hooks_of_others
from .surgery import stock_class

__all__ = ['computes_rois_one_by_one', 'runs_in_chunks']

# Classes of heads and layers that compute each RoI independently of the others.
_HEADS = (FCNMaskHead, ConvFCBBoxHead, Shared4Conv1FCBBoxHead, SharedHead)
_LAYERS = (
    *(nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.ReLU, nn.AvgPool2d, nn.Sequential, nn.ModuleList),
    *(nn.GroupNorm, nn.BatchNorm2d, nn.SyncBatchNorm),
    *(mmengine.model.Sequential, mmengine.model.ModuleList),
    *(mmcv.cnn.Conv2d, mmcv.cnn.ConvTranspose2d, mmcv.cnn.Linear, mmcv.cnn.ConvModule),
    *(ResLayer, resnet.Bottleneck, resnet.BasicBlock),
)


def computes_rois_one_by_one(head: nn.Module) -> bool:
    """Return whether a head computes each RoI independently, so that it can run in chunks of RoIs.

    Heads without convolutions are excluded, because they save little apart from their input.

    Args:
        head (nn.Module): The head.
    """
    if stock_class(type(head)) not in _HEADS:
        return False
    layers = [
        layer for name, child in head.named_children() if not name.startswith('loss') for layer in child.modules()
    ]
    known = all(stock_class(type(layer)) in _LAYERS for layer in layers)
    return known and any(isinstance(layer, nn.Conv2d) for layer in layers)


def runs_in_chunks(head: nn.Module, x: Tensor) -> bool:
    """Return whether a head runs in chunks now: batch norms must not normalise with statistics of the RoIs.

    Args:
        head (nn.Module): The head.
        x (Tensor): Input of the head.
    """
    norms = (m for m in head.modules() if isinstance(m, _BatchNorm))
    apart = not any(norm.training or norm.running_mean is None for norm in norms)
    hooked = any(has_hooks_of_others(m, PLANNER) for m in head.modules() if m is not head)  # by FSDP
    # The head's layers may have been replaced.
    return len(x) > ROIS and apart and not hooked and computes_rois_one_by_one(head)
