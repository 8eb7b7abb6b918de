"""CUDA's rules of autocast and CUDA's kernels of mmcv, imitated on a CPU for counts of memory.

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
from mmdet.models.task_modules.assigners import iou2d_calculator
from mmdet.structures.mask import BitmapMasks
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..chunked_targets import overlaps as in_place
from ..chunked_targets.assigners import LARGEST_STRIP
from ..chunked_targets.mask_heads import CroppedInChunks
from ..ops.common.layouts import CHUNK
from ..ops.common.precision import ROUNDED

__all__ = ['autocast', 'autocast_rules', 'cuda_kernels', 'full_fp32']

_REDUCED = (torch.bfloat16, torch.float16)
_MANY_PAIRS = 2**19  # pairs of boxes whose overlaps are computed at a time

# Names of functions that CUDA's autocast runs in fp32.
_FULL_PRECISION = frozenset(
    'acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus '
    'layer_norm rms_norm group_norm instance_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss '
    'cross_entropy hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss '
    'soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm '
    'logsumexp interpolate'.split()
)
# Names of functions that keep their inputs' precision and return fp32 under CUDA's autocast.
_FULL_PRECISION_RESULT = frozenset('softmax log_softmax prod sum cumsum cumprod'.split())


@contextlib.contextmanager
def full_fp32():
    """Disable TF32 within the context. It is cuDNN's default for fp32 on a GPU and rounds to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class autocast_rules(TorchFunctionMode):  # noqa: N801  a context manager like torch.autocast
    """Context manager within which autocast on a CPU follows CUDA's rules."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, '__name__', '')
        if not _autocast_is_on():
            return func(*args, **kwargs)
        if name in _FULL_PRECISION:
            with torch.autocast('cpu', enabled=False):
                return func(*map(_full, args), **{key: _full(value) for key, value in kwargs.items()})
        given = kwargs.get('dtype') or any(isinstance(value, torch.dtype) for value in args)
        if name in _FULL_PRECISION_RESULT and _is_reduced(args[0] if args else None) and not given:
            with torch.autocast('cpu', enabled=False):
                return func(*args, **{**kwargs, 'dtype': torch.float32})  # which may be given as None
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
    """Enable autocast with CUDA's rules on either device.

    CUDA's autocast runs layer norm, upsampling and losses in full precision and so saves their inputs in full
    precision. The CPU's does not, so a count on the CPU would be too low.

    Args:
        device (torch.device | str): Device of the model.
        dtype (torch.dtype | None): Reduced precision. If ``None``, there is no autocast.
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
    """Return a context manager in which the recomputation of checkpointed functions follows the rules, too."""
    checkpoint = torch.utils.checkpoint.checkpoint

    def checkpoint_by_the_rules(function, *args, **kwargs):
        def run(*args, **kwargs):
            with autocast_rules():
                return function(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)

    return mock.patch.object(torch.utils.checkpoint, 'checkpoint', checkpoint_by_the_rules)


@contextlib.contextmanager
def cuda_kernels(counter, compute: bool):
    """Make mmcv's CPU kernels allocate what its CUDA kernels would, within the context.

    Non-maximum suppression and RoIAlign do not support reduced precision on a CPU: they run in fp32 while the counter
    is paused, and return the precision of CUDA's kernels. Boxes whose corners are in the wrong order are corrected.
    Masks are copied to the device. This package's operations work in chunks of the size that they have on CUDA. Code
    that moves a tensor to the GPU by ``.cuda()`` gets the tensor itself.

    Args:
        counter (LiveBytes): The counter of bytes.
        compute (bool): Whether RoIAlign of features is computed. If ``False``, its output is zero, see
            :mod:`.skip_arithmetic`.

    Yields:
        Callable: Returns whether a function runs whose operations need not be computed: the crop of masks, which are
        only compared with predictions, and the overlaps of boxes, which are computed in chunks afterwards.
    """
    nms_forward, unneeded = NMSop.forward, _Unneeded(compute)

    def nms_in_full(ctx, boxes, scores, *args):
        with counter.paused():
            boxes, scores = _full(boxes), _full(scores)
        return nms_forward(ctx, boxes, scores, *args)

    with (
        _rules_in_replays(),
        mock.patch.dict(CHUNK, cpu=CHUNK['cuda']),
        mock.patch.dict(LARGEST_STRIP, clear=True),
        mock.patch.dict(ROUNDED, cpu=ROUNDED['cuda']),
        mock.patch.object(NMSop, 'forward', staticmethod(nms_in_full)),
        mock.patch.object(Tensor, 'cuda', lambda tensor, *args, **kwargs: tensor),
        _roi_align(counter, compute, unneeded),
        unneeded.crops_and_overlaps(),
    ):
        yield lambda: unneeded.runs


