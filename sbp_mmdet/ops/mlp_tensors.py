"""What the channel MLP is given, stores and returns, by name."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Positions
from .convs import Conv
from .neighbours import SavedPositions
from .operation import check_form, gradients_of
from .storage import Stored

__all__ = ['MLPGradients', 'MLPSaved', 'MLPSettings', 'MLPTensors']


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """Of :func:`.mlp.channel_mlp`.

    Attributes:
        eps (float): Of the layer norm. Default: 1e-6.
        approximate (str): Of the GELU, 'none' or 'tanh'. Default: 'none'.
        recompute (bool): Compute the hidden layer again in the backward pass instead of storing it. Default: False.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.
        dropped (str): What dropped positions send. 'zero': nothing. 'nearest' and 'pool': gradients by the activations
            of the kept ones that they go with (``positions.nearest``), see :mod:`.neighbours`. The reference does not
            have 'nearest'. Default: 'zero'.
        implementation (str): 'fused', or 'reference': Algorithm 1 as the paper writes it. Default: 'fused'.
        activation (Callable | None): Of the reference alone, in place of the GELU. Default: None.
        chunk (int | None): Elements of the hidden layer that exist at a time; None: by the device. Default: None.
        compile (bool): Compile the bodies, see :mod:`.compiled`. Default: False.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.

    Raises:
        ValueError: For options that the form of implementation does not have.
    """

    eps: float = 1e-6
    approximate: str = 'none'
    recompute: bool = False
    storage: str = 'native'
    dropped: str = 'zero'
    implementation: str = 'fused'
    activation: Callable[[Tensor], Tensor] | None = None
    chunk: int | None = None
    compile: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self):
        check_form(self.implementation, recompute=self.recompute, storage=self.storage, dropped=self.dropped)
        if self.activation is not None and self.implementation == 'fused':
            raise ValueError(f"activation={self.activation!r} needs implementation='reference'; 'fused' has GELU")


class MLPTensors(NamedTuple):
    """What a channel MLP works on.

    Attributes:
        x (Tensor): Input of the norm, tokens (N, L, C) or a map (N, C, H, W).
        shortcut (Tensor): What the branch is added to, of the same shape.
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight1, bias1 (Tensor): First pointwise layer, shapes (D, C) and (D,).
        weight2, bias2 (Tensor): Second pointwise layer, shapes (C, D) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,). Default: None.
        factor (Tensor | None): Of the branch of each image (stochastic depth), shape (N,). Default: None.
        positions (Positions | None): Which positions are kept, for all images alike or for each; None: all.
            Default: None.
        conv (Conv | None): Where ``x`` comes from, so that ``recompute`` computes it again as well. Default: None.
    """

    x: Tensor
    shortcut: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor
    gamma: Tensor | None = None
    factor: Tensor | None = None
    positions: Positions | None = None
    conv: Conv | None = None


MLPGradients = gradients_of(MLPTensors, 'factor', 'positions', 'conv')


class MLPSaved(NamedTuple):
    """What the backward pass needs: x-hat (N, K, C), its reciprocal deviation (N * K, 1) and the hidden layer
    (N * K, D) of the kept rows, as far as they are stored, and what was given."""

    xhat: Stored
    rstd: Tensor | None
    hidden: Tensor | None
    positions: SavedPositions
    given: MLPTensors  # without maps and positions
    layout: torch.memory_format | None  # of ``x``, if it is a map
