"""Variants of a config: a preset for the whole detector, and pieces besides it.

The name of a variant is a preset of :data:`sbp_mmdet.presets.PRESETS`, followed by pieces: ``'exact+cp-heads'``. In a
config, a preset is one line: a ``LeanHook``.
"""

import copy
import difflib
import importlib.util
import re
from pathlib import Path

from mmengine.config import Config
from torch import nn

from ..apply import apply_lean, remove_lean
from ..hooks import LeanHook
from ..presets import PRESETS, Settings, preset_named
from ..surgery import hook_arguments, hook_class
from .backbone_checks import STANDS_IN
from .config_checks import check_config, check_options, list_imports
from .config_files import find_config_file, find_similar_config
from .config_keys import describe_bad_override
from .transforms import name_of

__all__ = [
    'PIECES',
    'PLAIN',
    'PLAIN_RUN',
    'NotApplicable',
    'find_piece_changes',
    'find_presets',
    'is_lean',
    'is_plain',
    'load_config',
    'name_full_checkpointing',
    'needs_mmpretrain',
    'own_gradients',
    'make_plain',
    'with_variant',
    'without_dropped_images',
]

PIECES = {
    'targets': 'training targets in chunks, as LeanHook computes them anyway; gradients exact',
    'cp-heads': 'box and mask heads are recomputed in the backward pass; gradients exact',
    'cp-rpn': 'the RPN head is recomputed in the backward pass; gradients exact',
    'cp-neck': 'the neck is recomputed in the backward pass; gradients exact',
    'cp-transformer': 'layers of transformer encoder and decoder are recomputed in the backward pass; gradients exact',
    'amp': 'mixed precision, fp16 with a loss scale; gradients are rounded',
    'adamw8bit': 'optimizer states in 8 bits (bitsandbytes); gradients exact, updates are not',
}

# Paths of transformers in config and model of DETR-like detectors, MaskFormer and Mask2Former.
_TRANSFORMERS = ('encoder', 'decoder', 'panoptic_head.pixel_decoder.encoder', 'panoptic_head.transformer_decoder')


_IN_PROJECT = '; run this from the folder of your project, with PYTHONPATH=. in front'


class NotApplicable(ValueError):
    """Error of a variant that does not apply to the model."""


def load_config(path: str, options: dict | None = None) -> Config:
    """Load a config. mmpretrain may be missing, because this package's backbones replace its own.

    Args:
        path (str): Config file, or ``mmdet::family/name.py``.
        options (dict | None): Overrides of ``--cfg-options``. If ``None``, there are none. Default: None.

    Returns:
        Config: The config with overrides.

    Raises:
        ValueError: If the file or a package that it inherits from is missing, if it has no model or no
            ``optim_wrapper``, if an import fails, or for a mistake that :func:`.config_checks.check_config` or
            :func:`.config_checks.check_options` finds.
    """
    file = find_config_file(str(path))
    try:
        config = Config.fromfile(file, import_custom_modules=False)
    except RecursionError as error:
        raise ValueError(f'config file {path} inherits from itself; look at _base_ in it and in its parents') from error
    except (Exception, SystemExit) as error:  # a config is a program and may raise any error, or end
        missing = re.search(r'[\'"](.+\.py)[\'"]', f'{error}') if isinstance(error, FileNotFoundError) else None
        similar = find_similar_config(Path(missing[1])) if missing else None
        hint = f'; did you mean {similar}?' if similar else ''
        raise ValueError(f'config file {path}: {type(error).__name__}: {error}{hint}') from error
    check_options(config, options)
    try:
        config.merge_from_dict(options or {})
    except Exception as error:  # the overrides may be of any kind
        raise ValueError(f'{path}: {describe_bad_override(config, options, error)}') from error
    if missing := [key for key in ('model', 'optim_wrapper') if not config.get(key)]:
        raise ValueError(f'{path} has no {" and no ".join(missing)}; give the MMDetection config that you train with')
    try:
        imports = list_imports(config)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
    for name in imports:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module is a program, too
            allowed = name.startswith('mmpretrain') or config.custom_imports.get('allow_failed_imports')
            if not (isinstance(error, ImportError) and allowed):
                near = difflib.get_close_matches(name, ['sbp_mmdet'], n=1)
                remedy = f'; did you mean {near[0]!r}?' if near else _IN_PROJECT
                remedy = remedy if getattr(error, 'name', None) == name.partition('.')[0] else ''
                what = f'{error}' if isinstance(error, ImportError) else f'{type(error).__name__}: {error}'
                raise ValueError(f'{path}: custom_imports: {name} cannot be imported: {what}{remedy}') from error
    try:
        check_config(config)
    except (TypeError, ValueError) as error:  # mmengine raises a TypeError for an unknown argument of a hook
        raise ValueError(f'{path}: {error}') from error
    return config


