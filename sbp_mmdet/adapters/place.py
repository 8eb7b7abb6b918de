"""What a changed module knows of itself: its settings, its place in the model, and the source of its draws."""

from typing import Any, NamedTuple

from ..presets import Settings
from ..stochastic_backprop.step_draws import StepDraws, TokenDraws
from .bound import Bound
from .row_draws import RowDraws

__all__ = ['Place']


class Place(NamedTuple):
    """State of a changed module: its settings, its place in the backbone, and the source of its random draws.

    Attributes:
        settings (Settings): Settings of the model.
        layer (tuple | None): Layer of the backbone, such as ``(stage, block)`` or ``(stage, 'downsample')``. If
            ``None``, no positions are dropped by stage. Default: None.
        draws (StepDraws | TokenDraws | None): Draws of its backbone, or draws of its own. Default: None.
        name (str): Name of the module in the model. Default: ''.
        row_draws (RowDraws | None): Draws of the sampled rows. Default: None.
        bound (Bound | None): Operations that are used now. Default: None.
        own_forward (Any): The forward that fairscale's checkpointing had set, restored on release. Default: None.
    """

    settings: Settings
    layer: tuple | None = None
    draws: StepDraws | TokenDraws | None = None
    name: str = ''
    row_draws: RowDraws | None = None
    bound: Bound | None = None
    own_forward: Any = None
