"""The samples of rows of one training step, from which the preset ``sampled`` estimates weight gradients."""

import torch
from mmengine.dist import get_rank

from ..ops.common.autograd_function import Sample
from ..ops.common.uncompiled import uncompiled
from ..stochastic_backprop.masks import derive_seed
from ..stochastic_backprop.step_draws import next_pass

__all__ = ['RowDraws']


class RowDraws:
    """Draws of the row samples from which the preset ``sampled`` estimates gradients of weights.

    Each module has a draw of its own, so that errors of layers do not add up. It depends on the seed, the rank, the
    iteration, the module's name, and how often the module ran in this iteration.
    """

    def __init__(self):
        self._latest = {}

    @uncompiled
    def draw(self, name: str, ratio: float) -> Sample:
        """Draw the sample of the next run of a module.

        Args:
            name (str): Name of the module.
            ratio (float): Share of the rows, in (0, 1].

        Returns:
            Sample: The sample.
        """
        self._latest[name] = current = next_pass(self._latest.get(name))
        return Sample(ratio, derive_seed(torch.initial_seed(), get_rank(), *current, f'sample of {name}') / 2**63)
