"""Mask heads of two-stage detectors."""

import mmcv.cnn
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from torch import Tensor, nn

from ..ops.roi_chunks import ROIS, run_in_chunks
from .base import LeanModule, adapter
from .roles import ROLES, any_setting

__all__ = ['LeanMaskHead']

ROLES['upsampling of a mask head'] = dict.fromkeys((nn.ConvTranspose2d, mmcv.cnn.ConvTranspose2d), any_setting)


@adapter(FCNMaskHead)
class LeanMaskHead(LeanModule):
    """Mask head whose largest maps, after the upsampling, are not stored but recomputed for some RoIs at a time.

    The transposed convolution is a tenth of the head's work. The convolutions in front have adapters of their own.
    """

    dims = 4
    samples = has_reference = False
    separable = shares_modules = True
    callers = ('get_targets', 'loss_and_target', 'predict_by_feat')

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`. These modules are called, but twice and on some RoIs at a time."""
        yield self.upsample, 'upsampling of a mask head'
        yield self.relu, 'ReLU'
        yield self.conv_logits, 'pointwise convolution'

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the head on maps of RoIs, shape (number of RoIs, C, H, W)."""
        for conv in self.convs:
            x = conv(x)
        if len(x) <= ROIS:
            return self._masks(x)
        return run_in_chunks(self._masks, x, [self.upsample, self.relu, self.conv_logits])

    def _masks(self, x):
        return self.conv_logits(self.relu(self.upsample(x)))

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`. Without a transposed convolution there are no larger maps."""
        return cls.is_stock(module) and module.upsample_method == 'deconv'
