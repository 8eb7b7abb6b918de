"""Kinds of modules: modules of one kind have the same settings and shapes, and one of them is compared for all."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..adapters import LeanState

__all__ = ['describe_tensors', 'settings_of']


def settings_of(module: nn.Module, state: LeanState) -> tuple:
    """Return the settings that distinguish modules of a class, without weights, names and rates of stochastic depth.

    Args:
        module (nn.Module): A changed module.
        state (LeanState): Its state, with its preset and keep ratio.

    Returns:
        tuple: Settings of the module and of all modules inside it, as a hashable value.
    """
    values = [state.settings.preset.name, state.draws is not None and state.draws.ratio(state.layer)]
    for m in module.modules():
        own = [
            (key, _plain(key, value)) for key, value in sorted(vars(m).items()) if key[0] != '_' and _is_plain(value)
        ]
        shapes = [(key, p.shape, p.dtype, p.requires_grad) for key, p in m._parameters.items() if p is not None]
        values.append((type(m).__name__, tuple(own), tuple(shapes)))
    return tuple(values)


def _plain(key, value):
    return bool(value) if key in ('drop_prob', 'p') else value


def _is_plain(value):
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def describe_tensors(tree) -> tuple:
    """Return shapes, precisions and layouts of nested arguments, as a hashable value.

    Args:
        tree: Arguments of a module, nested.
    """
    leaves, structure = tree_flatten(tree)
    descriptions = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            last = leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)
            descriptions.append((leaf.shape, leaf.dtype, leaf.is_contiguous(), last))
        else:
            descriptions.append(leaf if _is_plain(leaf) else type(leaf).__name__)
    return (str(structure), tuple(descriptions))
