"""``sbp_cfg``: what a config may say about SBP, checked when the backbone is built, and named presets of it."""

import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from numbers import Real

from .masks import SAMPLERS, parse_keep_ratio
from .ops.compiled import check_compiler
from .ops.storage import STORAGES

__all__ = [
    'ATTENTION',
    'DROPPED',
    'GRADIENTS',
    'IMPLEMENTATIONS',
    'PRESETS',
    'UNITS',
    'Preset',
    'SBPSettings',
    'make_presets',
    'preset_named',
]

IMPLEMENTATIONS = ('fused', 'reference')
DROPPED = ('zero', 'nearest', 'pool')
ATTENTION = ('qkv', 'query', 'head')


def _key(default, choices: tuple = (), *, selects: bool = False, fused: bool | tuple = False):
    """A key of ``sbp_cfg``.

    Args:
        default: Its default.
        choices (tuple): Values that it may have; none: :meth:`SBPSettings.parse` checks it by a rule of its own.
        selects (bool): The key says which positions are kept. The user sets such keys, and a preset leaves them alone.
            A preset sets all others. Default: False.
        fused (bool | tuple): Values that need ``implementation='fused'``; True: all but the default. Default: False.
    """
    return dataclasses.field(default=default, metadata=dict(choices=choices, selects=selects, fused=fused))


