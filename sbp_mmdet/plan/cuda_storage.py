"""CUDA's tensors of operations for which a CPU has no kernel or takes another way, for counts of memory on a CPU.

mmcv's autograd functions allocate the tensors that a kernel writes to, and save those that its backward pass reads, in
Python. So the kernels need not run in a count: a replacement leaves the results unwritten, and allocates what the CUDA
code allocates itself (``mmcv/ops/csrc``). Where mmcv, mmdet or torch take another way on a CPU, CUDA's is taken.
"""

import contextlib
import sys
from collections.abc import Callable
from unittest import mock

import mmcv.ops
import torch
import torch.nn.functional as F
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction
from mmdet.models.losses import FocalLoss
from mmdet.models.losses.focal_loss import py_sigmoid_focal_loss, sigmoid_focal_loss
from torch import Tensor

from ..ops import deformable_attention as deformable

__all__ = ['cuda_storage']

_MODULES = (
    'border_align',
    'carafe',
    'deform_conv',
    'deform_roi_pool',
    'focal_loss',
    'masked_conv',
    'modulated_deform_conv',
    'multi_scale_deform_attn',
    'prroi_pool',
    'psa_mask',
    'roi_pool',
)


class _Kernels:
    """Replacement for mmcv's compiled code. Functions that only write to their arguments do nothing.

    Args:
        counter (LiveBytes): The counter of bytes.
    """

    def __init__(self, counter):
        self._counter = counter

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: None

    def deform_conv_forward(self, input, weight, offset, output, *_, im2col_step, **__):
        _columns(input, weight, output, im2col_step)

    def deform_conv_backward_input(self, input, offset, grad_output, grad_input, grad_offset, weight, *_, **kwargs):
        _columns(input, weight, grad_output, kwargs['im2col_step'])

    def deform_conv_backward_parameters(self, input, offset, grad_output, grad_weight, *_, im2col_step, **__):
        _columns(input, grad_weight, grad_output, im2col_step)

    def modulated_deform_conv_forward(self, input, weight, bias, ones, offset, mask, output, *_, **__):
        _columns(input, weight, output, 1)

    def modulated_deform_conv_backward(self, input, weight, *args, **__):
        _columns(input, weight, args[-1], 1)

    def ms_deform_attn_forward(self, value, shapes, starts, locations, weights, im2col_step):
        return value.new_zeros(len(value), locations.shape[1], value.shape[2] * value.shape[3])

    def sigmoid_focal_loss_forward(self, input, target, weight, output, gamma, alpha):
        # Some assigners read the losses, so they are computed.
        with self._counter.paused(), torch.no_grad():
            one_hot = F.one_hot(target, input.size(1) + 1)[:, :-1]
            output.copy_(py_sigmoid_focal_loss(input.float(), one_hot, None, gamma, alpha, 'none'))


def _columns(input, weight, output, images):
    """Allocate and free the columns that the kernel of a deformable convolution makes of ``images`` images."""
    rows = input.shape[1] * weight.shape[2] * weight.shape[3]
    input.new_zeros(rows, images * output.shape[2] * output.shape[3])


@contextlib.contextmanager
def cuda_storage(counter, bfloat16: bool = False):
    """Make operations on a CPU allocate and save what they would on CUDA, within the context.

    Args:
        counter (LiveBytes): The counter of bytes.
        bfloat16 (bool): Whether the config trains in bfloat16. mmcv has no kernel of deformable attention for it and
            uses torch's operations on CUDA, too. Default: False.
    """
    focal, dropout = FocalLoss.forward, F.dropout

    def attention(value, shapes, locations, weights):
        return MultiScaleDeformableAttnFunction.apply(value, shapes, None, locations, weights, 64)

    def focal_loss(self, pred, target, weight=None, avg_factor=None, reduction_override=None):
        if self.activated or pred.dim() == target.dim():
            return focal(self, pred, target, weight, avg_factor, reduction_override)
        how = dict(gamma=self.gamma, alpha=self.alpha, reduction=reduction_override or self.reduction)
        return self.loss_weight * sigmoid_focal_loss(pred, target, weight, avg_factor=avg_factor, **how)

    def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        if training and not inplace and 0 < p < 1 and input.numel():
            return torch.native_dropout(input, p, True)[0]  # saves one byte for each element; the CPU's dropout, four
        return dropout(input, p, training, inplace)

    with contextlib.ExitStack() as stack:
        kernels = _Kernels(counter)
        for name in _MODULES:
            # The module is looked up by its name, because mmcv.ops.carafe, for example, is a function.
            if (module := sys.modules.get(f'{mmcv.ops.__name__}.{name}')) and hasattr(module, 'ext_module'):
                stack.enter_context(mock.patch.object(module, 'ext_module', kernels))
        if not bfloat16:
            module = sys.modules[MultiScaleDeformableAttnFunction.__module__]
            stack.enter_context(mock.patch.object(module, 'multi_scale_deformable_attn_pytorch', attention))
        stack.enter_context(mock.patch.object(deformable, 'has_kernel', lambda value: True))
        stack.enter_context(mock.patch.object(FocalLoss, 'forward', focal_loss))
        stack.enter_context(mock.patch.object(F, 'dropout', fused_dropout))
        yield
