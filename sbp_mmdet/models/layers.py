"""Norms that the package's backbones share; names and shapes of their parameters are mmpretrain's."""

import torch
from torch import Tensor, nn

__all__ = ['GRN', 'LayerNorm2d']


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of a feature map.

    Args:
        num_channels (int): Number of channels C.
        eps (float): Added to the variance. Default: 1e-5.
        elementwise_affine (bool): Whether there are a weight and a bias. Default: True.
    """

    def __init__(self, num_channels: int, eps: float = 1e-5, elementwise_affine: bool = True):
        super().__init__(num_channels, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (N, C, H, W) over C."""
        out = self.tokens(x.permute(0, 2, 3, 1))
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return out.permute(0, 3, 1, 2).contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def tokens(self, x: Tensor) -> Tensor:
        """Normalise (..., C) over C."""
        return super().forward(x)


class GRN(nn.Module):
    """Global response normalisation of ConvNeXt V2 on (N, L, C) or (N, H, W, C).

    Args:
        num_channels (int): Number of channels C.
        eps (float): Added to the mean response. Default: 1e-6.
    """

    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.zeros(num_channels))
        self.beta = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel by its norm over all positions, relative to the other channels."""
        response = x.norm(p=2, dim=tuple(range(1, x.dim() - 1)), keepdim=True)
        response = response / (response.mean(dim=-1, keepdim=True) + self.eps)
        return x + self.gamma * (x * response) + self.beta
