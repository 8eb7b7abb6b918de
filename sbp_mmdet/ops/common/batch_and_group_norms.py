"""Norms with statistics of the map in the operation :mod:`..conv_norm_act`: forward and backward pass of each kind.

'batch' is a batch norm in training mode; with a process group, its statistics are those of all processes (SyncBN).
'group' is a group norm. Batch norms in evaluation mode are in :mod:`.fixed_norms`.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .gathered import gather
from .layouts import memory_format
from .precision import accumulator, cast

__all__ = [
    'Statistics',
    'affine_of_norm',
    'compute_shift',
    'keeps_full_precision',
    'normalise',
    'normalise_backward',
    'zero_of',
]

aten = torch.ops.aten
_CUDNN = 1  # number of its kernel among those that torch chooses from


class Statistics(NamedTuple):
    """Mean and reciprocal deviation, shape (D,), of a group norm (N, num_groups)."""

    mean: Tensor
    rstd: Tensor


def normalise(s, t, z):
    """Normalise a map with its own statistics; running statistics are updated as torch's own norm does.

    Args:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters and buffers of the norm.
        z (Tensor): Input of the norm, shape (N, D, H, W).

    Returns:
        tuple[Tensor, Statistics, Tensor | None]: The output as a new tensor, the statistics, and what else the backward
        pass needs: for SyncBN the number of positions that they are computed over, for cuDNN its reserve space.
    """
    if s.norm == 'group':
        if z.numel() == s.num_groups:
            raise ValueError(f'Expected more than 1 value per channel when training, got input size {z.shape}')
        z = _for_group_norm(z, t.norm_weight)
        sizes = *z.shape[:2], z.shape[2] * z.shape[3]
        norm = _contiguous(t.norm_weight), _contiguous(t.norm_bias)
        out, mean, rstd = torch.native_group_norm(z, *norm, *sizes, s.num_groups, s.eps)
        return out, Statistics(mean, rstd), None
    if s.process_group is not None:
        return (_sync_batch_norm_by_kernels if _has_kernels(z) else _sync_batch_norm)(s, t, z)
    if z.numel() <= z.shape[1]:  # of an empty map, torch's backward pass divides by zero
        raise ValueError(f'Expected more than 1 value per channel when training, got input size {z.shape}')
    norm = t.norm_weight, t.norm_bias, t.running_mean, t.running_var
    if not z.is_cuda or torch.version.hip is not None:
        out, mean, rstd = torch.native_batch_norm(z, *norm, True, s.momentum, s.eps)
        return out, Statistics(mean, rstd), None
    # torch chooses the kernel, as for a plain norm: cuDNN's takes half the time of torch's own.
    cudnn = torch.backends.cudnn.enabled
    out, mean, rstd, reserve, kernel = torch._batch_norm_impl_index(z, *norm, True, s.momentum, s.eps, cudnn)
    return out, Statistics(mean, rstd), reserve if kernel == _CUDNN else None


def keeps_full_precision(s, x: Tensor) -> bool:
    """Return whether maps between convolutions are not rounded under autocast: CUDA's runs group norm in full.

    Args:
        s (ConvNormSettings): Settings of the layers.
        x (Tensor): A map.
    """
    return s.norm == 'group' and x.is_cuda


def _for_group_norm(z, weight):
    """Return a map in a memory layout and a precision that torch's kernel of group norm supports.

    CUDA's kernel takes one precision, and CUDA's autocast runs group norm in full, so the precision is that of the
    weight.
    """
    if z.device.type == 'cpu':
        return z.contiguous(memory_format=memory_format(z))
    return (z if weight is None else cast(z, weight.dtype)).contiguous()


def _contiguous(parameter):
    """Return a parameter in contiguous memory, because torch's group norm kernels ignore its strides."""
    return None if parameter is None else parameter.contiguous()


