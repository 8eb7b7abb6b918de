"""One config, many variants: presets of the backbone, and pieces outside of it.

A variant is a preset of :data:`sbp_mmdet.settings.PRESETS`, followed by pieces: ``'recompute+cp-heads+targets'``.
"""

import copy
import importlib.util
import inspect
from pathlib import Path

import torch
from mmdet.registry import HOOKS, MODELS
from mmengine.config import Config

from ..apply import SBPHook
from ..families import family_of
from ..settings import SBPSettings, preset_named

__all__ = [
    'PIECES',
    'applicable',
    'backbone_change',
    'imports_of',
    'imports_with_plugin',
    'load_config',
    'piece_change',
    'with_variant',
    'without_hook',
]

PIECES = {
    'cp-heads': 'box and mask heads run again in the backward pass; gradients exact',
    'cp-neck': 'the neck runs again in the backward pass; gradients exact',
    'cp-transformer': 'layers of a transformer encoder and decoder run again in the backward pass; gradients exact',
    'cp-rpn': 'the RPN head runs again in the backward pass; gradients exact',
    'sbp-neck': 'SBP on the 1x1 convolutions of the FPN; gradients are not exact',
    'sbp-rpn': "SBP on the RPN head's ReLU and 1x1 convolutions; gradients are not exact",
    'sbp-masks': "SBP on the mask heads' last layers; gradients are not exact",
    'skip': 'blocks leave out the images that stochastic depth drops (other ones in each step); gradients exact',
    'targets': 'mask targets and IoUs are made piece by piece; targets exact',
    'adamw8bit': 'optimizer states in 8 bits (bitsandbytes); gradients exact, updates are not',
}


# Where DETR-like detectors, MaskFormer and Mask2Former have transformers: path in the config and in the model.
_TRANSFORMERS = ('encoder', 'decoder', 'panoptic_head.pixel_decoder.encoder', 'panoptic_head.transformer_decoder')


class NotApplicable(ValueError):
    """The variant makes no sense for this model."""


def load_config(path: str, options: dict | None = None) -> Config:
    """Reads a config. The import of mmpretrain may fail: SBP's backbones stand in for its own.

    Args:
        path (str): Config file, or ``mmdet::family/name.py``.
        options (dict | None): ``--cfg-options``. Default: None.

    Returns:
        Config: The config, overrides merged.

    Raises:
        ValueError: If it or a package that it inherits from is missing, it has no model, or an import fails.
    """
    file = _of_package(path) if '::' in str(path) else Path(path)
    if not file.is_file():
        raise ValueError(f'config file {file} does not exist (working folder: {Path.cwd()}); check the path')
    try:
        config = Config.fromfile(file, import_custom_modules=False)
        config.merge_from_dict(options or {})
    except Exception as error:  # a config is a program: whatever it may raise
        raise ValueError(f'config file {path}: {type(error).__name__}: {error}') from error
    if not config.get('model') or not config.get('optim_wrapper'):
        raise ValueError(f'{path} has no model or no optim_wrapper; give the config that you train with')
    for name in imports_of(config):
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not name.startswith('mmpretrain'):
                raise ValueError(f'{path}: custom_imports: {name} cannot be imported: {error}') from error
    return config


def imports_of(config: Config) -> list[str]:
    """The modules that ``custom_imports`` of a config names."""
    found = (config.get('custom_imports') or {}).get('imports') or []
    return [found] if isinstance(found, str) else found


def imports_with_plugin(config: Config) -> list[str]:
    """``custom_imports`` of a config whose backbone becomes one of ours: its own, for a child's list replaces its
    parent's, without mmpretrain's, whose backbone is left out."""
    own = [name for name in imports_of(config) if not name.startswith('mmpretrain')]
    return list(dict.fromkeys([*own, 'sbp_mmdet']))


def _of_package(path):
    """The file that 'mmdet::family/name.py' means, found as mmengine does it, but without importing what it imports."""
    package, name = path.split('::', 1)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f'{path}: there is no package {package}')
    folder = Path(spec.submodule_search_locations[0])
    installed = folder / '.mim/configs' / name
    return installed if installed.is_file() else folder.parent / 'configs' / name


