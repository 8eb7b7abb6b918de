"""Presets, the keys beside them, and their checks: all that a config may say.

``sbp_cfg`` of the package's backbones, ``LeanHook`` and ``apply_lean`` take the same: a preset, and keys.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from numbers import Real

from .masks import SAMPLERS, parse_keep_ratio
from .ops.operation import Form

__all__ = ['ATTENTION', 'PRESETS', 'Preset', 'Settings', 'preset_named', 'rewritten']

ATTENTION = ('qkv', 'query', 'head')


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named way to train.

    Attributes:
        name (str): What configs and tools call it.
        meaning (str): One line for ``--help``.
        gradients (str): 'exact', 'int8' (error of up to a hundredth), 'sampled' (exact on average) or 'paper' (SBP).
        form (Form | None): What it means for an operation; None: modules run their own code.
        thins (bool): Some positions are dropped.
    """

    name: str
    meaning: str
    gradients: str
    form: Form | None = None
    thins: bool = False


# What a user should try first comes first; the last three are there to compare with.
PRESETS = {
    preset.name: preset
    for preset in (
        Preset('exact', 'exact gradients; what a block stores is its input', 'exact', Form()),
        Preset('int8', 'the same, stored in eight bits', 'int8', Form(storage='int8')),
        Preset('sampled', 'the same memory; gradients of weights come from a quarter of the rows', 'sampled', Form()),
        Preset('paper', 'SBP: half of the positions are stored and send gradients', 'paper', Form(), thins=True),
        Preset('none', 'plain modules', 'exact'),
        Preset('with_cp', 'gradient checkpointing of every block', 'exact'),
        Preset('reference', 'SBP as the paper writes it, in plain autograd', 'paper', Form('reference'), True),
    )
}

# What used to be said, and the preset that stands for it.
_OLD_PRESETS = {
    'fused': 'paper',
    'recompute': 'paper',
    'block': 'paper',
    'exact-block': 'exact',
    'int8-block': 'int8',
    'nearest': 'sampled',
    'nearest-int8': 'sampled',
    'pool': 'sampled',
}
_OLD_KEYS = ('implementation', 'recompute', 'dropped', 'storage', 'compile', 'object_share')
_THINNING_KEYS = ('keep_ratio', 'sampler', 'blocks', 'downsample', 'attention')


