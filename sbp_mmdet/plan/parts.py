"""Parts of a detector, such as stages, neck and heads, and which of them is running."""

import functools
import re
from collections.abc import Sequence

from torch import nn

from ..adapters import modules_bypassed_in

__all__ = ['PartTracker', 'part_of']

# Patterns of names in a backbone. The group 'from0' or 'from1' is the number of the stage, counted from 0 or 1.
_BACKBONE = (
    (r'downsample_layers\.0|patch_embed|(absolute_)?pos_embed|cls_token|reg_token|stem|conv1|bn1|maxpool', 'stem'),
    (r'layer(?P<from1>\d)', 'stage {}'),
    (r'(?:downsample_layers|stages)\.(?P<from0>\d)', 'stage {}'),
    (r'blocks|layers', 'stage 1'),
    (r'norm\d?|scale\d', 'output norms'),
)
_OTHERS = (
    (r'neck', 'neck'),
    (r'rpn_head', 'RPN'),
    (r'roi_head\.bbox\w*', 'box heads'),
    (r'roi_head\.mask\w*', 'mask heads'),
    (r'roi_head', 'RoI'),
)
# Methods of heads that make tensors outside of a forward pass.
_METHODS = ('loss', 'loss_and_predict')


def part_of(name: str) -> str:
    """Return the part of a detector that a module belongs to.

    Args:
        name (str): Name of the module.

    Returns:
        str: 'stem', 'stage 1' to 'stage 4', 'output norms', 'backbone', 'neck', 'RPN', 'box heads', 'mask heads',
        'RoI', or the first component of the name.
    """
    if name.startswith('backbone.'):
        return _located(_BACKBONE, name.removeprefix('backbone.')) or 'backbone'
    return _located(_OTHERS, name) or name.split('.')[0]


def _located(patterns: Sequence[tuple[str, str]], name: str) -> str | None:
    for pattern, part in patterns:
        if match := re.match(rf'(?:{pattern})(?:\.|$)', name):
            groups = match.groupdict()
            stage = int(groups['from0']) + 1 if groups.get('from0') else int(groups.get('from1') or 0)
            return part.format(stage)
    return None


def _modules_outside(model):
    """Yield names and modules that a model holds outside of its tree, as plain attributes or in a list of them.

    mmdet's detectors that are trained by distillation hold their teacher in this way.
    """
    seen = {*model.modules()}
    for prefix, owner in [*model.named_modules()]:
        for attribute, value in [*vars(owner).items()]:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, nn.Module) and one not in seen:
                    yield from one.named_modules(seen, f'{prefix}.{attribute}'.lstrip('.'))


class PartTracker:
    """Tracker of the part of a detector that is running.

    Args:
        model (nn.Module): The detector. Its modules, and those that it holds outside of its tree, get hooks; its heads
            get wrapped methods. Both stay.

    Attributes:
        in_network (bool): Whether the forward pass of a submodule is running that is no loss.
    """

    def __init__(self, model: nn.Module):
        self._stack, self._running = [], []
        bypassed = modules_bypassed_in(model)
        for name, module in model.named_modules():
            # Hooks on modules that a lean module bypasses would make it run their own code.
            if name and module not in bypassed:
                self._watch(module, part_of(name), 'loss' in name.split('.')[-1])
        for name, module in _modules_outside(model):
            self._watch(module, part_of(name), 'loss' in name.split('.')[-1])
        for name, module in model.named_children():
            for method in _METHODS:
                if hasattr(module, method):
                    self._wrap(module, method, part_of(name))

    def current(self) -> str:
        """Return the name of the part that is running, or 'other' outside of all parts."""
        return self._stack[-1] if self._stack else 'other'

    @property
    def in_network(self) -> bool:
        return bool(self._running) and not any(self._running)

    def _watch(self, module, part, is_loss):
        # Functions of this file, not partial ones: changed modules recognise hooks that change no feature map by that.
        def enter(module, inputs):
            self._stack.append(part)
            self._running.append(is_loss)

        def leave(module, inputs, output):
            self._stack.pop()
            self._running.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _wrap(self, module, method, part):
        original = getattr(module, method)

        @functools.wraps(original)
        def run(*args, **kwargs):
            self._stack.append(part)
            try:
                return original(*args, **kwargs)
            finally:
                self._stack.pop()

        setattr(module, method, run)
