"""A part of the input of a module, on which gradients are compared where a CPU would take long for the whole."""

import math

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ['first_part']

# Numbers that a part has at least, so that operations run in several chunks or strips. A GPU takes the whole: it is
# fast, and its kernels are chosen by size.
_LEAST = {'cpu': 2**22}
_IMAGES = 2  # that a part has at least, so that it shows if one image gets what belongs to another
# Rows are left out in multiples of these: sizes stay even or odd, and windows of 7 rows stay padded or not.
_MAP_ROWS, _TOKEN_ROWS = 4, 28


def first_part(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Return the first images of a module's input, and of these the first rows.

    Args:
        args (tuple): Positional arguments.
        kwargs (dict): Arguments by name.

    Returns:
        tuple | None: Arguments of a smaller call. If ``None``, the input is small, not on a CPU, or cannot be cut.
    """
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if not tensors or any(x.dim() < 2 or not x.is_floating_point() or len(x) != len(tensors[0]) for x in tensors):
        return None
    number, total = len(tensors[0]), sum(x.numel() for x in tensors)
    least = _LEAST.get(tensors[0].device.type, math.inf)
    if total <= least:
        return None
    images = min(max(math.ceil(number * least / total), _IMAGES), number)
    share = min(least * number / (total * images), 1)
    sizes = [x for x in (*args, *kwargs.values()) if _is_size(x)]
    heights = _fewer_rows(tensors, sizes, share)
    if images == number and not heights:
        return None

    def cut(value):
        if _is_size(value):
            return (heights.get(value[0], value[0]), value[1])
        return tree_map(lambda x: _cut(x, images, heights, sizes) if isinstance(x, Tensor) else x, value)

    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def _fewer_rows(tensors, sizes, share) -> dict[int, int]:
    """Return the rows that are left of maps by their rows."""
    if all(x.dim() == 4 for x in tensors):
        rows, step = [x.shape[2] for x in tensors], _MAP_ROWS
    elif len(sizes) == 1 and all(x.dim() == 3 and x.shape[1] == math.prod(sizes[0]) for x in tensors):
        rows, step = [sizes[0][0]], _TOKEN_ROWS
    else:
        return {}
    most = max(rows)
    left = most - (most - math.ceil(most * share)) // step * step
    return {} if left == most else {n: math.ceil(n * left / most) for n in rows}


def _cut(x, images, heights, sizes):
    x = x[:images]
    if not heights:
        return x
    if x.dim() == 4:
        return x[:, :, : heights[x.shape[2]]]
    return x[:, : heights[sizes[0][0]] * sizes[0][1]]


def _is_size(value):
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int for n in value)
