"""Which part of a detector is running."""

import functools

from torch import nn

from ..families import FAMILIES, Family, family_of, locate

__all__ = ['PartTracker', 'part_of', 'place_of']

# Of backbones that SBP does not apply to: ResNet counts its layers from 1, the others count from 0.
_STOCK = (
    (r'layer(?P<from1>\d)', 'stage {}'),
    (r'stages\.(?P<from0>\d)', 'stage {}'),
    (r'norm(?P<from0>\d)', 'output norms'),
    (r'patch_embed|stem|conv1|bn1|maxpool', 'stem'),
)
_OTHERS = (
    (r'neck', 'neck'),
    (r'rpn_head', 'RPN'),
    (r'roi_head\.bbox\w*', 'box heads'),
    (r'roi_head\.mask\w*', 'mask heads'),
    (r'roi_head', 'RoI'),
)
# Methods of heads that are no forward pass but make tensors.
_METHODS = ('loss', 'loss_and_predict')


def part_of(name: str, family: Family | None = None) -> str:
    """The part of a detector that a module belongs to.

    Args:
        name (str): Name of the module.
        family (Family | None): Of the backbone; None: the first one whose names fit. Default: None.

    Returns:
        str: 'stem', 'stage 1' to 'stage 4', 'output norms', 'neck', 'RPN', 'box heads', 'mask heads', 'RoI', or the
        first component of the name.
    """
    if name.startswith('backbone.'):
        return place_of(name.removeprefix('backbone.'), family)[0]
    found = locate(_OTHERS, name)
    return found[0] if found else name.split('.')[0]


def place_of(name: str, family: Family | None = None) -> tuple[str, int | None]:
    """The part of a backbone that a module belongs to.

    Args:
        name (str): Name of the module in the backbone.
        family (Family | None): See :func:`part_of`. Default: None.

    Returns:
        tuple[str, int | None]: The part, 'backbone' where no pattern fits, and its stage, counted from 1.
    """
    families = [family] if family else FAMILIES.values()
    for patterns in (*(family.parts for family in families), _STOCK):
        if found := locate(patterns, name):
            return found
    return 'backbone', None


class PartTracker:
    """Follows a detector through its step.

    Args:
        model (nn.Module): The detector; hooks are put on it until :meth:`remove`.

    Attributes:
        in_network (bool): Whether the forward pass of a submodule is running, and it is not a loss.
    """

    def __init__(self, model: nn.Module):
        self._stack, self._running, self._handles, self._wrapped = [], [], [], []
        family = family_of(getattr(model, 'backbone', None))
        for name, module in model.named_modules():
            if name:
                enter = functools.partial(self._enter, part_of(name, family), 'loss' in name.split('.')[-1])
                self._handles.append(module.register_forward_pre_hook(enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        for name, module in model.named_children():
            for method in _METHODS:
                if hasattr(module, method):
                    self._wrap(module, method, part_of(name))

    def current(self) -> str:
        """The part that is running; 'other' outside of all."""
        return self._stack[-1] if self._stack else 'other'

    @property
    def in_network(self) -> bool:
        return bool(self._running) and not any(self._running)

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        for module, method, previous in reversed(self._wrapped):
            delattr(module, method) if previous is None else setattr(module, method, previous)

    def _enter(self, part, is_loss, module, inputs):
        self._stack.append(part)
        self._running.append(is_loss)

    def _leave(self, module, inputs, output):
        self._stack.pop()
        self._running.pop()

    def _wrap(self, module, method, part):
        original = getattr(module, method)

        @functools.wraps(original)
        def run(*args, **kwargs):
            self._stack.append(part)
            try:
                return original(*args, **kwargs)
            finally:
                self._stack.pop()

        self._wrapped.append((module, method, module.__dict__.get(method)))
        setattr(module, method, run)