def affine_of_norm(s, t, statistics, channels):
    """Return scale = norm_weight * rstd and shift = norm_bias - mean * scale of norm(z) = scale * z + shift.

    Args:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters of the norm.
        statistics (Statistics): Mean and reciprocal deviation.
        channels (int): Number of channels D.

    Returns:
        tuple[Tensor, Tensor]: Scale and shift in full precision, shape (1, D, 1, 1), or (N, D, 1, 1) for group norm.
    """
    mean, scale = statistics
    mean, scale = cast(mean, accumulator(mean)), cast(scale, accumulator(scale))
    if s.norm == 'group':
        mean, scale = (n.repeat_interleave(channels // s.num_groups, 1) for n in (mean, scale))
    if t.norm_weight is not None:
        scale = scale * t.norm_weight
    shift = -mean * scale if t.norm_bias is None else compute_shift(t.norm_bias, mean, scale)
    return scale.view(-1, channels, 1, 1), shift.view(-1, channels, 1, 1)


def zero_of(scale: Tensor, shift: Tensor) -> Tensor:
    """Return the input for which a norm is zero; where its scale is 0, a largest number, or 0 if its shift is 0 too.

    Args:
        scale (Tensor): Scale of the norm, see :func:`affine_of_norm`.
        shift (Tensor): Its shift.
    """
    return (-shift / scale).nan_to_num(0)


def compute_shift(bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Compute the shift ``bias - mean * scale`` of a norm, in one call where all have the same precision.

    Args:
        bias (Tensor): Bias of the norm, shape (D,).
        mean (Tensor): Mean of its input, shape (D,) or (N, D).
        scale (Tensor): Factor of its input, of the same shape.
    """
    if bias.dtype is mean.dtype is scale.dtype:
        return torch.addcmul(bias, mean, scale, value=-1)
    return bias - mean * scale


def normalise_backward(s, t, statistics, extra, z, grad, needs):
    """Compute the gradients of a norm that :func:`normalise` ran.

    Args:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters of the norm.
        statistics (Statistics): Mean and reciprocal deviation.
        extra (Tensor | None): Third result of :func:`normalise`.
        z (Tensor): Input of the norm, shape (N, D, H, W).
        grad (Tensor): Gradient of the output.
        needs (NamedTuple): Which gradients are needed, by name.

    Returns:
        tuple[Tensor, Tensor | None, Tensor | None]: Gradients of the input, the weight and the bias.
    """
    mean, rstd = statistics
    which = [True, needs.norm_weight, needs.norm_bias]
    if s.norm == 'group':
        z = _for_group_norm(z, t.norm_weight)
        grad = cast(grad, z.dtype).contiguous(memory_format=memory_format(z))
        sizes = *z.shape[:2], z.shape[2] * z.shape[3], s.num_groups
        weight = _contiguous(t.norm_weight)
        return aten.native_group_norm_backward.default(grad, z, mean, rstd, weight, *sizes, which)
    if s.process_group is not None:
        backward = _sync_batch_norm_backward_by_kernels if _has_kernels(z) else _sync_batch_norm_backward
        return backward(s, t, statistics, extra, z, grad)
    if extra is not None:
        return aten.cudnn_batch_norm_backward.default(
            z, cast(grad, z.dtype), t.norm_weight, None, None, mean, rstd, s.eps, extra
        )
    return aten.native_batch_norm_backward.default(grad, z, t.norm_weight, None, None, mean, rstd, True, s.eps, which)


def _sync_batch_norm(s, t, z):
    """Run batch norm with the statistics of all processes; a process may have no image.

    From the means m_p, variances v_p and numbers n_p of the processes, with n = sum of n_p: mean = sum of n_p m_p / n
    and var = sum of n_p (v_p + (m_p - mean)^2) / n.
    """
    full, channels = accumulator(z), z.shape[1]
    var, mean = torch.var_mean(z.to(full), (0, 2, 3), correction=0)
    count = torch.full_like(mean[:1], z.numel() // channels)
    mine = torch.cat([mean.nan_to_num(0), var.nan_to_num(0), count])
    every = gather(mine, s.process_group)
    means, variances, counts = torch.stack(every).split([channels, channels, 1], 1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    if t.running_mean is not None:
        t.running_mean.lerp_(mean.to(t.running_mean.dtype), s.momentum)
        t.running_var.lerp_((var * count / (count - 1)).to(t.running_var.dtype), s.momentum)
    statistics = Statistics(mean, (var + s.eps).rsqrt())
    scale, shift = affine_of_norm(s, t, statistics, channels)
    return torch.addcmul(shift, z, scale).to(z.dtype), statistics, count


def _sync_batch_norm_backward(s, t, statistics, count, z, grad):
    """Run :func:`normalise_backward` over all processes; gradients of the parameters are this process's own.

    dz = norm_weight * rstd * (dy - sum(dy) / n - x-hat * sum(dy * x-hat) / n), with sums over all processes.
    """
    mean, rstd = (n.view(1, -1, 1, 1) for n in statistics)
    full = grad.to(rstd.dtype)
    xhat = (z - mean) * rstd
    sums = torch.stack([(full * xhat).sum((0, 2, 3)), full.sum((0, 2, 3))])
    dweight, dbias = sums.clone()
    dist.all_reduce(sums, group=s.process_group)
    sums = (sums / count).view(2, 1, -1, 1, 1)
    dz = (full - sums[1] - xhat * sums[0]) * rstd
    dz = dz if t.norm_weight is None else dz * t.norm_weight.view(1, -1, 1, 1)
    return dz.to(grad.dtype), dweight if t.norm_weight is not None else None, dbias if t.norm_bias is not None else None


# SyncBN by torch's own kernels, which exist for CUDA only and need a third of the passes over the map.


def _has_kernels(z):
    return z.is_cuda


_NO_POSITIONS = 1e-30  # stands for a count of 0, by which the kernel would divide


def _sync_batch_norm_by_kernels(s, t, z):
    """Run :func:`_sync_batch_norm` by torch's CUDA kernels. The third result has the positions of each process."""
    z, channels = z.contiguous(memory_format=memory_format(z)), z.shape[1]
    if z.numel():
        mean, rstd = torch.batch_norm_stats(z, s.eps)
    else:
        mean, rstd = (z.new_full((channels,), value, dtype=accumulator(z)) for value in (0, 1))
    count = torch.full_like(mean[:1], z.numel() // channels or _NO_POSITIONS)
    mine = torch.cat([mean, rstd, count])
    every = gather(mine, s.process_group)
    means, rstds, counts = torch.stack(every).split([channels, channels, 1], 1)
    running, counts = (t.running_mean, t.running_var), counts.reshape(-1)
    # The kernel reads the counts in the precision of the running statistics.
    kernels_counts = counts if t.running_mean is None else cast(counts, t.running_mean.dtype)
    mean, rstd = torch.batch_norm_gather_stats_with_counts(
        z, means.contiguous(), rstds.contiguous(), *running, s.momentum, s.eps, kernels_counts
    )
    out = torch.batch_norm_elemt(z, t.norm_weight, t.norm_bias, mean, rstd, s.eps) if z.numel() else z.clone()
    return out, Statistics(mean, rstd), counts.to(torch.int32)


def _sync_batch_norm_backward_by_kernels(s, t, statistics, count, z, grad):
    """Run :func:`_sync_batch_norm_backward` by torch's CUDA kernels."""
    weight, layout = t.norm_weight, memory_format(z)
    z, grad = (x.contiguous(memory_format=layout) for x in (z, grad))
    needed = True, weight is not None, t.norm_bias is not None
    if z.numel():
        sums, products, dweight, dbias = torch.batch_norm_backward_reduce(grad, z, *statistics, weight, *needed)
    else:
        sums, products, dweight, dbias = (torch.zeros_like(statistics.mean) for _ in range(4))
    every = torch.cat([sums, products])
    dist.all_reduce(every, group=s.process_group)
    if z.numel():
        weight = None if weight is None else weight.to(statistics.mean.dtype)
        grad = torch.batch_norm_backward_elemt(grad, z, *statistics, weight, *every.chunk(2), count)
    return grad, dweight if needed[1] else None, dbias if needed[2] else None
