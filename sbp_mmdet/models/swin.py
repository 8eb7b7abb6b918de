"""``SBPSwinTransformer``: mmdet's Swin Transformer with ``sbp_cfg``."""

import contextlib

import torch
from mmdet.models.backbones import SwinTransformer
from mmdet.registry import MODELS

from .lean_backbone import LeanBackbone

__all__ = ['SBPSwinTransformer']


@MODELS.register_module()
class SBPSwinTransformer(LeanBackbone, SwinTransformer):
    """Swin Transformer for memory-efficient training by Stochastic Backpropagation (SBP).

    The forward pass, the arguments and the names of the parameters are those of mmdet's ``SwinTransformer``. With
    ``sbp_cfg`` its layers train lean: attention and channel MLP save their normalised input, and with ``preset='sbp'``
    the channel MLPs and the patch merging of the leading stages backpropagate through a kept subset of the positions
    (section 3.2). The attention has exact gradients with every preset.

    Args:
        *args, **kwargs: Arguments of mmdet's ``SwinTransformer``.
        sbp_cfg (dict | None): ``preset`` and keys of :class:`sbp_mmdet.presets.Settings`. If ``None``, the backbone is
            plain. Default: None.

    Raises:
        ValueError: If a value cannot be honoured. The message has the value and the remedy.

    Example:
        ``backbone=dict(type='SBPSwinTransformer', sbp_cfg=dict(preset='exact'))``
    """

    def __init__(self, *args, sbp_cfg: dict | None = None, **kwargs):
        # mmdet's class reads rates from a tensor, which has no values on the device 'meta'.
        on_meta = torch.empty(()).is_meta
        with torch.device('cpu') if on_meta else contextlib.nullcontext():
            super().__init__(*args, **kwargs)
        if on_meta:
            self.to('meta')
        self.train_lean(sbp_cfg)
