"""The layers of a backbone that are thinned, with their keep ratios.

The paper (appendix, "Experimental Settings") thins 3-3-6-0 of the 3-3-9-3 blocks of ConvNeXt-T, 3-3-21-0 of 3-3-27-3 of
ConvNeXt-B, and the last 8 of 12 blocks of a ViT (section 5.1).
"""

from collections.abc import Sequence
from numbers import Real

from .config import SBPConfig

__all__ = ['thinned_blocks', 'thinned_layers']

_CHOSEN_IN_THE_PAPER = {(3, 3, 9, 3): (3, 3, 6, 0), (3, 3, 27, 3): (3, 3, 21, 0)}


def thinned_blocks(depths: Sequence[int]) -> tuple[int, ...]:
    """Return how many leading blocks of each stage are thinned by default.

    Args:
        depths (Sequence[int]): Number of blocks in each stage.

    Returns:
        tuple[int, ...]: The paper's choice if there is one for these depths; otherwise all blocks except those of the
        last stage.
    """
    depths = tuple(depths)
    return _CHOSEN_IN_THE_PAPER.get(depths) or ((*depths[:-1], 0) if len(depths) > 1 else depths)


def thinned_layers(
    config: SBPConfig, depths: Sequence[int], blocks: Sequence[int], from_end: bool = False
) -> dict[tuple, float]:
    """Return the layers of a backbone that are thinned, with their keep ratios.

    Args:
        config (SBPConfig): The settings.
        depths (Sequence[int]): Number of blocks in each stage.
        blocks (Sequence[int]): Thinned blocks of each stage if ``config.blocks`` is ``None``.
        from_end (bool): Whether ``blocks`` counts the last blocks of a stage. Default: False.

    Returns:
        dict[tuple, float]: Keep ratios by layer: ``(stage, block)``, or ``(stage, 'downsample')`` for the layer that
        leads into the stage. Stages count from 0. Layers with a ratio of 1 are omitted.

    Raises:
        ValueError: If ``blocks`` or ``keep_ratio`` do not fit the depths.
    """
    blocks = _check_blocks(blocks if config.blocks is None else config.blocks, depths)
    all_ratios = _ratio_per_block(config, blocks)
    ratios = iter(all_ratios)
    layers, latest = {}, None
    for i, (number, depth) in enumerate(zip(blocks, depths, strict=True)):
        first = depth - number if from_end else 0
        in_stage = {(i, first + j): next(ratios) for j in range(number)}
        if config.downsample and 0 < i < len(depths) - 1:
            # The layer's output has the resolution of the stage that it leads into, so it takes the ratio of that
            # stage's first block; if that stage is exact, the ratio of the last thinned block before it.
            layers[i, 'downsample'] = next(iter(in_stage.values()), latest or all_ratios[0])
        layers |= in_stage
        latest = [*in_stage.values()][-1] if in_stage else latest
    return {key: ratio for key, ratio in layers.items() if ratio != 1}


def _ratio_per_block(config, blocks):
    if not config.has_ratio_per_block:
        return [config.keep_ratio] * max(sum(blocks), 1)  # downsampling layers need a ratio even without thinned blocks
    if len(config.keep_ratio) != sum(blocks) or not config.keep_ratio:
        raise ValueError(
            f'keep_ratio lists {len(config.keep_ratio)} ratios for the {sum(blocks)} thinned blocks of '
            f'blocks={[*blocks]}; give one for each, or a single number'
        )
    return config.keep_ratio


def _check_blocks(blocks, depths):
    if not isinstance(blocks, Sequence) or len(blocks) != len(depths):
        raise ValueError(f'blocks={blocks!r} must list one number for each of the {len(depths)} stages')
    for stage, (n, depth) in enumerate(zip(blocks, depths, strict=True)):
        if isinstance(n, bool) or not isinstance(n, Real) or not 0 <= n <= depth or int(n) != n:
            raise ValueError(f'blocks[{stage}]={n!r} must be a whole number from 0 to the {depth} of its stage')
    return [int(n) for n in blocks]
