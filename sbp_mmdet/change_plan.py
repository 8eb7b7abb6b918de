"""Plan of a change: the adapter of each module of a model, found without changing the model."""

import dataclasses
from typing import NamedTuple

from torch import nn

from .adapters import Bound, LeanBlock, LeanModule, adapter_of, bind
from .adapters.base import adapter_of_class
from .adapters.predicate import ask_once
from .presets import Settings
from .stochastic_backprop.config import SBPConfig
from .surgery import detectors, named_submodules

__all__ = ['ChangePlan', 'modules_to_change', 'patch_stride', 'plan_change']


# Convolutions that embed patches, by their names in a backbone.
_PATCH_EMBEDDINGS = ('patch_embed.projection', 'patch_embed.proj', 'downsample_layers.0.0')


class PlannedBackbone(NamedTuple):
    """A backbone with blocks that can be thinned.

    Attributes:
        owner (nn.Module): Module that holds all blocks, whose forward passes are counted.
        kind (type[LeanBlock]): Adapter of the blocks.
        layers (dict): Modules and their adapters by layer.
        ratios (dict): Keep ratios by layer.
        thins (bool): Whether positions can be dropped in any block.
        name (str): Name of the owner in the model, by which its draws differ from those of the other backbones. It is
            empty for the first backbone of the model, which draws like a backbone by itself.
    """

    owner: nn.Module
    kind: type[LeanBlock]
    layers: dict
    ratios: dict
    thins: bool
    name: str


class ChangePlan(NamedTuple):
    """Plan of a change.

    Attributes:
        backbones (list[PlannedBackbone]): Backbones with blocks that can be thinned.
        others (list[tuple[nn.Module, type[LeanModule]]]): Other modules with their adapters.
        left (dict[str, str]): Reasons why modules are left unchanged, by name.
        bounds (dict[int, Bound]): Operations of the changed modules, by the module's id.
    """

    backbones: list[PlannedBackbone]
    others: list[tuple[nn.Module, type[LeanModule]]]
    left: dict[str, str]
    bounds: dict[int, Bound]


