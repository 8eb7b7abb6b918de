"""The settings of Stochastic Backpropagation, checked."""

import dataclasses
from collections.abc import Sequence

from .masks import SAMPLERS, parse_keep_ratio

__all__ = ['ATTENTION_MODES', 'SBPConfig']

ATTENTION_MODES = ('qkv', 'query', 'head')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SBPConfig:
    """Settings of Stochastic Backpropagation: what is kept, and where.

    Args:
        keep_ratio (float | Sequence[float]): The keep ratio r in (0, 1] (section 3.2.1), one for all thinned blocks or
            one for each of them, from shallow to deep (section 4, "How much gradients should be kept?"). Default: 0.5.
        sampler (str): How the mask is drawn, 'grid' or 'random' (section 4, "How to sample the gradient keep mask?").
            Default: 'grid'.
        blocks (Sequence[int] | None): How many leading blocks of each stage are thinned. In a network with one stage
            (ViT) the number counts the last blocks instead. If ``None``, the paper's choice for this architecture, see
            :mod:`.layers`. Default: None.
        downsample (bool): Whether the downsampling layers between stages are thinned too, except the one into the last
            stage (section 3.2.2). They do not depend on ``blocks``. Default: True.
        attention (str): What attention layers drop, 'qkv', 'query' or 'head' (section 4, "How to apply SBP on MHSA?").
            Default: 'qkv'.

    Raises:
        ValueError: If a value is invalid. The message names the key, the value and the choices.

    Example:
        >>> config = SBPConfig(keep_ratio=0.25, sampler='random')
    """

    keep_ratio: float | Sequence[float] = 0.5
    sampler: str = 'grid'
    blocks: Sequence[int] | None = None
    downsample: bool = True
    attention: str = 'qkv'

    def __post_init__(self):
        for key, choices in (('sampler', SAMPLERS), ('attention', ATTENTION_MODES)):
            if getattr(self, key) not in choices:
                raise ValueError(f'{key}={getattr(self, key)!r} is unknown; choose one of {choices}')
        if not isinstance(self.downsample, bool):
            raise ValueError(f'downsample={self.downsample!r} must be True or False')
        for ratio in self.keep_ratio if self.has_ratio_per_block else [self.keep_ratio]:
            parse_keep_ratio(ratio)
        if not self.has_ratio_per_block:  # a fraction or a number of NumPy
            object.__setattr__(self, 'keep_ratio', float(self.keep_ratio))

    @property
    def has_ratio_per_block(self) -> bool:
        """Whether ``keep_ratio`` lists one ratio for each thinned block."""
        return isinstance(self.keep_ratio, Sequence) and not isinstance(self.keep_ratio, str)
