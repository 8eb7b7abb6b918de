"""Stochastic depth that skips dropped images: a residual block runs on the images that keep it, the others bypass it.

Computing a block's branch for an image and multiplying it by zero gives the same output and the same gradients, but
costs as much time and memory as a kept image. Which images keep a block has to be known before it runs, without waiting
for a GPU, so it is drawn on the CPU, like the masks.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .precision import accumulator, autocast_dtype
from .recorded_steps import Step, recorded_steps
from .uncompiled import uncompiled

__all__ = ['KeptImages', 'draw_factor', 'factor_for', 'run_on_images']


@uncompiled
def run_on_images(
    block: Callable[[Tensor], Tensor], x: Tensor, images: Tensor, parameters: Iterable[nn.Parameter]
) -> Tensor:
    """Run a block on some images of a batch.

    Args:
        block (Callable): Maps (n, C, H, W) to the same shape, image by image; stochastic depth's factor is part of it.
            Where operations are recorded (:func:`.record_steps`), it is one operation.
        x (Tensor): Shape (N, C, H, W).
        images (Tensor): Whether the block runs on each image, bool, shape (N,), on the CPU.
        parameters (Iterable[nn.Parameter]): Parameters of the block. If no image keeps it, they get gradients of zero,
            which optimizers and distributed training need.

    Returns:
        Tensor: Shape (N, C, H, W).
    """
    images, steps = images.tolist(), recorded_steps()
    if all(images):
        return block(x)
    if not any(images):
        if steps is None:
            return _PassBy.apply(x, *parameters)
        steps.append(Step(None, None, tuple(parameters)))
        return x
    kept = KeptImages(images)
    out = block(kept.take(x))
    if steps is not None:
        steps[-1] = steps[-1]._replace(images=kept)
    return kept.put(x, out)


class KeptImages:
    """Images of a batch that run a block.

    Consecutive images that are all kept or all dropped form a run. Splitting and concatenating runs is one copy each,
    forwards and backwards, where an index would fill a batch with zeros and add.

    Args:
        images (Sequence[bool]): Whether each image runs it.
    """

    def __init__(self, images: Sequence[bool]):
        runs = [(kept, len(list(run))) for kept, run in itertools.groupby(images)]
        self._lengths = [length for _, length in runs]
        self._kept = [i for i, (keeps, _) in enumerate(runs) if keeps]

    def take(self, x: Tensor) -> Tensor:
        """Return the kept images of a batch (N, ...)."""
        parts = x.split(self._lengths)
        # Concatenated even if it is one run: a saved view would keep all images in memory.
        return torch.cat([parts[i] for i in self._kept])

    def put(self, x: Tensor, kept: Tensor) -> Tensor:
        """Return a batch whose kept images are replaced.

        Args:
            x (Tensor): The batch, shape (N, ...).
            kept (Tensor): Other values of the kept images.
        """
        parts = list(x.split(self._lengths))
        for i, part in zip(self._kept, kept.split([self._lengths[i] for i in self._kept]), strict=True):
            parts[i] = part
        return torch.cat(parts)


def factor_for(factor: Tensor | float, dim: int, images: slice | int = slice(None)) -> Tensor | float:
    """Return the factor of a branch so that a tensor (N, ...) can be multiplied by it.

    Args:
        factor (Tensor | float): Factor of each image, shape (N,), or a number for all of them.
        dim (int): Number of dimensions of the tensor.
        images (slice | int): Images that the tensor consists of. Default: all.
    """
    return factor[images].view(-1, *[1] * (dim - 1)) if isinstance(factor, Tensor) else factor


def draw_factor(drop: nn.Module, x: Tensor, scale: Tensor | None, rate: float) -> Tensor:
    """Draw stochastic depth as a factor for each image, with random numbers in the precision of the plain branch.

    Args:
        drop (nn.Module): The module of stochastic depth, in training mode, which draws.
        x (Tensor): Input of the branch, shape (N, ...).
        scale (Tensor | None): Layer scale of the branch, which may raise its precision. If ``None``, there is none.
        rate (float): Rate at which images are dropped, less than 1.

    Returns:
        Tensor: 0 for a dropped image and 1 / (1 - rate) for a kept one, in full precision, shape (N,).
    """
    dtype = autocast_dtype(x) or x.dtype
    if scale is not None:
        dtype = torch.promote_types(dtype, scale.dtype)
    factor, full = drop(x.new_ones(len(x), *[1] * (x.dim() - 1), dtype=dtype)).flatten(), accumulator(x)
    # In half precision, the module rounds 1 / (1 - rate).
    return factor if factor.dtype is full else (factor != 0).to(full) / (1 - rate)


class _PassBy(torch.autograd.Function):
    """Copy of a bypassed block's input, which gives the parameters of the block gradients of zero.

    The output is in memory of its own, as that of every block: what runs next may write to it, and autograd refuses
    that for a view.
    """

    @staticmethod
    def forward(ctx, x, *parameters):
        ctx.like = parameters
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    @uncompiled
    def backward(ctx, grad):
        if grad is None:  # no loss uses the output
            return (None,) * len(ctx.needs_input_grad)
        needed = zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        return grad, *(torch.zeros_like(p) if needs else None for p, needs in needed)
