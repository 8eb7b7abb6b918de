"""SyncBN by torch's own CUDA kernels agrees with the written-out form.

Two threads are the processes. The kernels have stand-ins with torch's signatures; what they compute is taken from the
definition of batch norm, and the gradients are compared with those of one batch norm over both batches.
"""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sbp_mmdet.ops.common import batch_and_group_norms, gathered
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm

DIMS = (0, 2, 3)


def batch_norm_stats(input, eps):
    var, mean = torch.var_mean(input, DIMS, correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    assert running_mean is None or counts.dtype == running_mean.dtype  # CUDA's kernel reads no other
    total, number = mean.new_zeros(mean.shape[1]), 0.0
    squares = torch.zeros_like(total)
    for count, own, rate in zip(counts, mean, invstd, strict=True):
        squares += (rate**-2 - eps) * count + (total - own) ** 2 * number * count / (number + count)
        total = (number * total + count * own) / (number + count)
        number = number + count
    running_mean.lerp_(total.to(running_mean), momentum)
    running_var.lerp_((squares / (number - 1)).to(running_var), momentum)
    return total, (squares / number + eps).rsqrt()


def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    return as_matrix(weight) * (input - as_matrix(mean)) * as_matrix(invstd) + as_matrix(bias)


def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    sums, products = grad_out.sum(DIMS), (grad_out * (input - as_matrix(mean))).sum(DIMS)
    return sums, products, products * invstd, sums.clone()


def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert count.dtype == torch.int32
    number = count.sum()
    centred = grad_out - as_matrix(sum_dy) / number
    return (centred - (input - as_matrix(mean)) * as_matrix(invstd**2 * sum_dy_xmu) / number) * as_matrix(
        invstd * weight
    )


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


def as_matrix(x: Tensor) -> Tensor:
    return x.view(1, -1, 1, 1)


class Processes:
    """Replacement for ``torch.distributed``, with two threads in the place of processes."""

    def __init__(self):
        self.barrier, self.given = threading.Barrier(2, timeout=30), {}
        self.local = threading.local()

    def get_world_size(self, group):
        return 2

    def all_gather(self, every, mine, group):
        self.given[self.local.rank] = mine.clone()
        self.barrier.wait()
        for rank, place in enumerate(every):
            place.copy_(self.given[rank])
        self.barrier.wait()

    def all_reduce(self, x, group):
        every = [torch.empty_like(x) for _ in range(2)]
        self.all_gather(every, x, group)
        x.copy_(sum(every))


def run_processes(maps, weight, norm, momentum=0.1, dtype=torch.float64):
    """Return outputs, gradients of each process, and running statistics in ``dtype``. Thread 0 gets the first batch."""
    processes, results = Processes(), {}
    settings = ConvNormSettings(norm='batch', process_group='both', momentum=momentum)

    def process(rank):
        processes.local.rank = rank
        x, *parameters = (p.clone().requires_grad_() for p in (maps[rank], weight, *norm))
        running = torch.zeros_like(norm[0], dtype=dtype), torch.ones_like(norm[0], dtype=dtype)
        y = conv_norm(settings, ConvNormTensors(x, parameters[0], None, *parameters[1:], *running))
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        results[rank] = [y.detach(), x.grad, *(p.grad for p in parameters), *running]

    with pytest.MonkeyPatch.context() as patch:
        for module in (gathered, batch_and_group_norms):
            patch.setattr(module, 'dist', processes)
        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
    assert len(results) == 2
    return results


@pytest.mark.parametrize('sizes', [(2, 3), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_kernels_compute_what_is_written_out(sizes, dtype, monkeypatch):
    torch.manual_seed(0)
    maps = [torch.randn(n, 3, 5, 4, dtype=torch.float64) for n in sizes]
    weight, norm = torch.randn(6, 3, 1, 1, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    wanted = run_processes(maps, weight, norm, dtype=dtype)
    monkeypatch.setattr(batch_and_group_norms, '_has_kernels', lambda z: True)
    for kernel in KERNELS:
        monkeypatch.setattr(torch, kernel.__name__, kernel)
    results = run_processes(maps, weight, norm, dtype=dtype)
    for rank in range(2):
        torch.testing.assert_close(results[rank], wanted[rank])
    z = F.conv2d(torch.cat(maps), weight)
    torch.testing.assert_close(
        torch.cat([results[0][0], results[1][0]]), F.batch_norm(z, None, None, *norm, training=True)
    )


@pytest.mark.parametrize('kernel', KERNELS, ids=lambda kernel: kernel.__name__)
def test_stand_ins_have_the_signatures_of_torch(kernel):
    schema = getattr(torch.ops.aten, kernel.__name__).default._schema
    assert [argument.name for argument in schema.arguments] == [*kernel.__code__.co_varnames][
        : kernel.__code__.co_argcount
    ]
