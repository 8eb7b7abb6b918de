"""What CUDA does and a CPU does not, for counts of memory on a CPU: autocast's rules, and kernels of mmcv.

A training step that is counted on a CPU has to make the tensors that it would make on a GPU. The rules of autocast are
those of torch's ``ATen/autocast_mode.h``.
"""

import contextlib
import sys
import types
from unittest import mock

import torch
import torch.utils.checkpoint
from mmcv.ops.nms import NMSop
from mmcv.ops.roi_align import RoIAlignFunction
from mmdet.structures.mask import BitmapMasks
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.common.layouts import CHUNK

__all__ = ['autocast', 'autocast_rules', 'cuda_kernels', 'full_fp32']

_REDUCED = (torch.bfloat16, torch.float16)

# CUDA's autocast runs these in fp32: operations by the name that Python calls them by.
_FULL_PRECISION = frozenset(
    'acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus '
    'layer_norm rms_norm group_norm instance_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss '
    'cross_entropy hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss '
    'soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm '
    'logsumexp interpolate'.split()
)
# These read what they get and write fp32.
_FULL_PRECISION_RESULT = frozenset('softmax log_softmax prod sum cumsum cumprod'.split())


@contextlib.contextmanager
def full_fp32():
    """On a GPU, fp32 is not TF32 in here: that is cuDNN's default, and rounds to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class autocast_rules(TorchFunctionMode):  # noqa: N801  a context like torch.autocast
    """Context in which autocast on a CPU follows CUDA's rules."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, '__name__', '')
        if not _autocast_is_on():
            return func(*args, **kwargs)
        if name in _FULL_PRECISION:
            with torch.autocast('cpu', enabled=False):
                return func(*map(_full, args), **{key: _full(value) for key, value in kwargs.items()})
        if name in _FULL_PRECISION_RESULT and _is_reduced(args[0] if args else None) and not kwargs.get('dtype'):
            with torch.autocast('cpu', enabled=False):
                return func(*args, **kwargs, dtype=torch.float32)
        return func(*args, **kwargs)


def _autocast_is_on():
    new = hasattr(torch, 'get_autocast_dtype')  # torch 2.4 and newer
    return torch.is_autocast_enabled('cpu') if new else torch.is_autocast_cpu_enabled()


def _is_reduced(value):
    return isinstance(value, Tensor) and value.dtype in _REDUCED


def _full(value):
    return value.float() if _is_reduced(value) else value


@contextlib.contextmanager
def autocast(device: torch.device | str, dtype: torch.dtype | None):
    """Autocast with CUDA's rules on either device.

    CUDA's autocast runs layer norm, upsampling and losses in full precision and so stores their inputs in full
    precision; the CPU's does not. Left alone, a count on the CPU would come out too low.

    Args:
        device (torch.device | str): Where the model runs.
        dtype (torch.dtype | None): Reduced precision; None: no autocast.
    """
    kind = torch.device(device).type
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            if kind == 'cpu':
                stack.enter_context(autocast_rules())
                stack.enter_context(_rules_in_replays())
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def _rules_in_replays():
    """Checkpointing runs the forward pass again in the backward pass, which is not under the rules."""
    checkpoint = torch.utils.checkpoint.checkpoint

    def checkpoint_by_the_rules(function, *args, **kwargs):
        def run(*args, **kwargs):
            with autocast_rules():
                return function(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)

    return mock.patch.object(torch.utils.checkpoint, 'checkpoint', checkpoint_by_the_rules)


@contextlib.contextmanager
def cuda_kernels(counter, compute: bool):
    """Let mmcv's CPU kernels stand for those of CUDA.

    Non-maximum suppression and RoIAlign refuse reduced precision on a CPU: they run in fp32, out of the counter's
    sight, and give back what CUDA's would. Boxes that end before they start are turned. Masks are copied to the device.
    This package's operations cut their rows into the pieces that they cut on CUDA, which are larger.

    Args:
        counter (LiveBytes): What counts.
        compute (bool): False: RoIAlign of features leaves its output at zero, see :mod:`.hollow`.
    """
    nms_forward, crop = NMSop.forward, BitmapMasks.crop_and_resize
    forward, backward = RoIAlignFunction.forward, RoIAlignFunction.backward
    nothing = types.SimpleNamespace(roi_align_forward=lambda *a, **k: None, roi_align_backward=lambda *a, **k: None)
    # By its name, for mmcv.ops.roi_align is the function.
    without_kernel = mock.patch.object(sys.modules[RoIAlignFunction.__module__], 'ext_module', nothing)

    def nms_in_full(ctx, boxes, scores, *args):
        with counter.paused():
            boxes, scores = _full(boxes), _full(scores)
        return nms_forward(ctx, boxes, scores, *args)

    def roi_align(ctx, features, rois, *args):
        if (rois[:, 3:] < rois[:, 1:3]).any():  # of untrained detectors; a CPU refuses what CUDA takes
            with counter.paused():
                rois = torch.cat([rois[:, :3], rois[:, 1:].view(-1, 2, 2).amax(1)], 1)
        if not compute and ctx.needs_input_grad[0]:
            with without_kernel:
                return forward(ctx, features, rois, *args)
        if features.dtype not in _REDUCED:
            return forward(ctx, features, rois, *args)
        with counter.paused():
            out = forward(ctx, features.float(), rois.float(), *args)
        return out.to(features.dtype)

    def roi_align_backward(ctx, grad):
        if not compute:
            with without_kernel:
                return backward(ctx, grad)
        if grad.dtype not in _REDUCED:
            return backward(ctx, grad)
        with counter.paused():
            grad_input, *rest = backward(ctx, grad.float())
        return grad_input.to(grad.dtype), *rest

    def crop_and_resize(self, *args, **kwargs):
        on_device = torch.empty(self.masks.nbytes, dtype=torch.uint8)  # a CPU shares numpy's memory, CUDA has a copy
        try:
            return crop(self, *args, **kwargs)
        finally:
            del on_device

    with (
        _rules_in_replays(),
        mock.patch.dict(CHUNK, cpu=CHUNK['cuda']),
        mock.patch.object(NMSop, 'forward', staticmethod(nms_in_full)),
        mock.patch.object(RoIAlignFunction, 'forward', staticmethod(roi_align)),
        mock.patch.object(RoIAlignFunction, 'backward', staticmethod(roi_align_backward)),
        mock.patch.object(BitmapMasks, 'crop_and_resize', crop_and_resize),
    ):
        yield
