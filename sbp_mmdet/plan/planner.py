"""The variants of a detector that fit into a GPU: the config itself, or presets in the order of their costs."""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from mmengine.config import Config

from ..checkpointing import DrawsInside
from ..presets import PRESETS
from .variants import NotApplicable, find_piece_changes

__all__ = [
    'CONTEXT',
    'MARGIN',
    'ORDER',
    'OWN',
    'WORKSPACES',
    'Row',
    'choose_row',
    'count_needed_bytes',
    'count_update_bytes',
    'most_counts',
    'parse_bytes',
    'parse_size',
    'plan',
]

# Memory in addition to the counted bytes, fitted to what mmdet's authors measured on GPUs (research/zoo_memory.py).
# MARGIN is the share of the peak that kernels use inside themselves, and WORKSPACES a constant for any model.
MARGIN = 0.08
WORKSPACES = 384 * 2**20
# Estimate of CUDA's context, which is not part of those figures.
CONTEXT = 0.6e9

OWN = 'as it is'  # name of the variant of a config with its own preset or checkpoints, which is no plain model

# Presets in the order in which they are tried: each costs more time or exactness than the one before.
ORDER = ('exact', 'exact_min', 'int8', 'sbp')
_ALL_PIECES = ('cp-heads', 'cp-transformer', 'cp-rpn', 'cp-neck')
# Pieces beside a preset. 'exact_min' follows 'exact' in place of them.
_LADDERS = dict.fromkeys(ORDER, ((), ('cp-heads',), _ALL_PIECES, (*_ALL_PIECES, 'adamw8bit')))
_LADDERS |= dict(exact=((),), exact_min=((), ('adamw8bit',)))
# Layers of a transformer that 'sbp' drops positions in are not checkpointed.
_LADDERS['sbp'] = (*_LADDERS['sbp'][:2], ('cp-heads', 'cp-rpn', 'cp-neck'), *_LADDERS['sbp'][2:])


class Row(NamedTuple):
    """A variant that was counted. All numbers are bytes.

    Attributes:
        variant (str): Preset and pieces.
        gradients (str): 'exact', 'int8' or 'sbp', followed by ', fp16' if the variant adds mixed precision.
        need (int): Needed GPU memory.
        fits (bool): Whether the need is within the budget.
        allocated (int): Tensors at the peak, as in ``torch.cuda.max_memory_allocated``. Default: 0.
        reserved (int): Memory that torch reserves if there is enough, as ``nvidia-smi`` shows it without the context.
            Default: 0.
        expandable (int): Needed GPU memory with ``expandable_segments:True``. Default: 0.
        update (int): See :func:`count_update_bytes`. Default: 0.
    """

    variant: str
    gradients: str
    need: int
    fits: bool
    allocated: int = 0
    reserved: int = 0
    expandable: int = 0
    update: int = 0


def parse_bytes(text: str) -> int:
    """Parse an amount of memory.

    Args:
        text (str): Number and unit: '8GiB', '7.5 GB', '6000MiB'.

    Returns:
        int: Number of bytes.

    Raises:
        ValueError: If the text cannot be read, or the number is not positive.
    """
    match = re.fullmatch(r'\s*(-?\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*', str(text), re.IGNORECASE)
    if match and float(match[1]) <= 0:
        raise ValueError(f'budget {text!r} must be positive')
    if not match:
        raise ValueError(
            f"budget {text!r} cannot be read; give a number and a unit: 24GiB for a card that is sold as '24 GB', or "
            '7.5GB for billions of bytes'
        )
    unit = match[2].lower()
    return int(float(match[1]) * (1024 if 'i' in unit else 1000) ** (1 + 'kmgt'.index(unit[0])))


def parse_size(text: str) -> tuple[int, int]:
    """Parse the size of an image.

    Args:
        text (str): Height and width in pixels: '800x1333'.

    Returns:
        tuple[int, int]: Height and width.

    Raises:
        ValueError: If the text cannot be read, or a side is below 32 pixels.
    """
    match = re.fullmatch(r'\s*(\d+)\s*[x,]\s*(\d+)\s*', str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f'size {text!r} cannot be read; give height and width, such as 800x1333')
    height, width = int(match[1]), int(match[2])
    if min(height, width) < 32:
        raise ValueError(f'size {text!r} is too small for a detector; both sides must be 32 or more')
    return height, width


def count_needed_bytes(row: dict, ddp: bool = False, held_by: str = 'capacity') -> int:
    """Return the GPU memory that a variant needs.

    Args:
        row (dict): Result of ``measure_detector``.
        ddp (bool): Whether to add the buckets of distributed training, a second copy of all gradients. Default: False.
        held_by (str): 'capacity', or 'expandable' for ``expandable_segments:True``. Default: 'capacity'.

    Returns:
        int: Bytes that the caching allocator has to reserve, the margin, workspaces, and CUDA's context.
    """
    buckets = row['gradients'] if ddp else 0
    return int(row[held_by] + buckets + (row['peak'] + buckets) * MARGIN + WORKSPACES + CONTEXT)


