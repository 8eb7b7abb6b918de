"""``sbp_cfg``: what a config may say about SBP, checked when the backbone is built."""

import dataclasses
import difflib
from collections.abc import Sequence
from numbers import Real

from .masks import SAMPLERS, parse_keep_ratio
from .ops.storage import STORAGES

__all__ = ['DROPPED', 'IMPLEMENTATIONS', 'SBPSettings']

IMPLEMENTATIONS = ('fused', 'reference')
DROPPED = ('zero', 'nearest')

# Appendix "Experimental Settings": all blocks of stages 1 and 2; the first 6 (tiny) or 21 (base) of stage 3.
_PAPER_BLOCKS = {'tiny': (3, 3, 6, 0), 'base': (3, 3, 21, 0)}


@dataclasses.dataclass(frozen=True)
class SBPSettings:
    """Checked form of ``sbp_cfg``.

    Attributes:
        keep_ratio (tuple[float, ...]): One r in (0, 1] for each SBP block, shallow to deep (section 4, "How much
            gradients should be kept"). ``sbp_cfg`` takes one number for all, or the list. Default: 0.5.
        sampler (str): 'grid' or 'random'. Default: 'grid'.
        blocks (tuple[int, ...]): How many leading blocks of each stage use SBP. Default: the paper's for arch 'tiny'
            and 'base', every stage but the last elsewhere.
        downsample (bool): SBP on the 2x2/2 layers that lead into stages 2 and 3. Default: True.
        implementation (str): 'fused' stores less for the same gradients; 'reference' is Algorithm 1 as the paper
            writes it. Default: 'fused'.
        recompute (bool | str): True: do not store the hidden layer of the channel MLP but compute it again in the
            backward pass, for the kept positions, and the stem with it. 'block': compute the norm's input again as
            well, by running the depthwise convolution once more, so that a block stores nothing but its input. Needs
            'fused'. Default: False.
        dropped (str): What dropped positions send back through their layer. 'zero': nothing, the paper's method.
            'nearest': a gradient by the activations of the kept position next to them; nothing more is stored, and each
            stage draws a mask of its own, so that this position is near. Needs 'fused'. Default: 'zero'.
        storage (str): How the inputs of convolutions, pointwise layers and norms are stored. 'native': in the precision
            they are computed in. 'int8': rounded to eight bits, with one scale for each image and channel. A hidden
            layer that is not recomputed stays as it is. Needs 'fused'. Default: 'native'.
        skip_dropped_images (bool): Do not compute a block for the images that stochastic depth drops, instead of
            computing it and multiplying by zero: the same gradients, in less time, with less stored. How many these
            are is up to the backbone's ``drop_path_rate``; with 0 nothing changes. Default: False.
    """

    keep_ratio: tuple[float, ...]
    sampler: str
    blocks: tuple[int, ...]
    downsample: bool
    implementation: str
    recompute: bool | str
    dropped: str
    storage: str
    skip_dropped_images: bool

    @classmethod
    def parse(cls, cfg: dict, arch: str | dict, depths: Sequence[int]) -> 'SBPSettings':
        """Fills in the defaults and checks every value.

        Args:
            cfg (dict): ``sbp_cfg`` of the config.
            arch (str | dict): ``arch`` of the backbone.
            depths (Sequence[int]): Blocks of each stage.

        Returns:
            SBPSettings: The settings.

        Raises:
            ValueError: Naming the key, the value and the remedy.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(cfg, dict):
            raise ValueError(f'sbp_cfg={cfg!r} must be a dict with keys of {known}, or None for the plain backbone')
        for key in cfg:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f'known keys are {known}'
                raise ValueError(f"sbp_cfg has an unknown key '{key}'; {hint}")

        blocks = cfg.get('blocks')
        if blocks is None:
            blocks = _PAPER_BLOCKS.get(arch) if isinstance(arch, str) else None
            blocks = blocks or (*depths[:-1], 0)
        blocks = _parse_blocks(blocks, depths)

        ratios = cfg.get('keep_ratio', 0.5)
        if isinstance(ratios, Sequence) and not isinstance(ratios, str):
            if len(ratios) != sum(blocks) or not ratios:
                raise ValueError(
                    f'sbp_cfg: keep_ratio lists {len(ratios)} ratios for the {sum(blocks)} SBP blocks of '
                    f'blocks={blocks}; give one per block, or a single number'
                )
        else:
            ratios = [ratios] * max(sum(blocks), 1)  # without SBP blocks the downsampling layers still need one
        for ratio in ratios:
            parse_keep_ratio(ratio)

        return cls(
            keep_ratio=tuple(ratios),
            sampler=_one_of('sampler', cfg.get('sampler', 'grid'), SAMPLERS),
            blocks=blocks,
            downsample=_boolean('downsample', cfg.get('downsample', True)),
            skip_dropped_images=_boolean('skip_dropped_images', cfg.get('skip_dropped_images', False)),
            **_parse_implementation(cfg),
        )


def _one_of(key, value, choices):
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f'sbp_cfg: {key}={value!r} is unknown; choose one of {choices}')
    return value


def _boolean(key, value):
    if not isinstance(value, bool):
        raise ValueError(f'sbp_cfg: {key}={value!r} must be True or False')
    return value


def _parse_implementation(cfg):
    implementation = _one_of('implementation', cfg.get('implementation', 'fused'), IMPLEMENTATIONS)
    recompute = _one_of('recompute', cfg.get('recompute', False), (False, True, 'block'))
    if recompute and implementation != 'fused':
        raise ValueError(
            f"sbp_cfg: recompute={recompute!r} needs implementation='fused', not {implementation!r}; "
            'with the reference use with_cp=True of the backbone instead'
        )
    dropped = _one_of('dropped', cfg.get('dropped', 'zero'), DROPPED)
    storage = _one_of('storage', cfg.get('storage', 'native'), STORAGES)
    for key, value, plain in (('dropped', dropped, 'zero'), ('storage', storage, 'native')):
        if implementation != 'fused' and value != plain:
            raise ValueError(f"sbp_cfg: {key}={value!r} needs implementation='fused', not {implementation!r}")
    return dict(implementation=implementation, recompute=recompute, dropped=dropped, storage=storage)


def _parse_blocks(blocks, depths):
    if not isinstance(blocks, Sequence) or len(blocks) != len(depths):
        raise ValueError(f'sbp_cfg: blocks={blocks!r} must list one number for each of the {len(depths)} stages')
    for stage, (n, depth) in enumerate(zip(blocks, depths, strict=True)):
        if isinstance(n, bool) or not isinstance(n, Real) or int(n) != n or not 0 <= n <= depth:
            raise ValueError(
                f'sbp_cfg: blocks[{stage}]={n!r} must be a whole number from 0 to the {depth} of its stage'
            )
    return tuple(int(n) for n in blocks)
