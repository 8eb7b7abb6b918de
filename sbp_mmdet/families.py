"""Families of backbones: what tools and studies need to know of one stands in its record, and nowhere else.

The record is registered beside the model, see :mod:`sbp_mmdet.models.convnext_family`. A backbone with SBP has the
constructor arguments ``sbp_cfg`` and ``with_cp``, the attributes ``sbp`` (:class:`.settings.SBPSettings` or None) and
``depths``, and the methods ``keep_ratios()``, ``stage_sizes(height, width)`` and
``draw(images, again=False)``, see :mod:`.draws`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from .settings import PRESETS, Preset, preset_named

__all__ = [
    'FAMILIES',
    'Family',
    'Layer',
    'Tap',
    'Unit',
    'family_of',
    'layer_of',
    'locate',
    'presets_of',
    'register_family',
    'require',
]


class Unit(NamedTuple):
    """What a benchmark runs: a module and how.

    Attributes:
        module (nn.Module): In training mode.
        run (Callable[[Tensor], object]): Its forward pass, a function of the input.
        reads_image (bool): The input is an image, which gets no gradient and is in memory anyway.
    """

    module: nn.Module
    run: Callable[[Tensor], object]
    reads_image: bool


class Tap(NamedTuple):
    """Where the gradient at the input of a layer with SBP can be seen.

    Attributes:
        name (str): Of the layer in the backbone.
        module (nn.Module): The module whose gradient it is.
        at_output (bool): The gradient is that of the module's output, (N, C, H, W); False: of its first input.
        patch (int): The layer reads non-overlapping patches of this side; 1 for position-wise layers.
    """

    name: str
    module: nn.Module
    at_output: bool
    patch: int = 1


class Layer(NamedTuple):
    """A layer whose gradients pictures show.

    Attributes:
        stage, block (int): Where it is, counted from 0.
        label (str): What kind of layer it is, for pictures.
    """

    stage: int
    block: int
    label: str


@dataclasses.dataclass(frozen=True)
class Family:
    """The record of a family.

    Attributes:
        name (str): Of the family, for messages and ``--family``.
        backbone (str): Registered type of the backbone with SBP.
        stock (tuple[str, ...]): Types that it can stand in for, as configs write them: same arguments, same parameter
            names.
        parts (tuple[tuple[str, str], ...]): Patterns of parameter names (without 'backbone.') and the part of the
            detector: 'stem', 'stage {}' or 'output norms'; see :func:`locate`. Of several that fit the first counts.
        layers (Mapping[str, str]): Patterns of layers' names with groups 'stage' and 'block', which count from 0
            (without 'stage': the only one; without 'block': a stage of one block), and the labels of these kinds of
            layers, at most three, in the order of the forward pass.
        archs (tuple[str, ...]): Architectures that benchmarks run by default.
        stage_shape (Callable): ``(arch, stage, batch, height, width)`` to the shape of the input of the stage's blocks;
            stages count from 0, height and width are the image's, in pixels.
        build_unit (Callable): ``(unit, arch, stage, shape, device, sbp_cfg=, with_cp=)`` to a :class:`Unit`, with one
            of ``settings.UNITS``, a block of the stage that SBP thins out, and the shape of its input.
        stages (int): How many there are. Default: 4.
        presets (tuple[str, ...] | None): Names of the presets that apply; None: all. Default: None.
        times (Mapping[str, float]): Relative times of presets that are not ``Preset.time``. Default: none.
        tap (Callable | None): ``(backbone, layer)`` with a key of ``keep_ratios()`` to a :class:`Tap`; None: kept
            positions are not compared with the exact pass. Default: None.
        extremes (tuple[str, ...]): Keys of :data:`.study.gradient_norms.DISJOINT` that work for the backbone: 'disjoint
            blocks' where its forward pass calls ``draw``. Default: none.
    """

    name: str
    backbone: str
    stock: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    layers: Mapping[str, str]
    archs: tuple[str, ...]
    stage_shape: Callable[[str, int, int, int, int], tuple[int, ...]]
    build_unit: Callable[..., Unit]
    stages: int = 4
    presets: tuple[str, ...] | None = None
    times: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tap: Callable[[nn.Module, tuple], Tap] | None = None
    extremes: tuple[str, ...] = ()

    def has_preset(self, name: str) -> bool:
        """Whether a preset applies. Raises a ValueError for an unknown one."""
        return preset_named(name) is not None and (self.presets is None or name in self.presets)

    def time(self, preset: Preset) -> float:
        """Time of the backbone's step under a preset, relative to the plain backbone's."""
        return self.times.get(preset.name, preset.time)


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Adds a family.

    Args:
        family (Family): Its record.

    Returns:
        Family: The same.

    Raises:
        ValueError: If the name is taken by another backbone, or the record names presets that do not exist.
    """
    known = FAMILIES.get(family.name)
    if known and known.backbone != family.backbone:
        raise ValueError(f'family {family.name!r} is already registered, for {known.backbone}; choose another name')
    for name in (*(family.presets or ()), *family.times):
        preset_named(name)
    FAMILIES[family.name] = family
    return family


