"""Weight standardisation (https://arxiv.org/abs/1903.10520): convolutions whose weight has mean 0 and deviation 1.

For each output channel, with mean m and deviation s of its n weights w,

    v = (w - m) / (s + eps).

Plain code saves three copies of the weight for the backward pass. Operations save none: they compute v again.
"""

import torch
from torch import Tensor

from .precision import accumulator

__all__ = ['standardise', 'standardise_backward']


def standardise(weight: Tensor, eps: float) -> Tensor:
    """Return the standardised weight v of a convolution.

    Args:
        weight (Tensor): Weight w, shape (D, C, K, K).
        eps (float): Added to the deviation.
    """
    deviation, mean = _statistics(weight)
    return (weight - mean).div_(deviation.add_(eps))


def standardise_backward(weight: Tensor, eps: float, grad: Tensor) -> Tensor:
    """Compute the gradient of the weight w from that of the standardised weight v.

        dw = (dv - mean(dv) - (w - m) * sum(dv * (w - m)) / ((n - 1) * s * (s + eps))) / (s + eps)

    Where the deviation s is zero, it has no gradient, as in torch.

    Args:
        weight (Tensor): Weight w, shape (D, C, K, K).
        eps (float): Added to the deviation.
        grad (Tensor): Gradient of v, of the same shape.

    Returns:
        Tensor: Gradient of w, in full precision.
    """
    full = accumulator(weight)
    weight, grad = weight.to(full), grad.to(full)
    deviation, mean = _statistics(weight)
    centred, scale, number = weight - mean, deviation + eps, weight[0].numel()
    share = (grad * centred).sum((1, 2, 3), keepdim=True).div_(deviation * scale * (number - 1))
    share = share.masked_fill_(deviation == 0, 0)
    return (grad - grad.mean((1, 2, 3), keepdim=True)).sub_(centred.mul_(share)).div_(scale)


def _statistics(weight):
    """Return deviation and mean of the weights of each output channel, shape (D, 1, 1, 1), as mmcv computes them."""
    rows = weight.flatten(1)
    return [of(rows, 1).view(-1, 1, 1, 1) for of in (torch.std, torch.mean)]
