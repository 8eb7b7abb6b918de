"""Gradient keep masks: the positions that keep their gradient (section 4, "How to sample the gradient keep mask?").

One base mask is drawn at the resolution of the deepest stage that uses SBP. Shallower stages get it enlarged by whole
blocks, so that a kept position of a stage is a kept 2x2 patch of the stage before it, and every layer of a forward
pass drops the same positions of the image (section 3.3.3). All images of a batch have the same mask.

Masks are drawn on the CPU whatever the device of the features: the base mask has a few thousand entries, the same
(seed, rank, step) then gives the same mask on every kind of device, and the number of kept positions is known without
waiting for a GPU.
"""

import functools
import hashlib
import math
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    'SAMPLERS',
    'Positions',
    'derive_seed',
    'format_keep_ratio',
    'grid_positions',
    'level_positions',
    'mask_generator',
    'parse_keep_ratio',
    'positions',
    'sample_mask',
    'stage_masks',
    'token_positions',
]

_HAS_CUDA = torch.backends.cuda.is_built()  # without it, torch cannot ask whether a graph is captured

SAMPLERS = ('grid', 'random')

# Every ratio with two decimals is a lattice of at most 100 residues.
_MAX_DENOMINATOR = 100


class Positions(NamedTuple):
    """Kept and dropped positions of one feature map, as flat indices ``h * width + w``.

    Attributes:
        keep (Tensor): Kept positions, int64, shape (K,), sorted.
        drop (Tensor): Dropped positions, int64, shape (height * width - K,), sorted.
    """

    keep: Tensor
    drop: Tensor