def family_of(backbone: Mapping | nn.Module | None) -> Family | None:
    """The family that a backbone belongs to, or whose backbone can stand in for it.

    Args:
        backbone (Mapping | nn.Module | None): ``model.backbone`` of a config, or of a detector.

    Returns:
        Family | None: None where SBP does not apply.
    """
    if isinstance(backbone, nn.Module):
        names = {name for kind in type(backbone).__mro__ for name in _names(kind)}
    else:
        names = _names((backbone or {}).get('type'))
    for family in FAMILIES.values():
        if names & {family.backbone, *family.stock}:
            return family
    return None


def _names(kind):
    """How a config may write a type. A backbone with SBP may stand in any scope, and mmdet's scope may be left out."""
    if isinstance(kind, type):
        kind = f'{kind.__module__.split(".")[0]}.{kind.__name__}'
    if not isinstance(kind, str):
        return set()
    last = kind.split('.')[-1]
    own = {family.backbone for family in FAMILIES.values()}
    return {kind, last} if last in own or kind == f'mmdet.{last}' else {kind}


def require(backbone: Mapping | None) -> Family:
    """As :func:`family_of`, for what makes sense with SBP only.

    Args:
        backbone (Mapping | None): ``model.backbone`` of a config.

    Returns:
        Family: Its family.

    Raises:
        ValueError: If there is none.
    """
    family = family_of(backbone)
    if family is None:
        known = ', '.join(name for family in FAMILIES.values() for name in (family.backbone, *family.stock))
        raise ValueError(
            f'model.backbone.type={(backbone or {}).get("type")!r}: SBP does not apply to it; it applies to {known}'
        )
    return family


def locate(patterns: Sequence[tuple[str, str]], name: str) -> tuple[str, int | None] | None:
    """The part that a name belongs to.

    Args:
        patterns (Sequence[tuple[str, str]]): Pattern and part. A group of the pattern named 'from0' or 'from1' is the
            number of the stage, counted from there; ``{}`` in the part stands for it, counted from 1.
        name (str): Of a module or parameter in the backbone.

    Returns:
        tuple[str, int | None] | None: Part and stage, counted from 1; the stem counts for stage 1. None if no pattern
        matches.
    """
    for pattern, part in patterns:
        if match := re.match(rf'(?:{pattern})(?:\.|$)', name):
            found = match.groupdict()
            stage = int(found['from0']) + 1 if found.get('from0') else int(found.get('from1') or 0) or None
            return part.format(stage), 1 if part == 'stem' else stage
    return None


def layer_of(name: str) -> Layer | None:
    """What pictures call a layer.

    Args:
        name (str): Of the layer in the backbone, as :func:`sbp_mmdet.study.measures.parts_of` gives it.

    Returns:
        Layer | None: None for layers that no family's pictures show.
    """
    for family in FAMILIES.values():
        for pattern, label in family.layers.items():
            if match := re.fullmatch(pattern, name):
                found = match.groupdict()
                return Layer(int(found.get('stage') or 0), int(found.get('block') or 0), label)
    return None


def presets_of(family: Family | None) -> list[Preset]:
    """The presets that apply to a family; without one those of any backbone: plain and checkpointed."""
    if family is None:
        return [preset for preset in PRESETS.values() if preset.sbp_cfg is None]
    return [preset for preset in PRESETS.values() if family.has_preset(preset.name)]
