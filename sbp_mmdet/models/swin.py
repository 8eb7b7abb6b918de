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
    ``sbp_cfg`` its layers train lean: attention and channel MLP store their normalised input, and with
    ``preset='sbp'`` the channel MLPs and the patch merging of the leading stages send gradients from a kept subset of
    the positions (section 3.2). The attention is exact under every preset.

    Args:
        *args, **kwargs: Of mmdet's ``SwinTransformer``.
        sbp_cfg (dict | None): ``preset`` and keys of :class:`sbp_mmdet.presets.Settings`; None is mmdet's backbone.
            Default: None.

    Raises:
        ValueError: For a value that cannot be honoured, naming it and the remedy.

    Example:
        ``backbone=dict(type='SBPSwinTransformer', sbp_cfg=dict(preset='exact'))``
    """

    def __init__(self, *args, sbp_cfg: dict | None = None, **kwargs):
        # mmdet's class reads rates out of a tensor, and on 'meta', where checks build models, there is nothing to read.
        on_meta = torch.empty(()).is_meta
        with torch.device('cpu') if on_meta else contextlib.nullcontext():
            super().__init__(*args, **kwargs)
        if on_meta:
            self.to('meta')
        self.train_lean(sbp_cfg)
