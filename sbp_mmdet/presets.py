"""Presets and their settings, which ``sbp_cfg``, ``LeanHook`` and ``apply_lean`` share."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

from .ops.common.autograd_function import Form
from .stochastic_backprop.config import SBPConfig
from .stochastic_backprop.layers import thinned_layers

__all__ = ['PRESETS', 'Preset', 'Settings', 'parse_module_names', 'preset_named', 'refuse_unknown_keys']


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named way to train.

    Attributes:
        name (str): The name in configs and tools.
        meaning (str): One line for ``--help``.
        gradients (str): 'exact', 'int8' (off by up to two percent), 'sampled' (exact on average) or 'sbp'.
        form (Form | None): How operations compute and store. If ``None``, modules run their own code.
        thins (bool): Whether positions are dropped in the backward pass.
        checkpoints (tuple[str, ...]): Parts of a detector that are checkpointed as well, see
            :func:`.checkpointed_parts.parts_to_checkpoint`.
    """

    name: str
    meaning: str
    gradients: str
    form: Form | None = None
    thins: bool = False
    checkpoints: tuple[str, ...] = ()


# The first entry is what a user should try first. The last three are there to compare with.
PRESETS = {
    preset.name: preset
    for preset in (
        Preset('exact', 'exact gradients; stores the input of a block and recomputes the rest', 'exact', Form()),
        Preset(
            'exact_min',
            'exact gradients in the least memory; neck and heads are recomputed too',
            'exact',
            Form(minimal=True),
            checkpoints=(
                *('stem', 'neck', 'dense head', 'mask head', 'RoI head'),
                *('layer', 'block', 'layered block', 'mixed layer'),
            ),
        ),
        Preset(
            'int8',
            'like exact, with stored feature maps rounded to eight bits',
            'int8',
            Form(storage='int8'),
            checkpoints=('RoI head', 'block', 'mixed block', 'mixed layer'),
        ),
        Preset('sampled', 'like exact, with weight gradients from a sample of the rows', 'sampled', Form()),
        Preset('sbp', "the paper's method: backpropagates through half of the positions", 'sbp', Form(), thins=True),
        Preset('none', 'plain modules', 'exact'),
        Preset('with_cp', 'checkpointing of every block', 'exact'),
        Preset('reference', "the paper's Algorithm 1 in plain autograd", 'sbp', Form('reference'), True),
    )
}

_SBP_KEYS = tuple(field.name for field in dataclasses.fields(SBPConfig))