@ask_once()
def plan_change(model: nn.Module, settings: Settings, chosen: dict[int, nn.Module]) -> ChangePlan:
    """Check everything that a change needs, without changing the model.

    Args:
        model (nn.Module): The model, changed or not.
        settings (Settings): The settings.
        chosen (dict[int, nn.Module]): Result of :func:`modules_to_change`.

    Returns:
        ChangePlan: The plan.

    Raises:
        ValueError: If a setting cannot be honoured, or there is nothing to change.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in chosen.values():
        if '_fsdp_wrapped_module' in module._modules:
            raise ValueError(
                f'{type(model).__name__} is wrapped in FSDP, which hides its modules; call apply_lean before wrapping'
            )
    taken, left, bounds = set(), {}, {}

    def take(module, mixin):
        """Return whether a module can be changed."""
        if id(module) not in chosen:
            return False
        if settings.preset.form is None:  # any module can be checkpointed
            taken.add(id(module))
            return True
        bound = bind(mixin, module, settings)
        if bound.reason:
            left[names[id(module)]] = bound.reason
            return False
        bounds[id(module)] = bound
        taken.update(map(id, (module, *bound.used)))
        return True

    backbones = []
    for number, root in enumerate(_find_backbones(model)):
        if layers := _plan_backbone(root, settings, take, bounds):
            backbones.append(layers._replace(name=names[id(layers.owner)] if number else ''))
    others = []
    for module in chosen.values():
        mixin = adapter_of_class(type(module))
        if not mixin or id(module) in taken or not mixin.applies_to(module):
            continue
        if issubclass(mixin, LeanBlock):
            left.setdefault(names[id(module)], 'a block that does not belong to a backbone')
            continue
        if mixin.thins_only and not mixin.token_ratio(settings):
            continue
        if (settings.preset.form or mixin.checkpointed) and take(module, mixin):
            others.append((module, mixin))
    nothing, other = f'no module of {type(model).__name__}', ''
    if settings.modules is not None:
        nothing = f'nothing in modules={[*settings.modules]} of {type(model).__name__}'
        other = 'name other modules, leave modules out, or '
    thinned = [layers for layers in backbones if layers.thins] or [m for _, m in others if m.token_ratio(settings)]
    if settings.preset.thins and not thinned:
        left |= {names[id(inside)]: reason for bound in bounds.values() for inside, reason in bound.left}
        what = f"preset='{settings.preset.name}' drops positions, and {nothing} supports that"
        raise ValueError(_format_nothing_to_change(what, left, f"{other}use 'exact', 'exact_min' or 'int8'"))
    layers = [*others, *(layer for backbone in backbones for layer in backbone.layers.values())]
    if settings.preset.gradients == 'sampled' and not any(mixin.samples for _, mixin in layers):
        what = f"preset='sampled' draws rows, and {nothing} supports that"
        raise ValueError(_format_nothing_to_change(what, {}, f"{other}use 'exact', 'exact_min' or 'int8'"))
    if not others and not backbones:
        what = f"preset='{settings.preset.name}' supports {nothing}"
        remedy = f'{other}use CheckpointModulesHook and TargetsInChunksHook, which save memory in any detector'
        raise ValueError(_format_nothing_to_change(what, left, remedy))
    return ChangePlan(backbones, others, left, bounds)


def modules_to_change(model: nn.Module, settings: Settings) -> dict[int, nn.Module]:
    """Return the modules that may be changed, by their id.

    Args:
        model (nn.Module): The model.
        settings (Settings): The settings.

    Returns:
        dict[int, nn.Module]: The modules.

    Raises:
        ValueError: If a part of the model has settings of its own.
    """
    parts = [('', model)] if settings.modules is None else named_submodules(model, settings.modules)
    chosen = {}
    for prefix, part in parts:
        for name, module in part.named_modules(prefix=prefix):
            if getattr(module, 'sbp', None) is not None and module is not model:
                raise ValueError(
                    f'{name} has an sbp_cfg of its own; write sbp_cfg=None there, or name the other parts of the '
                    "model: modules=['neck', ...]"
                )
            chosen[id(module)] = module
    return chosen


def patch_stride(backbone: nn.Module) -> int | None:
    """Return the stride of the patch embedding of a backbone, or ``None`` if it has none.

    Args:
        backbone (nn.Module): The backbone.
    """
    for path in _PATCH_EMBEDDINGS:
        try:
            return backbone.get_submodule(path).stride[0]
        except (AttributeError, TypeError, IndexError):
            continue
    return None


def _find_backbones(model):
    """Return the backbones of a model, or modules around them: those of detectors, and others that embed patches."""
    roots = [detector.backbone for detector in detectors(model).values()] or [model]
    known = {id(inside) for root in roots for inside in root.modules()}
    others = [part for part in _parts_that_embed_patches(model) if known.isdisjoint(map(id, part.modules()))]
    return [part for root in (*roots, *others) for part in _split(root)]


def _split(root):
    """Return the backbones inside of a module, such as those of two kinds of images, if they hold all of its blocks."""
    parts = _parts_that_embed_patches(root)
    if len(parts) < 2:
        return [root]
    classes = _block_classes(root)
    number, *numbers = [sum(type(inside) in classes for inside in module.modules()) for module in (root, *parts)]
    return parts if sum(numbers) == number else [root]


def _parts_that_embed_patches(root):
    """Return the outermost modules that embed patches and hold blocks, the root itself included."""
    parts, inside = [], set()
    for module in root.modules():
        children = module._modules
        if id(module) in inside or not ('patch_embed' in children or 'downsample_layers' in children):
            continue
        if patch_stride(module) is not None and _block_classes(module):
            parts.append(module)
            inside.update(map(id, module.modules()))
    return parts


def _plan_backbone(root, settings, take, bounds):
    stages = _find_stages(root)
    if not stages:
        return None
    kind, depths = adapter_of(stages[0][0]), tuple(map(len, stages))
    defaults = {field.name: field.default for field in dataclasses.fields(SBPConfig)}
    for key in kind.absent:
        if getattr(settings, key) != defaults[key]:
            raise ValueError(f'{key}={getattr(settings, key)!r} has no effect in {type(root).__name__}; leave it out')
    owner = _find_backbone(root, stages)
    layers = {}
    for i, blocks in enumerate(stages):
        for j, block in enumerate(blocks):
            if take(block, mixin := adapter_of(block)):
                layers[i, j] = (block, mixin)
    if not layers:
        return None
    thins = settings.preset.form is not None and any(_thins(bounds[id(module)]) for module, _ in layers.values())
    layers |= {key: other for key, other in kind.others(owner, settings).items() if take(*other)}
    ratios = settings.layer_ratios(depths, kind.thinned_blocks(depths), kind.from_end)
    thinned = {key for key, (module, _) in layers.items() if settings.preset.form and _thins(bounds[id(module)])}
    ratios = {key: ratio for key, ratio in ratios.items() if key in thinned}
    return PlannedBackbone(owner, kind, layers, ratios, thins, '')


def _thins(bound):
    """Return whether an operation that a module uses can drop positions."""
    return any(binding.thinned for binding in bound.bindings.values())


def _find_stages(root):
    """Return the stages of a model: for each parent module of blocks, the list of its blocks, in the model's order."""
    stages = []
    classes = _block_classes(root)
    for parent in root.modules():
        if parent._modules and (blocks := [child for child in parent.children() if type(child) in classes]):
            stages.append(blocks)
    return stages


def _block_classes(root):
    """Return the classes of modules of a model whose adapters are those of blocks."""
    kinds = {*map(type, root.modules())}
    return {kind for kind in kinds if issubclass(adapter_of_class(kind) or LeanModule, LeanBlock)}


def _find_backbone(root, stages):
    """Return the innermost module that holds all blocks and is neither a list nor in one: the backbone."""
    number, classes = sum(map(len, stages)), _block_classes(root)
    lists = [module for module in root.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    listed = {id(child) for module in lists for child in module}
    holders = []
    for module in root.modules():  # from the outside to the inside
        if module not in lists and type(module) not in classes:
            blocks = [inside for inside in module.modules() if type(inside) in classes]
            if len(blocks) == number:
                holders.append(module)
    return ([module for module in holders if id(module) not in listed] or holders or [root])[-1]


def _format_nothing_to_change(what, left, remedy):
    reasons = '; '.join(f'{name}: {reason}' for name, reason in left.items())
    found = f' ({reasons})' if reasons else ''
    return f'{what}{found}; {remedy}, or support a module of your own (docs/extending.md)'