def preset_named(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ValueError: If there is none; for a former name with what to write instead.
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    if isinstance(name, str) and name in _OLD_PRESETS:
        raise ValueError(f"preset={name!r} is one of a former version; write preset='{_OLD_PRESETS[name]}'")
    raise ValueError(f'preset={name!r} is unknown; choose one of {[*PRESETS]}')


@dataclasses.dataclass(frozen=True)
class Settings:
    """A preset with its keys, checked.

    The first five keys say which positions are kept, so they go with presets that drop some.

    Attributes:
        preset (Preset): The preset.
        keep_ratio (float | tuple[float, ...]): r in (0, 1], for all thinned blocks or for each of them, shallow to deep
            (section 4, "How much gradients should be kept"). For 'sampled' the share of rows, below 1.
            Default: 0.5, for 'sampled' 0.25.
        sampler (str): 'grid' or 'random' (section 4, "How to sample the gradient keep mask?"). Default: 'grid'.
        blocks (tuple[int, ...] | None): How many leading blocks of each stage are thinned; for a network of one stage
            (ViT) how many of the last. None: the adapter's default, which is the paper's choice where it made one.
            Default: None.
        downsample (bool): The layers between thinned stages are thinned too. Default: True.
        attention (str): What attention drops (section 4, "How to apply SBP on MHSA?"): 'qkv', 'query' or 'head'.
            Default: 'qkv'.
        skip_dropped_images (bool): Blocks leave out the images that stochastic depth drops, instead of multiplying
            them by zero: the same gradients in less time and memory. Default: True.
        modules (tuple[str, ...] | None): Names of submodules that are changed; None: the whole model. Default: None.
    """

    preset: Preset
    keep_ratio: float | tuple[float, ...] = 0.5
    sampler: str = 'grid'
    blocks: tuple[int, ...] | None = None
    downsample: bool = True
    attention: str = 'qkv'
    skip_dropped_images: bool = True
    modules: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, cfg: Mapping, where: str = 'sbp_cfg') -> 'Settings':
        """Checks what does not depend on the model.

        Args:
            cfg (Mapping): A preset's name and keys.
            where (str): What messages call it. Default: 'sbp_cfg'.

        Raises:
            ValueError: Naming the key, the value and what to write instead.
        """
        if not isinstance(cfg, Mapping):
            raise ValueError(f"{where}={cfg!r} must be a dict such as dict(preset='exact'), or None for plain modules")
        known = [field.name for field in dataclasses.fields(cls)]
        if old := [key for key in cfg if key in _OLD_KEYS]:
            raise ValueError(f'{where}: {old} are settings of former versions; write dict({rewritten(cfg)}) instead')
        for key in cfg:
            if key not in known:
                near = difflib.get_close_matches(f'{key}', known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f'known keys are {known}'
                raise ValueError(f"{where} has an unknown key '{key}'; {hint}")
        if 'preset' not in cfg:
            raise ValueError(
                f"{where}={dict(cfg)!r} needs a preset: 'exact' to store less with exact gradients, 'paper' for SBP; "
                f'write dict({rewritten(cfg or {"preset": "exact"})})'
            )
        preset = preset_named(cfg['preset'])
        sampled = preset.gradients == 'sampled'
        meaningless = () if preset.thins else _THINNING_KEYS[1:] if sampled else _THINNING_KEYS
        if given := [key for key in meaningless if key in cfg]:
            other = "'paper' or 'sampled'" if given == ['keep_ratio'] else "'paper'"
            raise ValueError(
                f"{where}: {', '.join(given)}: not with preset='{preset.name}', which drops no position; leave that "
                f'out, or take preset={other}'
            )
        if preset.form is None and 'skip_dropped_images' in cfg:
            raise ValueError(
                f"{where}: skip_dropped_images means nothing for preset='{preset.name}', whose blocks run their own "
                'code; leave it out'
            )
        return cls(**{**(dict(keep_ratio=0.25) if sampled else {}), **cfg, 'preset': preset})

    def __post_init__(self):
        for key, choices in (('sampler', SAMPLERS), ('attention', ATTENTION)):
            if getattr(self, key) not in choices:
                raise ValueError(f'{key}={getattr(self, key)!r} is unknown; choose one of {choices}')
        for key in ('downsample', 'skip_dropped_images'):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f'{key}={getattr(self, key)!r} must be True or False')
        ratios = self.keep_ratio
        listed = isinstance(ratios, Sequence) and not isinstance(ratios, str)
        for ratio in ratios if listed else [ratios]:
            parse_keep_ratio(ratio)
        if self.preset.gradients == 'sampled' and (listed or ratios == 1):
            raise ValueError(f"keep_ratio={ratios!r} must be one number below 1 for preset='sampled', such as 0.25")
        if self.modules is not None:
            names = [self.modules] if isinstance(self.modules, str) else self.modules
            if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"modules={names!r} must be a list of names of submodules, such as ['neck']")
            object.__setattr__(self, 'modules', tuple(names))

    def layer_ratios(self, depths: Sequence[int], blocks: Sequence[int], from_end: bool = False) -> dict[tuple, float]:
        """The layers of a backbone that are thinned, and how far.

        Args:
            depths (Sequence[int]): Blocks of each stage.
            blocks (Sequence[int]): Default of the key ``blocks``.
            from_end (bool): ``blocks`` counts the last ones of a stage. Default: False.

        Returns:
            dict[tuple, float]: ``(stage, block)`` or ``(stage, 'downsample')`` (the layer that leads into the stage) to
            keep ratio; stages count from 0. Ratios of 1 do not appear.

        Raises:
            ValueError: If ``blocks`` or ``keep_ratio`` do not fit the depths.
        """
        if not self.preset.thins:
            return {}
        blocks = _checked_blocks(blocks if self.blocks is None else self.blocks, depths)
        ratios = iter(self._ratios(blocks))
        found, latest = {}, None
        for i, (number, depth) in enumerate(zip(blocks, depths, strict=True)):
            first = depth - number if from_end else 0
            in_stage = {(i, first + j): next(ratios) for j in range(number)}
            if self.downsample and 0 < i < len(depths) - 1:
                # The layer works at the resolution of the stage it leads into, so it goes with that stage's first
                # block; where that is exact, with the last thinned one before.
                found[i, 'downsample'] = next(iter(in_stage.values()), latest or self._ratios(blocks)[0])
            found |= in_stage
            latest = [*in_stage.values()][-1] if in_stage else latest
        return {key: ratio for key, ratio in found.items() if ratio != 1}

    def _ratios(self, blocks):
        if isinstance(self.keep_ratio, (Real, str)):
            return [self.keep_ratio] * max(sum(blocks), 1)  # without blocks the downsampling layers still need one
        if len(self.keep_ratio) != sum(blocks) or not self.keep_ratio:
            raise ValueError(
                f'keep_ratio lists {len(self.keep_ratio)} ratios for the {sum(blocks)} thinned blocks of '
                f'blocks={[*blocks]}; give one for each, or a single number'
            )
        return self.keep_ratio


def _checked_blocks(blocks, depths):
    if not isinstance(blocks, Sequence) or len(blocks) != len(depths):
        raise ValueError(f'blocks={blocks!r} must list one number for each of the {len(depths)} stages')
    for stage, (n, depth) in enumerate(zip(blocks, depths, strict=True)):
        if isinstance(n, bool) or not isinstance(n, Real) or not 0 <= n <= depth or int(n) != n:
            raise ValueError(f'blocks[{stage}]={n!r} must be a whole number from 0 to the {depth} of its stage')
    return [int(n) for n in blocks]


def rewritten(cfg: Mapping) -> str:
    """The arguments that say today what settings of a former version say."""
    known = [field.name for field in dataclasses.fields(Settings)]
    ratio, sampler = cfg.get('keep_ratio', 0.5), cfg.get('sampler', 'grid')
    exact = ratio == 1 or (isinstance(ratio, (list, tuple)) and all(r == 1 for r in ratio))
    preset = cfg.get('preset')
    preset = _OLD_PRESETS.get(f'{preset}', preset)
    if preset is None:
        if cfg.get('implementation') == 'reference':
            preset = 'reference'
        elif exact:
            preset = 'int8' if cfg.get('storage') == 'int8' else 'exact'
        else:
            preset = 'paper' if cfg.get('dropped', 'zero') == 'zero' else 'sampled'
    kept = {key: value for key, value in cfg.items() if key in known and key != 'preset'}
    if sampler == 'objects':
        del kept['sampler']
    if preset in ('exact', 'int8'):
        kept = {key: value for key, value in kept.items() if key not in _THINNING_KEYS}
    return ', '.join(f'{key}={value!r}' for key, value in {'preset': preset, **kept}.items())