@contextlib.contextmanager
def _roi_align(counter, compute, unneeded):
    """Make mmcv's RoIAlign allocate as much as on CUDA, within the context, see :func:`cuda_kernels`."""
    forward, backward = RoIAlignFunction.forward, RoIAlignFunction.backward
    nothing = types.SimpleNamespace(roi_align_forward=lambda *a, **k: None, roi_align_backward=lambda *a, **k: None)
    # The module is looked up by its name, because mmcv.ops.roi_align is a function.
    without_kernel = mock.patch.object(sys.modules[RoIAlignFunction.__module__], 'ext_module', nothing)

    def roi_align(ctx, features, rois, *args):
        if (rois[:, 3:] < rois[:, 1:3]).any():  # boxes of untrained detectors, which the CPU's kernel refuses
            with counter.paused():
                rois = torch.cat([rois[:, :3], rois[:, 1:].view(-1, 2, 2).amax(1)], 1)
        if not compute and (ctx.needs_input_grad[0] or unneeded.runs):
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

    with (
        mock.patch.object(RoIAlignFunction, 'forward', staticmethod(roi_align)),
        mock.patch.object(RoIAlignFunction, 'backward', staticmethod(roi_align_backward)),
    ):
        yield


class _Unneeded:
    """Functions of mmdet whose operations need not be computed.

    Args:
        compute (bool): Whether they are computed nevertheless.

    Attributes:
        runs (bool): Whether one of them runs.
    """

    def __init__(self, compute: bool):
        self._compute, self.runs = compute, False

    @contextlib.contextmanager
    def crops_and_overlaps(self):
        """Run the crop of masks and the overlaps of many boxes by :meth:`_run`, within the context."""
        crop, of_boxes = BitmapMasks.crop_and_resize, iou2d_calculator.bbox_overlaps
        crop_in_chunks, write_overlaps = CroppedInChunks.crop_and_resize, in_place.write_overlaps

        def crop_and_resize_in_chunks(masks, *args, **kwargs):
            return self._run(crop_in_chunks, masks, *args, **kwargs)

        def crop_and_resize(masks, *args, **kwargs):
            on_device = torch.empty(masks.masks.nbytes, dtype=torch.uint8)  # CUDA's copy; a CPU shares numpy's memory
            try:
                return self._run(crop, masks, *args, **kwargs)
            finally:
                del on_device

        def overlaps(bboxes1, bboxes2, mode='iou', is_aligned=False):
            many = bboxes1.dim() == bboxes2.dim() == 2 and len(bboxes1) * len(bboxes2) >= _MANY_PAIRS
            if self._compute or is_aligned or not many or bboxes1.requires_grad or bboxes2.requires_grad:
                return of_boxes(bboxes1, bboxes2, mode, is_aligned)
            result = self._run(of_boxes, bboxes1, bboxes2, mode)
            _write_uncounted(lambda out, *boxes: out.copy_(of_boxes(*boxes)), result, bboxes1, bboxes2, mode)
            return result

        def overlaps_in_place(out, first, second, mode='iou'):
            if self._compute or out.numel() < _MANY_PAIRS:
                return write_overlaps(out, first, second, mode)
            self._run(write_overlaps, out, first, second, mode)
            _write_uncounted(write_overlaps, out, first, second, mode)

        with (
            mock.patch.object(in_place, 'write_overlaps', overlaps_in_place),
            mock.patch.object(BitmapMasks, 'crop_and_resize', crop_and_resize),
            mock.patch.object(CroppedInChunks, 'crop_and_resize', crop_and_resize_in_chunks),
            mock.patch.object(iou2d_calculator, 'bbox_overlaps', overlaps),
        ):
            yield

    def _run(self, function, *args, **kwargs):
        self.runs = not self._compute
        try:
            return function(*args, **kwargs)
        finally:
            self.runs = False


def _write_uncounted(write, result, bboxes1, bboxes2, mode):
    """Write overlaps to ``result``, in chunks that stay in a CPU's caches, and without counting them."""
    chunk = max(_MANY_PAIRS // len(bboxes1), 1)
    with _disable_current_modes():
        for start in range(0, len(bboxes2), chunk):
            columns = slice(start, start + chunk)
            write(result[:, columns], bboxes1, bboxes2[columns], mode)