def count_update_bytes(row: dict, ddp: bool = False) -> int:
    """Return the least GPU memory that a variant needs with any batch: that of the optimizer's step.

    Args:
        row (dict): Result of ``measure_detector``.
        ddp (bool): See :func:`count_needed_bytes`. Default: False.

    Returns:
        int: Bytes of weights, gradients, states and temporary tensors of the optimizer, the margin, workspaces, and
        CUDA's context.
    """
    held = row['peaks'].get('optimizer step', 0) + (row['gradients'] if ddp else 0)
    return int(held * (1 + MARGIN) + WORKSPACES + CONTEXT)


def plan(
    config: Config,
    budget: int,
    measure: Callable[[str], dict],
    presets: Collection[str],
    *,
    own: str | None = None,
    ddp: bool = False,
    eight_bit: bool = False,
    failed: Callable[[str, Exception], object] | None = None,
) -> list[Row]:
    """Count variants of a config until it is known which of them fit.

    If the config fits as it is, or its plain model does, nothing else is counted. Otherwise checkpointing is counted,
    and each preset with the pieces that make it fit, the cheapest first. Mixed precision follows the exact presets if
    the config has none.

    Args:
        config (Config): A plain config, see :func:`.variants.plain`.
        budget (int): Memory of the GPU, in bytes.
        measure (Callable): Returns the result of ``measure_detector`` for a variant.
        presets (Collection[str]): Presets that apply to the model.
        own (str | None): Gradients of the config's own preset, which is counted first, as the variant :data:`OWN`. If
            ``None``, it has none. Default: None.
        ddp (bool): See :func:`count_needed_bytes`. Default: False.
        eight_bit (bool): Whether to consider 8-bit optimizer states, too. Default: False.
        failed (Callable | None): Called with each variant whose step raises an error, and the error; the variant is
            left out. Errors of the config itself and of its plain model are raised. If ``None``, all are. Default:
            None.

    Returns:
        list[Row]: :data:`OWN`, if there is one, 'none' and 'with_cp', then for each preset the variant that fits, or
        the smallest one.
    """

    def count_variant(variant):
        name, *pieces = variant.split('+')
        gradients, row = own if variant == OWN else PRESETS[name].gradients, measure(variant)
        need, expandable = (count_needed_bytes(row, ddp, held_by) for held_by in ('capacity', 'expandable'))
        gradients = f'{gradients}, fp16' if 'amp' in pieces else gradients
        update = count_update_bytes(row, ddp)
        return Row(variant, gradients, need, need <= budget, row['peak'], row['reserved'], expandable, update)

    rows = []
    for variant in ('none',) if own is None else (OWN, 'none'):
        rows.append(count_variant(variant))
        if rows[-1].fits:
            return rows
    if 'with_cp' in presets:
        rows += _first_that_fits(['with_cp'], count_variant, failed)
    for name in ORDER:
        if name in presets:
            variants = [v for v in dict.fromkeys(_list_variants(config, name)) if eight_bit or 'adamw8bit' not in v]
            rows += _first_that_fits(variants, count_variant, failed)
        if name == 'exact_min':  # the presets that follow change gradients more than half precision does
            rows += _try_half_precision(config, count_variant, presets, failed)
    return rows


def most_counts(presets: Collection[str]) -> int:
    """Return the largest number of variants that :func:`plan` counts."""
    return 5 + sum(len(_LADDERS[name]) for name in ORDER if name in presets)


def _try_half_precision(config, count_variant, presets, failed):
    """Count mixed precision, alone and with exact presets, and return the first variant that fits in a list.

    The list is empty if the config has mixed precision already.
    """
    try:
        find_piece_changes(config, ['amp'])
    except NotApplicable:
        return []
    names = ['none', *(name for name in ('exact', 'exact_min') if name in presets)]
    return _first_that_fits([f'{name}+amp' for name in names], count_variant, failed)


def _list_variants(config, name):
    """Yield the variants of a preset from cheap to lean, without the pieces that do not apply to the model."""
    for pieces in _LADDERS[name]:
        variant = [name]
        for piece in pieces:
            try:
                find_piece_changes(config, [piece])
                variant.append(piece)
            except NotApplicable:
                continue
        yield '+'.join(variant)


def _first_that_fits(variants, count_variant, failed):
    """Return a list of the first variant that fits, or else the smallest, since a piece may cost more than it saves.

    Variants that checkpoint layers which drop positions cannot be trained, and are left out; so are those that fail.
    """
    rows = []
    for variant in variants:
        try:
            rows.append(count_variant(variant))
        except DrawsInside:
            continue
        except Exception as error:  # whatever a model's own code raises, for example in half precision
            if failed is None:
                raise
            failed(variant, error)
            continue
        if rows[-1].fits:
            return rows[-1:]
    return sorted(rows, key=lambda row: row.need)[:1]


def choose_row(rows: list[Row]) -> Row | None:
    """Return the first row that fits; 'with_cp' only where nothing else with exact gradients fits.

    Args:
        rows (list[Row]): Variants, the cheapest first.

    Returns:
        Row | None: The row, or ``None`` if nothing fits.
    """
    fits = [row for row in rows if row.fits]
    return next((row for row in fits if row.gradients == 'exact' and row.variant != 'with_cp'), next(iter(fits), None))