def without_hook(config: Config) -> Config:
    """A config that says by ``sbp_cfg`` of its backbone what it said by ``SBPHook``.

    Left in its place the hook would make the plain backbone one with SBP, and collide with every other ``sbp_cfg``.

    Args:
        config (Config): Config of a detector.

    Returns:
        Config: A changed copy, with the backbone that stands in for its own; without such a hook the config itself.

    Raises:
        ValueError: If there is no such backbone, or the backbone has an ``sbp_cfg`` already.
    """
    hooks = config.get('custom_hooks') or []
    found = [hook for hook in hooks if _is_sbp(hook['type'])]
    if not found:
        return config
    backbone = config.model.get('backbone') or {}
    family = family_of(backbone)
    if family is None:
        raise ValueError(
            f'custom_hooks: SBPHook changes the backbone, {backbone.get("type")}; none of sbp_mmdet stands in for it, '
            'so presets and settings cannot be compared; leave SBPHook out to compare what is exact'
        )
    if backbone.get('sbp_cfg') is not None:
        raise ValueError(f'custom_hooks: SBPHook, but {backbone.type} has sbp_cfg of its own; leave one of them out')
    sbp_cfg = {key: value for key, value in found[-1].items() if key not in ('type', 'priority')}
    if 'blocks' not in sbp_cfg:
        sbp_cfg.update(_blocks_of_the_hook(dict(backbone, type=family.backbone, init_cfg=None)))
    changed = copy.deepcopy(config)
    changed.custom_hooks = [hook for hook in hooks if hook not in found]
    changed.model.backbone.update(type=family.backbone, sbp_cfg=sbp_cfg)
    return changed


def _is_sbp(kind):
    kind = HOOKS.get(kind) if isinstance(kind, str) else kind
    return isinstance(kind, type) and issubclass(kind, SBPHook)


def _blocks_of_the_hook(backbone):
    """The hook's default of ``blocks``, which a list of keep ratios counts on; a backbone may have the paper's."""
    with torch.device('meta'):
        depths = MODELS.build(backbone).depths
    return dict(blocks=[*depths[:-1], 0]) if len(depths) > 1 else {}


def backbone_change(config: Config, variant: str) -> dict:
    """What a variant changes in ``model.backbone``.

    Args:
        config (Config): Config of a detector.
        variant (str): Preset, then pieces, joined by '+'.

    Returns:
        dict: New values.

    Raises:
        NotApplicable: If the backbone has no such preset.
        ValueError: If the preset is unknown, or there is no backbone; and see :func:`without_hook`.
    """
    name, *pieces = variant.split('+')
    preset = preset_named(name)
    backbone = without_hook(config).model.get('backbone')
    if not backbone:
        raise ValueError(f'the model ({config.model.get("type")}) has no model.backbone, whose memory this is about')
    family = family_of(backbone)
    if family is None:
        return _stock_change(backbone, preset, pieces)
    if not family.has_preset(name):
        raise NotApplicable(f'{name}: {family.name} has no such preset; it has {list(family.presets)}')
    own = {'keep_ratio': 0.5, **SBPSettings.own_keys(backbone.get('sbp_cfg') or {})}
    if 'skip' in pieces:
        own['skip_dropped_images'] = True
    change = dict(type=family.backbone, **preset.arguments(**own))
    if 'skip' in pieces and change['sbp_cfg'] is None:
        raise NotApplicable(
            f'skip: {name} has no sbp_cfg to hold skip_dropped_images; take another preset, such as exact'
        )
    if 'skip' in pieces and not backbone.get('drop_path_rate'):
        raise NotApplicable('skip: drop_path_rate of the backbone is 0, so no image is dropped')
    return change


def _stock_change(backbone, preset, pieces):
    """Of a backbone that SBP does not apply to: plain, or checkpointed where it can be."""
    kind = backbone.get('type')
    built = MODELS.get(kind) if isinstance(kind, str) else kind
    takes_cp = built is not None and 'with_cp' in inspect.signature(built.__init__).parameters
    if preset.sbp_cfg is not None or (preset.with_cp and not takes_cp):
        apply = 'none and with_cp apply' if takes_cp else 'only none applies'
        raise NotApplicable(f'{preset.name}: SBP does not apply to the backbone, {kind}: {apply}')
    if 'skip' in pieces:
        raise NotApplicable(f'skip: SBP does not apply to the backbone, {kind}')
    return dict(with_cp=preset.with_cp) if takes_cp else {}