@dataclasses.dataclass(frozen=True)
class SBPSettings:
    """Checked form of ``sbp_cfg``.

    Attributes:
        keep_ratio (tuple[float, ...]): One r in (0, 1] for each SBP block, shallow to deep (section 4, "How much
            gradients should be kept"). ``sbp_cfg`` takes one number for all, or the list. Default: 0.5.
        sampler (str): 'grid' or 'random', or 'objects': each image a mask of its own that keeps what is next to its
            objects and, evenly spread, some of the rest, in each stage; needs :class:`.object_masks.ObjectMasksHook`.
            Default: 'grid'.
        object_share (float | None): With the sampler 'objects', the share of the kept positions that are next to
            objects, in [0, 1]. None in ``sbp_cfg`` means 0.7. It is None with other samplers.
        blocks (tuple[int, ...]): How many leading blocks of each stage use SBP. Default: what the backbone says, such
            as the paper's numbers for some architectures; every stage but the last elsewhere.
        downsample (bool): SBP on the 2x2/2 layers that lead into stages 2 and 3. Default: True.
        implementation (str): 'fused' stores less for the same gradients; 'reference' is Algorithm 1 as the paper
            writes it. Default: 'fused'.
        recompute (bool | str): True: do not store the hidden layer of the channel MLP but compute it again in the
            backward pass, for the kept positions, and the stem with it. 'block': compute the norm's input again as
            well, by running the depthwise convolution once more, so that a block stores nothing but its input. Needs
            'fused'. Default: False.
        dropped (str): What dropped positions send back through their layer. 'zero': nothing, the paper's method.
            'nearest': a gradient by the activations of the kept position next to them; nothing more is stored, and each
            stage draws a mask of its own, so that this position is near. Needs 'fused'. 'pool': the gradients of a kept
            position and of those next to it are summed, go back once through one input that stands for all of them, and
            are shared out; masks as for 'nearest', and the products of 'zero'. Default: 'zero'.
        storage (str): How the inputs of convolutions, pointwise layers and norms are stored. 'native': in the precision
            they are computed in. 'int8': rounded to eight bits, with one scale for each image and channel. A hidden
            layer that is not recomputed stays as it is. Needs 'fused'. Default: 'native'.
        skip_dropped_images (bool): Do not compute a block for the images that stochastic depth drops, instead of
            computing it and multiplying by zero: the same gradients, in less time, with less stored. How many these
            are is up to the backbone's ``drop_path_rate``; with 0 nothing changes. Default: False.
        compile (bool): The bodies of the operations go through ``torch.compile``: the same gradients, and the same is
            stored. The first step takes longer. Needs 'fused'. Default: False.
        attention (str): What attention drops (section 4, "How to apply SBP on MHSA?"): 'qkv', 'query' or 'head'; for
            backbones with attention. Default: 'qkv'.
    """

    keep_ratio: tuple[float, ...] = _key(0.5, selects=True)
    sampler: str = _key('grid', (*SAMPLERS, 'objects'), selects=True)
    object_share: float | None = _key(None, selects=True)
    blocks: tuple[int, ...] | None = _key(None, selects=True)
    downsample: bool = _key(True, (True, False), selects=True)
    implementation: str = _key('fused', IMPLEMENTATIONS)
    recompute: bool | str = _key(False, (False, True, 'block'), fused=True)
    dropped: str = _key('zero', DROPPED, fused=('nearest',))
    storage: str = _key('native', STORAGES, fused=True)
    skip_dropped_images: bool = _key(False, (True, False))
    compile: bool = _key(False, (True, False), fused=True)
    attention: str = _key('qkv', ATTENTION, selects=True)

    @classmethod
    def parse(
        cls, cfg: dict, depths: Sequence[int], blocks: Sequence[int] | None = None, absent: Sequence[str] = ()
    ) -> 'SBPSettings':
        """Fills in the defaults and checks every value.

        Args:
            cfg (dict): ``sbp_cfg`` of the config.
            depths (Sequence[int]): Blocks of each stage of the backbone.
            blocks (Sequence[int] | None): Default of the key ``blocks``; None: every stage but the last.
                Default: None.
            absent (Sequence[str]): Keys that mean nothing for the backbone, or one value of a key ('dropped=nearest').
                Default: ().

        Returns:
            SBPSettings: The settings.

        Raises:
            ValueError: Naming the key, the value and the remedy.
        """
        keys = {field.name: field for field in dataclasses.fields(cls)}
        if not isinstance(cfg, dict):
            raise ValueError(f'sbp_cfg={cfg!r} must be a dict with keys of {[*keys]}, or None for the plain backbone')
        for key in cfg:
            if key not in keys:
                near = difflib.get_close_matches(f'{key}', keys, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f'known keys are {[*keys]}'
                raise ValueError(f"sbp_cfg has an unknown key '{key}'; {hint}")
        values = {key: cfg.get(key, field.default) for key, field in keys.items()}
        for key, field in keys.items():
            _check_choice(key, values[key], field.metadata['choices'])
            if {key, f'{key}={values[key]}'} & {*absent} and values[key] != field.default:
                raise ValueError(f'sbp_cfg: {key}={values[key]!r} means nothing for this backbone; leave it out')
        for key, field in keys.items():
            needs = field.metadata['fused']
            needs = values[key] != field.default if needs is True else needs and values[key] in needs
            if needs and values['implementation'] != 'fused':
                raise ValueError(
                    f"sbp_cfg: {key}={values[key]!r} needs implementation='fused', not {values['implementation']!r}; "
                    'the reference form can save memory by with_cp=True of the backbone only'
                )
        if values['compile']:
            check_compiler()
        if values['blocks'] is None:
            values['blocks'] = blocks or (*depths[:-1], 0)
        values['blocks'] = _parse_blocks(values['blocks'], depths)
        values['object_share'] = _parse_object_share(values['sampler'], values['object_share'])
        values['keep_ratio'] = _parse_ratios(values['keep_ratio'], values['blocks'])
        return cls(**values)

    def layer_ratios(self) -> dict[tuple, float]:
        """The layers of a backbone with stages that SBP thins out, and how far.

        Returns:
            dict[tuple, float]: ``(stage, block)`` or ``(stage, 'downsample')`` (the layer that leads into the stage) to
            keep ratio; stages count from 0. Ratios of 1 do not appear.
        """
        ratios = iter(self.keep_ratio)
        layers, latest = {}, self.keep_ratio[0]
        for i, depth in enumerate(self.blocks):
            in_stage = [next(ratios) for _ in range(depth)]
            if self.downsample and 0 < i < len(self.blocks) - 1:
                # The layer works at the resolution of the stage it leads into, so it goes with that stage's first
                # block; where that has no SBP, with the last block before that has.
                layers[i, 'downsample'] = (in_stage or [latest])[0]
            layers.update({(i, j): r for j, r in enumerate(in_stage)})
            latest = (in_stage or [latest])[-1]
        return {key: r for key, r in layers.items() if r != 1}

    @classmethod
    def own_keys(cls, cfg: Mapping) -> dict:
        """What of a config's ``sbp_cfg`` stays under every preset, and the other keys it has at their defaults.

        The defaults are said and not left out: a child config is merged with what it inherits.

        Args:
            cfg (Mapping): ``sbp_cfg`` of a config.

        Returns:
            dict: The same keys. Those that say which positions are kept have the config's values.
        """
        keys = {field.name: field for field in dataclasses.fields(cls)}
        return {
            key: keys[key].default if key in keys and not keys[key].metadata['selects'] else value
            for key, value in cfg.items()
        }


def _check_choice(key, value, choices):
    if not choices or any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return
    if set(choices) == {True, False}:
        raise ValueError(f'sbp_cfg: {key}={value!r} must be True or False')
    raise ValueError(f'sbp_cfg: {key}={value!r} is unknown; choose one of {choices}')


def _parse_object_share(sampler, share):
    if sampler != 'objects':
        if share is not None:
            raise ValueError(f"sbp_cfg: object_share={share!r} needs sampler='objects', not {sampler!r}")
        return None
    share = 0.7 if share is None else share
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share <= 1:
        raise ValueError(f'sbp_cfg: object_share={share!r} must be a number from 0 to 1')
    return float(share)


def _parse_ratios(ratios, blocks):
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
    return tuple(ratios)


def _parse_blocks(blocks, depths):
    if not isinstance(blocks, Sequence) or len(blocks) != len(depths):
        raise ValueError(f'sbp_cfg: blocks={blocks!r} must list one number for each of the {len(depths)} stages')
    for stage, (n, depth) in enumerate(zip(blocks, depths, strict=True)):
        if isinstance(n, bool) or not isinstance(n, Real) or not 0 <= n <= depth or int(n) != n:
            raise ValueError(
                f'sbp_cfg: blocks[{stage}]={n!r} must be a whole number from 0 to the {depth} of its stage'
            )
    return tuple(int(n) for n in blocks)


UNITS = ('mlp', 'block', 'backbone')  # what a benchmark measures: a channel MLP with its residual connection, and so on

# Kinds of gradients, in the order in which the planner shows them.
GRADIENTS = types.MappingProxyType(
    {
        'paper': "the paper's gradients (SBP)",
        'nearest': "gradients near the exact ones (dropped positions send theirs by their neighbours' activations)",
        'pool': "gradients near the exact ones (those of dropped positions go back summed with their neighbours')",
        'int8': 'gradients exact to about a hundredth (what is stored is rounded to int8)',
        'exact': 'exact gradients',
    }
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named way to train a backbone.

    Attributes:
        name (str): What tools call it.
        meaning (str): One line for --help.
        gradients (str): A key of :data:`GRADIENTS`.
        time (float): Estimated time of the backbone's step relative to the plain one: by the matrix products of the
            channel MLP (plain: 2 forward, 4 backward) plus a little for convolutions that run again. A block's times
            on a CPU are near that (docs/results/block_cpu.json).
        sbp_cfg (Mapping | None): Keys that it sets; None: the plain backbone.
        with_cp (bool): Checkpoint every block. Default: False.
        units (tuple[str, ...]): Of :data:`UNITS`, those that it means something for. Default: all.
        better (str | None): A preset with the same gradients that stores less, in mixed precision if this one
            checkpoints, and is faster. Where that one applies, the planner does not look at this one. Default: None.
    """

    name: str
    meaning: str
    gradients: str
    time: float
    sbp_cfg: Mapping | None
    with_cp: bool = False
    units: tuple[str, ...] = UNITS
    better: str | None = None

    def __post_init__(self):
        if self.gradients not in GRADIENTS:
            raise ValueError(
                f'preset {self.name!r}: gradients={self.gradients!r} is unknown; use one of {[*GRADIENTS]}'
            )
        if not self.units or not set(self.units) <= set(UNITS):
            raise ValueError(f'preset {self.name!r}: units={self.units!r} must be some of {UNITS}')

    def arguments(self, **sbp_options) -> dict:
        """Arguments of a backbone.

        Args:
            **sbp_options: Further keys of ``sbp_cfg``, where the preset has one; its own keys win.

        Returns:
            dict: ``sbp_cfg`` and ``with_cp``.
        """
        sbp_cfg = None if self.sbp_cfg is None else {**sbp_options, **self.sbp_cfg}
        return dict(sbp_cfg=sbp_cfg, with_cp=self.with_cp)


def make_presets(*presets: Preset) -> dict[str, Preset]:
    """A table of presets by name.

    Args:
        *presets (Preset): Within each kind of gradients the one that stores least comes last.

    Raises:
        ValueError: For two of the same name, or a ``better`` one that is missing or has other gradients.
    """
    table = {preset.name: preset for preset in presets}
    if len(table) < len(presets):
        raise ValueError(f'presets must have different names, not {[preset.name for preset in presets]}')
    for preset in presets:
        better = table.get(preset.better)
        if preset.better and (better is None or better.gradients != preset.gradients):
            raise ValueError(f'preset {preset.name!r}: better={preset.better!r} must be one with the same gradients')
    return table


_NO_MLP = ('block', 'backbone')  # there is no convolution to run again in a channel MLP alone

# Within each kind of gradients the one that stores least comes last. What is added here is offered by every tool.
PRESETS = make_presets(
    Preset('none', 'the plain backbone', 'exact', 1.0, None),
    Preset('with_cp', 'every block checkpointed', 'exact', 8 / 6 + 0.03, None, with_cp=True, better='exact-block'),
    Preset(
        'reference',
        'Algorithm 1 as the paper writes it',
        'paper',
        4 / 6,
        dict(implementation='reference'),
        better='recompute',
    ),
    Preset('fused', 'SBP; stores kept positions only', 'paper', 4 / 6, dict()),
    Preset(
        'recompute',
        'SBP; the hidden layer of the MLP is computed again for kept positions',
        'paper',
        4.5 / 6,
        dict(recompute=True),
    ),
    Preset(
        'block',
        'SBP; the convolution runs again as well, a block stores its input only',
        'paper',
        4.5 / 6 + 0.03,
        dict(recompute='block'),
        units=_NO_MLP,
    ),
    Preset(
        'exact',
        'all positions kept, the hidden layer computed again',
        'exact',
        7 / 6,
        dict(keep_ratio=1.0, recompute=True),
    ),
    Preset(
        'exact-block',
        'all positions kept, a block stores its input only',
        'exact',
        7 / 6 + 0.03,
        dict(keep_ratio=1.0, recompute='block'),
        units=_NO_MLP,
    ),
    Preset(
        'nearest',
        'SBP; dropped positions send a gradient by the activations of a kept one next to them',
        'nearest',
        5.5 / 6,
        dict(dropped='nearest', recompute=True),
    ),
    Preset(
        'pool',
        'SBP; the gradients of dropped positions go back with those of a kept one next to them',
        'pool',
        4.5 / 6,
        dict(dropped='pool', recompute=True),
    ),
    Preset(
        'int8',
        'all positions kept, stored in eight bits',
        'int8',
        7 / 6 + 0.05,
        dict(keep_ratio=1.0, recompute=True, storage='int8'),
    ),
    Preset(
        'int8-block',
        'all positions kept, a block stores its input only, in eight bits',
        'int8',
        7 / 6 + 0.08,
        dict(keep_ratio=1.0, recompute='block', storage='int8'),
        units=_NO_MLP,
    ),
    Preset(
        'nearest-int8',
        'nearest, stored in eight bits',
        'nearest',
        5.5 / 6 + 0.05,
        dict(dropped='nearest', recompute=True, storage='int8'),
    ),
)


def preset_named(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ValueError: If there is none.
    """
    if name not in PRESETS:
        raise ValueError(f'preset {name!r} is unknown; choose from {list(PRESETS)}')
    return PRESETS[name]