def needs_mmpretrain(config: Config) -> bool:
    """Return whether a config's backbone is of mmpretrain, which is not installed; ``STANDS_IN`` names ours."""
    kind = (config.model.get('backbone') or {}).get('type')
    return isinstance(kind, str) and kind in STANDS_IN and importlib.util.find_spec('mmpretrain') is None


def make_plain(config: Config) -> Config:
    """Return a config of the same detector without this package: no preset, no checkpointing of blocks.

    Args:
        config (Config): Config of a detector.

    Returns:
        Config: A changed copy. A backbone of ``STANDS_IN`` is replaced by that of this package.
    """
    changed = copy.deepcopy(config)
    backbone = changed.model.get('backbone') or {}
    kind = backbone.get('type')
    backbone.update(type=STANDS_IN.get(kind, kind), **{key: v for key, v in PLAIN.items() if key in backbone})
    changed.custom_hooks = [hook for hook in changed.get('custom_hooks') or [] if not is_lean(hook)]
    changed.update({key: None for key in PLAIN_RUN if changed.get(key)})
    _without_checkpoints(changed.model)
    return changed


def _without_checkpoints(node):
    """Set the numbers of checkpointed transformer layers (``num_cp``, ``with_cp``) of a config to -1, in place."""
    if isinstance(node, dict):
        for key in ('num_cp', 'with_cp'):
            if type(node.get(key)) is int and node[key] > 0:
                node[key] = -1
        node = [*node.values()]
    if isinstance(node, (list, tuple)):
        for item in node:
            _without_checkpoints(item)


PLAIN = dict(sbp_cfg=None, with_cp=False)
PLAIN_RUN = ('activation_checkpointing',)  # keys of mmengine's runner that change what a model stores


def is_lean(hook: dict) -> bool:
    """Return whether an entry of ``custom_hooks`` is a :class:`.hooks.LeanHook`."""
    kind = hook_class(hook)
    return isinstance(kind, type) and issubclass(kind, LeanHook)


def is_plain(config: Config) -> bool:
    """Return whether a config names no preset and no checkpointed blocks, so that :func:`plain` is the same model."""
    backbone = config.model.get('backbone') or {}
    changes = [*(backbone.get(key) for key in PLAIN), *(config.get(key) for key in PLAIN_RUN)]
    return not _lean(config) and not any(changes)


def own_gradients(config: Config) -> str | None:
    """Return what the gradients of a config's own preset are, or ``None`` if it trains the plain model.

    Args:
        config (Config): Config of a detector.

    Returns:
        str | None: Gradients of the preset, see :class:`.presets.Preset`, with the keep ratio if positions are dropped.

    Raises:
        ValueError: If the settings of its hook or backbone are invalid.
    """
    if is_plain(config):
        return None
    changes = [('LeanHook', hook_arguments(hook)) for hook in _lean(config)]
    if sbp_cfg := (config.model.get('backbone') or {}).get('sbp_cfg'):
        changes.append(('sbp_cfg', sbp_cfg))
    for where, keys in changes:
        settings = Settings.parse(keys, where, 'exact' if where == 'LeanHook' else 'sbp')
        gradients = settings.preset.gradients
        if gradients != 'exact':
            return f'{gradients}, keep ratio {settings.keep_ratio}' if settings.preset.thins else gradients
    return 'exact'


def without_dropped_images(config: Config) -> Config:
    """Return a copy of a config with its own preset, whose steps drop no image by stochastic depth.

    Args:
        config (Config): Config of a detector. A backbone of ``STANDS_IN`` is replaced by that of this package.
    """
    changed = copy.deepcopy(config)
    changed.custom_hooks = changed.get('custom_hooks') or []
    backbone = changed.model.get('backbone') or {}
    backbone.update(type=STANDS_IN.get(backbone.get('type'), backbone.get('type')))
    sbp_cfg = backbone.get('sbp_cfg')
    for keys in [*_lean(changed), *([sbp_cfg] if sbp_cfg else [])]:
        if preset_named(keys.get('preset', 'sbp' if keys is sbp_cfg else 'exact')).form:
            keys['skip_dropped_images'] = False
    return changed


def _lean(config):
    return [hook for hook in config.get('custom_hooks') or [] if is_lean(hook)]


def find_presets(model: nn.Module) -> dict[str, str | None]:
    """Find the presets that apply to a model. The model is unchanged afterwards.

    Args:
        model (nn.Module): A plain detector.

    Returns:
        dict[str, str | None]: For each preset, why it does not apply, or ``None`` if it does.
    """
    reasons = {}
    for name in PRESETS:
        try:
            apply_lean(model, name)
            reasons[name] = None
        except ValueError as error:
            reasons[name] = str(error)
    remove_lean(model)
    return reasons