def piece_change(config: Config, pieces: list[str]) -> dict:
    """What pieces change in a config, outside of its backbone.

    Args:
        config (Config): Config of a detector.
        pieces (list[str]): Keys of ``PIECES``.

    Returns:
        dict: New ``custom_hooks`` and ``optimizer`` values.

    Raises:
        NotApplicable: If the model lacks what the piece is about.
        ValueError: For an unknown piece.
    """
    hooks, modules, optimizer = [], {'cp': [], 'sbp': []}, {}
    for piece in pieces:
        if piece not in PIECES:
            raise ValueError(f'piece {piece!r} is unknown; choose from {list(PIECES)}')
        kind, _, part = piece.partition('-')
        if kind in modules:
            found = _modules_of(config.model, kind, part)
            if not found:
                raise NotApplicable(f'{piece}: the model has none')
            modules[kind] += found
        elif piece == 'targets':
            hooks.append(dict(type='TargetsInChunksHook'))
        elif piece == 'adamw8bit':
            kind = str(config.optim_wrapper.optimizer.type)
            if kind not in ('Adam', 'AdamW', 'AdamW8bit'):
                raise NotApplicable(f'adamw8bit: the optimizer is {kind}, not AdamW')
            optimizer = dict(type='AdamW8bit')
    for kind, hook in (('sbp', 'SBPModulesHook'), ('cp', 'CheckpointModulesHook')):
        if modules[kind]:
            hooks.insert(0, dict(type=hook, modules=modules[kind]))
    return dict(custom_hooks=hooks, optimizer=optimizer)


def _modules_of(model, kind, part):
    """Names of the modules that 'cp' or 'sbp' applies to, of a part of the model."""
    roi, neck, rpn = (model.get(key) or {} for key in ('roi_head', 'neck', 'rpn_head'))
    if kind == 'sbp':
        masks = roi.get('mask_head') or []
        masks = [masks] if isinstance(masks, dict) else masks
        return {
            'neck': ['neck.lateral_convs'] if isinstance(neck, dict) and neck.get('type') == 'FPN' else [],
            'rpn': ['rpn_head'] if rpn.get('type') == 'RPNHead' else [],
            'masks': ['roi_head.mask_head'] if {head.get('type') for head in masks} == {'FCNMaskHead'} else [],
        }[part]
    if part == 'heads':
        return [f'roi_head.{h}' for h in ('bbox_head', 'mask_head') if roi.get(h)] or (
            ['bbox_head'] if model.get('bbox_head') else []
        )
    if part == 'transformer':
        return [f'{path}.layers' for path in _TRANSFORMERS if _lookup(model, path).get('num_layers')]
    return ['neck' if part == 'neck' else 'rpn_head'] if {'neck': neck, 'rpn': rpn}[part] else []


def _lookup(model, path):
    for key in path.split('.'):
        model = model.get(key) if isinstance(model, dict) else None
    return model or {}


def with_variant(config: Config, variant: str) -> Config:
    """A config under a variant.

    Args:
        config (Config): Config of a detector.
        variant (str): Preset, then pieces, joined by '+'.

    Returns:
        Config: A changed copy.

    Raises:
        NotApplicable: If the variant makes no sense for this model.
        ValueError: For an unknown preset or piece; and see :func:`without_hook`.
    """
    config = without_hook(config)
    backbone, change = backbone_change(config, variant), piece_change(config, variant.split('+')[1:])
    changed = copy.deepcopy(config)
    changed.model.backbone.update(backbone)
    changed.custom_hooks = [*(config.get('custom_hooks') or []), *change['custom_hooks']]
    changed.optim_wrapper.optimizer.update(change['optimizer'])
    return changed


def applicable(config: Config, variants: list[str]) -> tuple[list[str], dict[str, str]]:
    """Sorts variants.

    Args:
        config (Config): Config of a detector.
        variants (list[str]): Variants.

    Returns:
        tuple: Those that apply, and the reason for each of the others.

    Raises:
        ValueError: For an unknown preset or piece; and see :func:`without_hook`.
    """
    config = without_hook(config)
    good, bad = [], {}
    for variant in variants:
        try:
            with_variant(config, variant)
            good.append(variant)
        except NotApplicable as error:
            bad[variant] = str(error)
    return good, bad
