"""Which training step a forward pass belongs to: masks are drawn from it, so that a resumed run continues them."""

import collections
from typing import NamedTuple

import torch
from mmengine.dist import get_rank
from mmengine.logging import MessageHub
from torch import Tensor

from .masks import mask_generator

__all__ = ['Step', 'Steps', 'generator_of', 'is_replay']


class Step(NamedTuple):
    """A forward pass.

    Attributes:
        iteration (int): Of mmengine's runner, which a resumed run continues; 0 without one.
        repeat (int): How many passes the iteration saw before this one (all passes, where there is no runner).
    """

    iteration: int
    repeat: int


def is_replay() -> bool:
    """Whether this pass runs inside a backward pass: it is somebody's checkpointing."""
    return torch._C._current_graph_task_id() != -1


def generator_of(step: Step, purpose: str = '') -> torch.Generator:
    """What this rank's masks of a step are drawn from, or whatever else the purpose names."""
    return mask_generator(torch.initial_seed(), get_rank(), *step, purpose)


class Steps:
    """Counts the forward passes of a module in training."""

    def __init__(self):
        self._latest = None
        self._passes = collections.deque(maxlen=16)  # the last ones: data pointer of the input, step

    def of(self, x: Tensor) -> Step:
        """The step of a pass that begins now.

        A replay has to keep as many positions as the first time, so it gets the step of the pass over the same input.

        Args:
            x (Tensor): The input.

        Returns:
            Step: Iteration and repeat.
        """
        replay = is_replay()
        if replay:
            for pointer, step in reversed(self._passes):
                if pointer == x.data_ptr():
                    return step
        iteration = MessageHub.get_current_instance().get_info('iter', 0)
        same = self._latest is not None and self._latest.iteration == iteration
        self._latest = Step(iteration, self._latest.repeat + 1 if same else 0)
        if not replay:
            self._passes.append((x.data_ptr(), self._latest))
        return self._latest