def with_variant(config: Config, variant: str, **keys) -> Config:
    """Return a config that trains with a variant.

    Args:
        config (Config): A plain config, see :func:`plain`.
        variant (str): Preset, then pieces, joined by '+'.
        **keys: Further keys of ``LeanHook``.

    Returns:
        Config: A changed copy.

    Raises:
        NotApplicable: If a piece does not apply to the model.
        ValueError: If the preset or a piece is unknown.
    """
    name, *pieces = variant.split('+')
    preset_named(name)
    change, changed = find_piece_changes(config, pieces), copy.deepcopy(config)
    hooks = [] if name == 'none' else [dict(type='LeanHook', preset=name, **keys)]
    changed.custom_hooks = [*changed.get('custom_hooks', []), *hooks, *change['custom_hooks']]
    changed.optim_wrapper.optimizer.update(change['optimizer'])
    changed.optim_wrapper.update(change['wrapper'])
    return changed


def name_full_checkpointing(config: Config, blocks: bool = True) -> str:
    """Return the name of the variant that checkpoints everything: blocks, transformer layers, neck and heads.

    Args:
        config (Config): A plain config, see :func:`plain`.
        blocks (bool): Whether ``preset='with_cp'`` applies to the model. Default: True.

    Returns:
        str: ``'with_cp+targets'`` or ``'none+targets'``, followed by the pieces that apply to the model.

    Example:
        >>> name_full_checkpointing(load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'))
        'with_cp+targets+cp-heads+cp-neck'
    """
    pieces = ['with_cp' if blocks else 'none', 'targets']
    for piece in PIECES:
        if piece.startswith('cp-') and _modules_of(config.model, piece.removeprefix('cp-')):
            pieces.append(piece)
    return '+'.join(pieces)


def find_piece_changes(config: Config, pieces: list[str]) -> dict:
    """Return the changes that pieces make to a config.

    Args:
        config (Config): Config of a detector.
        pieces (list[str]): Keys of :data:`PIECES`.

    Returns:
        dict: ``custom_hooks`` (a list of new hooks), and changed keys of the ``optimizer`` and its ``wrapper``.

    Raises:
        NotApplicable: If a piece does not apply to the model.
        ValueError: If a piece is unknown.
    """
    modules, optimizer, wrapper, hooks = [], {}, {}, []
    for piece in pieces:
        if piece not in PIECES:
            raise ValueError(f'piece {piece!r} is unknown; choose from {list(PIECES)}')
        if piece == 'adamw8bit':
            kind = name_of(config.optim_wrapper.optimizer)
            if kind not in ('Adam', 'AdamW', 'AdamW8bit'):
                raise NotApplicable(f'adamw8bit: the optimizer is {kind}, not AdamW')
            optimizer = dict(type='AdamW8bit')
        elif piece == 'amp':
            kind = name_of(config.optim_wrapper) or 'OptimWrapper'
            if kind != 'OptimWrapper':
                raise NotApplicable(f'amp: the optimizer wrapper is {kind}, not OptimWrapper')
            wrapper = dict(type='AmpOptimWrapper')
        elif piece == 'targets':
            hooks = [dict(type='TargetsInChunksHook')]
        elif checkpointed := _modules_of(config.model, piece.removeprefix('cp-')):
            modules += checkpointed
        else:
            raise NotApplicable(f'{piece}: the model has no such modules')
    hooks += [dict(type='CheckpointModulesHook', modules=modules)] if modules else []
    return dict(custom_hooks=hooks, optimizer=optimizer, wrapper=wrapper)


def _modules_of(model, part):
    """Return the names of the modules that a 'cp-' piece checkpoints."""
    roi = model.get('roi_head')
    roi = roi if isinstance(roi, dict) else {}  # Co-DETR has a list of them
    if part == 'heads':
        return [f'roi_head.{h}' for h in ('bbox_head', 'mask_head') if roi.get(h)] or (
            ['bbox_head'] if model.get('bbox_head') else []
        )
    if part == 'transformer':
        return [f'{path}.layers' for path in _TRANSFORMERS if _lookup(model, path).get('num_layers')]
    name = 'neck' if part == 'neck' else 'rpn_head'
    if not model.get(name):
        return []
    alone = name == 'rpn_head' and roi == {}  # mmdet's detector RPN calls its head bbox_head
    return ['bbox_head' if alone else name]


def _lookup(model, path):
    for key in path.split('.'):
        model = model.get(key) if isinstance(model, dict) else None
    return model or {}
