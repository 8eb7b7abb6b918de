"""Which variant of a detector fits into a GPU: the config as it is, or the first preset that does."""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from mmengine.config import Config

from ..presets import PRESETS
from .variants import NotApplicable, piece_change

__all__ = [
    'CONTEXT',
    'MARGIN',
    'ORDER',
    'WORKSPACES',
    'Row',
    'answer',
    'most_counts',
    'needed',
    'parse_bytes',
    'parse_size',
    'plan',
]

# On top of the counted bytes, fitted to what mmdet's authors measured on GPUs (research/zoo_memory.py): what kernels
# use inside themselves, which grows with the maps and is this much for any model.
MARGIN = 0.08
WORKSPACES = 384 * 2**20
# CUDA's context, by estimate: those figures are without it.
CONTEXT = 0.6e9

# In the order in which they are tried: each costs more time than the one before.
ORDER = ('exact', 'exact_min', 'int8', 'sbp')
_ALL_PIECES = ('cp-heads', 'cp-transformer', 'cp-rpn', 'cp-neck')
# Pieces beside a preset. 'exact_min' follows 'exact' in place of them.
_LADDERS = dict.fromkeys(ORDER, ((), ('cp-heads',), _ALL_PIECES, (*_ALL_PIECES, 'adamw8bit')))
_LADDERS |= dict(exact=((),), exact_min=((), ('adamw8bit',)))


class Row(NamedTuple):
    """A variant that was looked at.

    Attributes:
        variant (str): Preset and pieces.
        gradients (str): 'exact', 'int8' or 'sbp'; in mixed precision where the config has none, ', fp16'.
        need (int): Bytes of GPU memory.
        fits (bool): Whether that is within the budget.
        allocated (int): Bytes of the tensors at the peak, as ``torch.cuda.max_memory_allocated`` would have them.
        reserved (int): Bytes that torch takes where it can, as ``nvidia-smi`` would show them beside the context.
        expandable (int): Bytes of GPU memory that are needed with ``expandable_segments:True``.
    """

    variant: str
    gradients: str
    need: int
    fits: bool
    allocated: int = 0
    reserved: int = 0
    expandable: int = 0


def parse_bytes(text: str) -> int:
    """Read a budget.

    Args:
        text (str): Number and unit: '8GiB', '7.5 GB', '6000MiB'.

    Returns:
        int: Bytes.

    Raises:
        ValueError: If it cannot be read, or is not positive.
    """
    match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*', str(text), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(
            f"budget {text!r} cannot be read; give a number and a unit: 24GiB for a card that is sold as '24 GB', or "
            '7.5GB for billions of bytes'
        )
    unit = match[2].lower()
    return int(float(match[1]) * (1024 if 'i' in unit else 1000) ** (1 + 'kmgt'.index(unit[0])))


def parse_size(text: str) -> tuple[int, int]:
    """Read the size of an image.

    Args:
        text (str): Height and width: '800x1333'.

    Returns:
        tuple[int, int]: Height and width.

    Raises:
        ValueError: If it cannot be read, or a side is below 32 pixels.
    """
    match = re.fullmatch(r'\s*(\d+)\s*[x,]\s*(\d+)\s*', str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f'size {text!r} cannot be read; give height and width, such as 800x1333')
    height, width = int(match[1]), int(match[2])
    if min(height, width) < 32:
        raise ValueError(f'size {text!r} is too small for a detector; both sides must be 32 or more')
    return height, width


def needed(row: dict, ddp: bool = False, held_by: str = 'capacity') -> int:
    """Bytes of GPU memory that a variant needs.

    Args:
        row (dict): Of ``measure_detector``.
        ddp (bool): With the buckets of distributed training, which hold all gradients once more. Default: False.
        held_by (str): 'capacity', or 'expandable' for ``expandable_segments:True``. Default: 'capacity'.

    Returns:
        int: What the caching allocator has to hold and the margin of the peak, plus workspaces and CUDA's context.
    """
    buckets = row['gradients'] if ddp else 0
    return int(row[held_by] + buckets + (row['peak'] + buckets) * MARGIN + WORKSPACES + CONTEXT)


def plan(
    config: Config,
    budget: int,
    measure: Callable[[str], dict],
    presets: Collection[str],
    *,
    ddp: bool = False,
    eight_bit: bool = False,
) -> list[Row]:
    """Look at variants until it is known which fit.

    Where the config fits as it is, that is all. Otherwise checkpointing is looked at, and for each preset the pieces
    that make it fit, the cheapest first; behind the exact presets, mixed precision if the config has none.

    Args:
        config (Config): A plain one, see :func:`.variants.plain`.
        budget (int): Bytes of the GPU.
        measure (Callable): Gives ``measure_detector``'s row of a variant.
        presets (Collection[str]): Those that apply to the model.
        ddp (bool): See :func:`needed`. Default: False.
        eight_bit (bool): Consider 8-bit optimizer states too. Default: False.

    Returns:
        list[Row]: In the order of the answer: 'none' and 'with_cp', then for each preset the one that fits, or the
        smallest.
    """

    def look(variant):
        name, *pieces = variant.split('+')
        gradients, row = PRESETS[name].gradients, measure(variant)
        need, expandable = (needed(row, ddp, held_by) for held_by in ('capacity', 'expandable'))
        gradients = f'{gradients}, fp16' if 'amp' in pieces else gradients
        return Row(variant, gradients, need, need <= budget, row['peak'], row['reserved'], expandable)

    rows = [look('none')]
    if rows[0].fits:
        return rows
    if 'with_cp' in presets:
        rows.append(look('with_cp'))
    for name in ORDER:
        if name in presets:
            variants = [v for v in dict.fromkeys(_ladder(config, name)) if eight_bit or 'adamw8bit' not in v]
            rows.append(_first_that_fits(variants, look))
        if name == 'exact_min':  # what follows drops more than half precision does
            rows += _in_half(config, look, presets)
    return rows


def most_counts(presets: Collection[str]) -> int:
    """Return the largest number of variants that :func:`plan` looks at."""
    return 4 + sum(len(_LADDERS[name]) for name in ORDER if name in presets)


def _in_half(config, look, presets):
    """Mixed precision, alone or else with exact gradients in less memory, for a config in full precision."""
    try:
        piece_change(config, ['amp'])
    except NotApplicable:
        return []
    names = ['none', *(name for name in ('exact', 'exact_min') if name in presets)]
    return [_first_that_fits([f'{name}+amp' for name in names], look)]


def _ladder(config, name):
    """Yield the variants of a preset from cheap to lean, without the pieces that do not apply to the model."""
    for pieces in _LADDERS[name]:
        found = [name]
        for piece in pieces:
            try:
                piece_change(config, [piece])
                found.append(piece)
            except NotApplicable:
                continue
        yield '+'.join(found)


def _first_that_fits(variants, look):
    """Return the row of the first variant that fits, or else the smallest: a piece may cost more than it saves."""
    rows = []
    for variant in variants:
        rows.append(look(variant))
        if rows[-1].fits:
            return rows[-1]
    return min(rows, key=lambda row: row.need)


def answer(rows: list[Row]) -> Row | None:
    """Return the first row that fits; 'with_cp' only where nothing else with exact gradients fits.

    Args:
        rows (list[Row]): Variants, the cheapest first.

    Returns:
        Row | None: The row, or ``None`` if nothing fits.
    """
    fits = [row for row in rows if row.fits]
    return next((row for row in fits if row.gradients == 'exact' and row.variant != 'with_cp'), next(iter(fits), None))