def parse_keep_ratio(ratio: float) -> Fraction:
    """Return the keep ratio r (section 3.2.1) as the fraction p/q that masks of any size honour exactly.

    Args:
        ratio (float): Keep ratio in (0, 1], within 5e-5 of a fraction with a denominator of at most 100.

    Returns:
        Fraction: The ratio.

    Raises:
        ValueError: If the ratio is out of range, or no such fraction is near enough. The message names the nearest two.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < ratio <= 1:
        hint = 'without quotes' if isinstance(ratio, str) else 'the paper uses 0.5'
        raise ValueError(f'keep_ratio={ratio!r} must be a number in (0, 1]; {hint}')
    ratio = ratio if isinstance(ratio, Fraction) else float(ratio)
    fraction = Fraction(ratio).limit_denominator(_MAX_DENOMINATOR)
    if fraction == 0 or abs(fraction - ratio) > 5e-5:
        numerators = ((q, p) for q in range(1, _MAX_DENOMINATOR + 1) for p in (int(ratio * q), int(ratio * q) + 1))
        candidates = {Fraction(min(max(p, 1), q), q) for q, p in numerators}
        nearest = sorted(candidates, key=lambda c: abs(c - ratio))[:2]
        names = ' or '.join(f'{float(c):.6g} (= {c})' for c in nearest)
        raise ValueError(f'keep_ratio={ratio!r} is not a fraction p/q with q <= {_MAX_DENOMINATOR}; nearest: {names}')
    return fraction


def format_keep_ratio(ratio: float) -> str:
    """Return a keep ratio as it is used: the number as given or, if it is rounded, the fraction.

    Args:
        ratio (float): Keep ratio, see :func:`parse_keep_ratio`.
    """
    fraction = parse_keep_ratio(ratio)
    return f'{ratio:g}' if Fraction(f'{ratio:g}') == fraction else f'{fraction}'


def mask_generator(seed: int, rank: int, step: int, repeat: int = 0, purpose: str = '') -> torch.Generator:
    """Return a CPU generator that depends only on the arguments, so that a resumed run continues the sequence.

    Args:
        seed (int): Seed of the run.
        rank (int): Rank of the process; ranks draw different masks.
        step (int): Training step.
        repeat (int): Number of the forward pass within the step. Default: 0.
        purpose (str): What is drawn; draws with different purposes are independent. Masks have ''. Default: ''.

    Returns:
        torch.Generator: The generator.
    """
    return torch.Generator('cpu').manual_seed(derive_seed(seed, rank, step, repeat, purpose))


def derive_seed(seed: int, rank: int, step: int, repeat: int = 0, purpose: str = '') -> int:
    """Return the seed of :func:`mask_generator`, whose arguments these are: a hash of them, evenly spread below 2**63.

    Raises:
        RuntimeError: If a CUDA graph is captured. Draws are made on the host, and are no part of a graph: each replay
            would repeat them, and copy positions from memory of the host that others use by then.
    """
    if _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            'a CUDA graph is captured of a model that draws positions, images or rows on the host, which a graph does '
            "not repeat; leave the captured modules out, LeanHook(modules=[...]), or write preset='exact' with "
            'skip_dropped_images=False'
        )
    digest = hashlib.blake2b(f'{seed}/{rank}/{step}/{repeat}{purpose}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') >> 1


def sample_mask(height: int, width: int, ratio: float, sampler: str, generator: torch.Generator) -> Tensor:
    """Draw one mask.

    ``grid`` keeps evenly spaced diagonals: the residues t of (i + j + phase) mod q with (t * p) mod q < p. For r = 1/n
    that is every n-th diagonal, for r = 1 - 1/n its complement. Only the phase is random. ``random`` keeps
    round(r * height * width) positions drawn without replacement.

    Args:
        height (int): Number of rows.
        width (int): Number of columns.
        ratio (float): Keep ratio, see :func:`parse_keep_ratio`.
        sampler (str): 'grid' or 'random'.
        generator (torch.Generator): Source of randomness, on the CPU.

    Returns:
        Tensor: bool, shape (height, width), True where the gradient is kept.

    Raises:
        ValueError: If the sampler is unknown or the ratio cannot be honoured.
    """
    fraction = parse_keep_ratio(ratio)
    p, q = fraction.numerator, fraction.denominator
    if sampler == 'grid':
        phase = torch.randint(q, (), generator=generator, device='cpu')
        diagonal = torch.arange(height, device='cpu')[:, None] + torch.arange(width, device='cpu')
        return (diagonal + phase) % q * p % q < p
    if sampler == 'random':
        # The same draw serves every ratio of a step: a smaller kept set is part of a larger one.
        order = torch.randperm(height * width, generator=generator, device='cpu')
        mask = torch.zeros(height * width, dtype=torch.bool, device='cpu')
        mask[order[: round(fraction * height * width)]] = True
        return mask.view(height, width)
    raise ValueError(f'sampler={sampler!r} is unknown; choose one of {SAMPLERS}')


def stage_masks(sizes: list[tuple[int, int]], ratio: float, sampler: str, generator: torch.Generator) -> list[Tensor]:
    """Sample one mask for successive stages, each of half the resolution of the one before.

    Sizes need not be divisible by two: the base mask is drawn large enough to cover the last row and column of every
    stage, and cropped.

    Args:
        sizes (list[tuple[int, int]]): (height, width) of each stage's feature map, shallow to deep.
        ratio (float): Keep ratio.
        sampler (str): 'grid' or 'random'.
        generator (torch.Generator): Source of randomness, on the CPU.

    Returns:
        list[Tensor]: A bool mask of shape (height, width) for each stage.
    """
    factors = [2 ** (len(sizes) - 1 - i) for i in range(len(sizes))]
    base_height = max(math.ceil(h / f) for (h, _), f in zip(sizes, factors, strict=True))
    base_width = max(math.ceil(w / f) for (_, w), f in zip(sizes, factors, strict=True))
    base = sample_mask(base_height, base_width, ratio, sampler, generator)
    return [
        base.repeat_interleave(f, 0).repeat_interleave(f, 1)[:h, :w].contiguous()
        for (h, w), f in zip(sizes, factors, strict=True)
    ]


def level_positions(
    sizes: list[tuple[int, int]], ratio: float, sampler: str, generator: torch.Generator, device: torch.device | str
) -> Positions:
    """Sample kept and dropped positions of the tokens of several maps, one map after another.

    The masks of the maps are aligned as those of stages are, from the largest map to the smallest.

    Args:
        sizes (list[tuple[int, int]]): (height, width) of each map, in the order of the tokens.
        ratio (float): Keep ratio, see :func:`stage_masks`.
        sampler (str): 'grid' or 'random'.
        generator (torch.Generator): Source of randomness, on the CPU.
        device (torch.device | str): Device of the indices.

    Returns:
        Positions: Indices of the tokens.
    """
    order = sorted(range(len(sizes)), key=lambda i: -math.prod(sizes[i]))
    masks = stage_masks([sizes[i] for i in order], ratio, sampler, generator)
    return positions(torch.cat([masks[order.index(i)].flatten() for i in range(len(sizes))])[None], device)


def positions(mask: Tensor, device: torch.device | str = 'cpu') -> Positions:
    """Return the kept and dropped indices of a mask, on the device of the features.

    Args:
        mask (Tensor): Mask, bool, shape (height, width), on the CPU.
        device (torch.device | str): Device of the indices. Default: 'cpu'.

    Returns:
        Positions: Kept and dropped flat indices.
    """
    indices = [m.flatten().nonzero()[:, 0] for m in (mask, ~mask)]
    if torch.device(device).type == 'cuda':
        # From pinned memory the copy is queued behind the running kernels instead of waiting for them.
        indices = [i.pin_memory().to(device, non_blocking=True) for i in indices]
    return Positions(*(i.to(device) for i in indices))


def grid_positions(mask: Tensor, device: torch.device | str = 'cpu') -> Positions:
    """Return the indices of a mask of the sampler ``grid``, see :func:`positions`.

    The grid has few phases, so masks repeat. Their indices are cached on the device and must not be changed in place.
    """
    return _of_grid(mask.numpy().tobytes(), *mask.shape, device)


@functools.lru_cache(maxsize=16)  # two phases, four stages, two sizes of images; 1 MB each, for the largest maps
def _of_grid(mask, height, width, device):
    return positions(torch.frombuffer(bytearray(mask), dtype=torch.bool).view(height, width), device)


def token_positions(positions: Positions, prefix: int) -> Positions:
    """Shift the positions of a map by the number of class and register tokens, which are always kept.

    Args:
        positions (Positions): Positions on the grid of patches.
        prefix (int): Number of tokens in front of those of the grid.

    Returns:
        Positions: Positions among all tokens.
    """
    if not prefix:
        return positions
    front = torch.arange(prefix, device=positions.keep.device)
    return Positions(torch.cat([front, positions.keep + prefix]), positions.drop + prefix)