def preset_named(name: str) -> Preset:
    """Return the preset with this name.

    Args:
        name (str): A key of :data:`PRESETS`.

    Returns:
        Preset: The preset.

    Raises:
        ValueError: If there is no such preset. The message suggests the nearest name.
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(f'{name}'.lower(), PRESETS, n=1) or ['sbp'] * f'{name}'.startswith('paper')
    hint = f"did you mean '{near[0]}'? The presets are" if near else 'choose one of'
    raise ValueError(f'preset={name!r} is unknown; {hint} {[*PRESETS]}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(SBPConfig):
    """Checked settings of a training. Those of :class:`.SBPConfig` belong to presets that drop positions.

    Args:
        preset (Preset): The preset.
        keep_ratio (float | Sequence[float]): See :class:`.SBPConfig`. Default: 0.5. With 'sampled', the share of the
            rows that weight gradients are computed from, one number below 1. Default: 0.25.
        skip_dropped_images (bool): Whether a branch is not run at all on the images that stochastic depth drops. The
            gradients are the same as with a factor of zero, in less time and memory. Default: True.
        modules (Sequence[str] | None): Names of submodules to change. If ``None``, the whole model is changed.
            Default: None.
        verify (bool | str): Whether changed modules are compared with their own code before the first training step:
            one module of each kind (True), each module ('all'), or one of each kind with an error instead of a warning
            if it disagrees ('raise'). Default: True.
    """

    preset: Preset
    skip_dropped_images: bool = True
    modules: Sequence[str] | None = None
    verify: bool | str = True

    @classmethod
    def parse(cls, cfg: Mapping, where: str = 'sbp_cfg', default_preset: str = 'sbp') -> 'Settings':
        """Check the keys and values of a config, as far as they do not depend on the model.

        Args:
            cfg (Mapping): The name of a preset, and settings.
            where (str): Name of the config in error messages. Default: 'sbp_cfg'.
            default_preset (str): The preset if ``cfg`` names none. Default: 'sbp'.

        Returns:
            Settings: The checked settings.

        Raises:
            ValueError: If a key or value is invalid. The message names both, and what to write instead.

        Example:
            >>> Settings.parse(dict(keep_ratio=0.5)).preset.name
            'sbp'
        """
        if not isinstance(cfg, Mapping):
            raise ValueError(f"{where}={cfg!r} must be a dict such as dict(preset='exact'), or None for plain modules")
        refuse_unknown_keys(where, cfg, [field.name for field in dataclasses.fields(cls)])
        preset = preset_named(cfg.get('preset', default_preset))
        samples = preset.gradients == 'sampled'
        meaningless = () if preset.thins else [key for key in _SBP_KEYS if not (samples and key == 'keep_ratio')]
        if given := [key for key in meaningless if key in cfg]:
            other = "'sbp' or 'sampled'" if given == ['keep_ratio'] else "'sbp'"
            inherited = f" (if it is inherited: {where}=dict(_delete_=True, preset='{preset.name}'))"
            raise ValueError(
                f"{where}: preset='{preset.name}' drops no position, so it takes no {', '.join(given)}; leave that "
                f'out{inherited if where == "sbp_cfg" else ""}, or take preset={other}'
            )
        if preset.form is None and 'skip_dropped_images' in cfg:
            raise ValueError(
                f"{where}: skip_dropped_images has no effect with preset='{preset.name}', whose blocks run their own "
                'code; leave it out'
            )
        return cls(**{**(dict(keep_ratio=0.25) if samples else {}), **cfg, 'preset': preset})

    def __post_init__(self):
        share = self.keep_ratio
        if self.preset.gradients == 'sampled' and (not isinstance(share, Real) or not 0 < share < 1):
            raise ValueError(
                f"keep_ratio={share!r} must be one number below 1 and above 0 for preset='sampled', such as 0.25"
            )
        super().__post_init__()
        if not isinstance(self.skip_dropped_images, bool):
            raise ValueError(f'skip_dropped_images={self.skip_dropped_images!r} must be True or False')
        if not (isinstance(self.verify, bool) or self.verify in ('all', 'raise')):
            raise ValueError(f"verify={self.verify!r} must be True, False, 'all' or 'raise'")
        if self.modules is not None:
            object.__setattr__(self, 'modules', parse_module_names(self.modules))

    def layer_ratios(self, depths: Sequence[int], blocks: Sequence[int], from_end: bool = False) -> dict[tuple, float]:
        """Return :func:`.layers.thinned_layers` for presets that drop positions, otherwise an empty dict.

        Args:
            depths (Sequence[int]): Number of blocks in each stage.
            blocks (Sequence[int]): Thinned blocks of each stage if the key ``blocks`` is ``None``.
            from_end (bool): Whether ``blocks`` counts the last blocks of a stage. Default: False.

        Returns:
            dict[tuple, float]: Keep ratios by layer, ``(stage, block)`` or ``(stage, 'downsample')``.
        """
        return thinned_layers(self, depths, blocks, from_end) if self.preset.thins else {}


def parse_module_names(modules: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of submodules that a hook's ``modules`` lists.

    Args:
        modules (str | Sequence[str]): A name, or several.

    Returns:
        tuple[str, ...]: The names.

    Raises:
        ValueError: If they are no strings.
    """
    names = [modules] if isinstance(modules, str) else modules
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"modules={names!r} must be a list of names of submodules, such as ['neck']")
    return tuple(names)


def refuse_unknown_keys(where: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keys of a config that nothing reads.

    Args:
        where (str): Name of the config in the message.
        keys (Iterable[str]): Its keys.
        known (Sequence[str]): The keys that are read.

    Raises:
        ValueError: For the first unknown key. The message names it and a similar key, or all known ones.
    """
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(f'{key}', known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f'known keys are {[*known]}'
            raise ValueError(f"{where} has an unknown key '{key}'; {hint}")
