"""Checks of a config before mmdet builds anything from it: bad input ends in one line that names it and the remedy.

Nothing here imports sbp_mmdet: whether the config does is one of the checks.
"""

import contextlib
import copy
import difflib
import inspect
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from annotation_files import KEYS, TEST_KEYS, PreflightError, check_annotations
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS, HOOKS, MODELS, OPTIMIZERS, TRANSFORMS
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import init_default_scope
from mmengine.runner import Runner

__all__ = [
    'PreflightError',
    'check_arguments',
    'check_backbone',
    'check_config',
    'load_config',
    'on_meta',
]

_OWN_HOOKS = ('LeanHook', 'CheckpointModulesHook', 'TargetsInChunksHook')


def load_config(path: str, options: dict | None = None) -> Config:
    """Read a config as mmdet's scripts do.

    Returns:
        Config: The config, overrides merged.

    Raises:
        PreflightError: If there is no such file, or it cannot be read with these overrides.
    """
    if '::' in path:
        raise PreflightError(
            f'config {path}: this script takes a file; write one that inherits from it: _base_ = {path!r}'
        )
    if not Path(path).is_file():
        raise PreflightError(f'config file {path} does not exist (working folder: {Path.cwd()}); check the path')
    try:
        config = Config.fromfile(path)
        _check_options(config, options or {})
        config.merge_from_dict(options or {})
    except PreflightError:
        raise
    except Exception as error:  # a config is a program: whatever it may raise
        raise PreflightError(f'config file {path}: {type(error).__name__}: {error}') from error
    return config


def _check_options(config, options):
    """Refuse a misspelt key, which mmengine would add at the top of the config and not read."""
    known = {*config, *inspect.signature(Runner.__init__).parameters, 'tta_model', 'tta_pipeline'}
    for key in options:
        first = key.partition('.')[0]
        near = [] if first in known else difflib.get_close_matches(first, known, n=1, cutoff=0.85)
        if near:
            raise PreflightError(f"--cfg-options {key}: the config has no '{first}'; did you mean '{near[0]}'?")


def check_arguments(config: Config, args: Namespace) -> None:
    """Check what a script's arguments need of the config and of the machine.

    Args:
        config (Config): The config, with the overrides of the command line.
        args (Namespace): Arguments of mmdet's or mmpretrain's script.

    Raises:
        PreflightError: For ``--auto-scale-lr`` without ``auto_scale_lr.base_batch_size``, or ``--amp`` on a CPU.
    """
    scaling = config.get('auto_scale_lr') or {}
    if getattr(args, 'auto_scale_lr', False) and not {'enable', 'base_batch_size'} <= set(scaling):
        raise PreflightError(
            '--auto-scale-lr: the config does not say for which batch size its learning rate is; add '
            'auto_scale_lr = dict(enable=False, base_batch_size=16)'
        )
    if getattr(args, 'amp', False) and get_device() == 'cpu':
        raise PreflightError('--amp: mixed precision needs a GPU, and there is none; leave --amp out')


def check_config(config: Config, splits: tuple[str, ...]) -> None:
    """Run every check.

    Raises:
        PreflightError: For the first bad input.
    """
    check_backbone(config)
    _check_hooks(config)
    _warn_if_unused(config)
    if 'train' in splits:
        _check_channels(config)
        _check_optimizer(config.get('optim_wrapper') or {})
    for split in splits:
        needed = TEST_KEYS if split == 'test' else KEYS
        for kind, dataset in _datasets((config.get(f'{split}_dataloader') or {}).get('dataset')):
            path = _local(dataset.get('ann_file'), dataset.get('data_root'), dataset.get('backend_args'))
            if path:
                classes = kind._load_metainfo(dataset.get('metainfo')).get('classes')
                names = check_annotations(path, f'{split}_dataloader.dataset.ann_file', classes, needed)
                if split == 'train' and classes and _labels_are_categories(kind, config):
                    _check_num_classes(config, len(set(classes) & set(names)), len(classes))
        _check_imagenet(config, split)
        evaluators = config.get(f'{split}_evaluator') or []
        for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
            path = _local(evaluator.get('ann_file'), None, evaluator.get('backend_args'))
            if path and evaluator.get('type') in ('CocoMetric', 'mmdet.CocoMetric'):
                check_annotations(path, f'{split}_evaluator.ann_file', needed=needed)


def _labels_are_categories(kind, config):
    """Return whether the labels of boxes are the file's categories: no transform of the user's own may map them.

    A panoptic data set, for example, has categories that no box has.
    """
    found = [step.get('type') for step in _dicts((config.get('train_dataloader') or {}).get('dataset'))]
    steps = [TRANSFORMS.get(name) if isinstance(name, str) else name for name in found]
    return kind.parse_data_info is CocoDataset.parse_data_info and all(map(_is_of_mmdet, steps))


def _is_of_mmdet(kind):
    """Return whether a class is of mmdet or mmcv; so is ``None``, a name that is not registered yet."""
    return kind is None or kind.__module__.partition('.')[0] in ('mmcv', 'mmdet')


def _check_num_classes(config, labels, known):
    """Find heads with fewer classes than the training data, which on a GPU fail with an assertion that names nothing.

    With more classes than metainfo names, training runs, but the evaluation fails with an IndexError.
    """
    model = config.model.get('detector') or config.model
    roi_head = model.get('roi_head')
    roi_head = roi_head if isinstance(roi_head, dict) else {}  # Co-DETR has a list of them
    heads = {
        'bbox_head': model.get('bbox_head'),
        'roi_head.bbox_head': roi_head.get('bbox_head'),
        'roi_head.mask_head': roi_head.get('mask_head'),
    }
    for name, found in heads.items():
        for head in found if isinstance(found, (list, tuple)) else [found or {}]:
            kind = MODELS.get(head['type']) if isinstance(head.get('type'), str) else head.get('type')
            if head.get('class_agnostic') or not _is_of_mmdet(kind):  # another head may count its classes otherwise
                continue
            if isinstance(number := head.get('num_classes'), int) and number < labels:
                raise PreflightError(
                    f'model.{name}: num_classes={number}, but the training data have {labels} classes; set '
                    f'num_classes={labels} in every head of the model'
                )
            if isinstance(number, int) and number > known:
                warnings.warn(
                    f'model.{name}: num_classes={number}, but metainfo of the training data names {known} classes; an '
                    f'evaluation may fail: set num_classes={known} in every head of the model',
                    stacklevel=2,
                )


def _check_optimizer(wrapper):
    """Check the optimizer, which mmengine would refuse with a traceback after reading the data."""
    if wrapper.get('type') == 'AmpOptimWrapper' and get_device() == 'cpu':
        raise PreflightError(
            'optim_wrapper: AmpOptimWrapper (mixed precision) needs a GPU, and none is there; on a CPU add '
            '--cfg-options optim_wrapper.type=OptimWrapper'
        )
    name = (wrapper.get('optimizer') or {}).get('type')
    if isinstance(name, str) and OPTIMIZERS.get(name) is None:
        needs = ': pip install bitsandbytes' if '8bit' in name else '; name its module in custom_imports'
        raise PreflightError(f'optim_wrapper.optimizer: no optimizer is registered as {name!r}{needs}')


def _check_channels(config):
    """Find images that are loaded in grey for a model that takes colours, which fail in the first step."""
    if 'sbp_mmdet' not in sys.modules:  # the config has not imported it
        return
    from sbp_mmdet.plan.channels import find_channel_mismatch, loaded_channels  # noqa: PLC0415

    channels = loaded_channels(config)
    if channels and (problem := find_channel_mismatch(config, channels)):
        raise PreflightError(f'{config.filename}, {problem}')


def _check_imagenet(config, split):
    """Check the folder of mmpretrain's ImageNet, which mmpretrain's own error would not name."""
    for dataset in _dicts((config.get(f'{split}_dataloader') or {}).get('dataset')):
        if str(dataset.get('type')).rpartition('.')[2] == 'ImageNet':
            root = _local(dataset.get('data_root'), None, dataset.get('backend_args'))
            if root and not root.is_dir():
                raise PreflightError(
                    f'{split}_dataloader: data_root={str(root)!r} of ImageNet is no folder (working folder: '
                    f'{Path.cwd()}); give the folder that holds train and val'
                )


def check_backbone(config: Config) -> None:
    """Check that a backbone of this package is registered, because its package was imported, and accepts its arguments.

    Raises:
        PreflightError: If the backbone is not registered, or refuses its arguments.
    """
    for node in _dicts(config.get('model')):
        found = re.fullmatch(r'(?:\w+\.)?(SBP\w+)', str(node.get('type', '')))
        if not found:
            continue
        name = found[1]
        if MODELS.get(name) is None:
            raise PreflightError(
                f'{config.filename} uses {name} but does not import it: its custom_imports is '
                f'{config.get("custom_imports")}; write in the config: {_with_our_import(config)}'
            )
        arguments = {key: value for key, value in node.items() if key not in ('type', 'init_cfg', '_scope_')}
        try:
            with torch.device('meta'):
                backbone = MODELS.get(name)(**arguments)
        except Exception as error:  # whatever its values may raise
            inherited = '; is it of another backbone in the _base_? Then put _delete_=True into yours'
            remedy = inherited if 'unexpected keyword argument' in str(error) else ''
            text = f'{error}' if isinstance(error, (TypeError, ValueError)) else f'{type(error).__name__}: {error}'
            raise PreflightError(f'{config.filename}, {name}: {text}{remedy}') from error
        _check_scales(config, getattr(backbone, 'min_size', 1))
        if node is config.model.get('backbone'):
            from sbp_mmdet.plan.config_checks import find_neck_mismatch  # noqa: PLC0415  the config has imported it

            if problem := find_neck_mismatch(config.model, name, backbone):
                raise PreflightError(f'{config.filename}, {problem}')


def _check_hooks(config):
    """Find hooks of sbp_mmdet that are not registered, and presets that do not apply to the detector."""
    for hook in config.get('custom_hooks') or []:
        name = str(hook.get('type')).rpartition('.')[2]
        if name not in _OWN_HOOKS:
            near = difflib.get_close_matches(name, _OWN_HOOKS, n=1, cutoff=0.75)
            if near and HOOKS.get(name) is None:
                raise PreflightError(f'{config.filename}: custom_hooks has {name!r}; did you mean {near[0]!r}?')
            continue
        if HOOKS.get(name) is None:
            raise PreflightError(
                f'{config.filename}: custom_hooks has {name}, but its custom_imports is '
                f'{config.get("custom_imports")}; write in the config: {_with_our_import(config)}'
            )
        try:
            hook = HOOKS.build({key: value for key, value in hook.items() if key != 'priority'})
            if detector := on_meta(config):
                hook.apply(detector)
        except (TypeError, ValueError) as error:
            raise PreflightError(f'{config.filename}, custom_hooks, {name}: {error}') from error


def _with_our_import(config):
    """Return a line that imports this package beside what the config imports. A config's list replaces its parent's."""
    return f'custom_imports = dict(imports={[*_imported(config), "sbp_mmdet"]}, allow_failed_imports=False)'


def _imported(config):
    """Return the names of the modules that a config imports."""
    names = (config.get('custom_imports') or {}).get('imports') or []
    return [names] if isinstance(names, str) else [*names]


def _warn_if_unused(config):
    """Warn if a config imports this package but does not use it, for example because a key is misspelt."""
    ours = [*_dicts(config.get('model')), *(config.get('custom_hooks') or []), *_dicts(config.get('optim_wrapper'))]
    kinds = [node.get('type') for node in ours]
    kinds = [getattr(kind, '__name__', str(kind).rpartition('.')[2]) for kind in kinds]
    used = any(kind in (*_OWN_HOOKS, 'RehearseHook') or kind.startswith('SBP') or '8bit' in kind for kind in kinds)
    if 'sbp_mmdet' not in _imported(config) or used:
        return
    near = difflib.get_close_matches('custom_hooks', [key for key in config if key != 'custom_hooks'], n=1, cutoff=0.8)
    hint = f'; {near[0]!r} is no key of mmengine, did you mean custom_hooks?' if near else ''
    warnings.warn(
        f'{config.filename} imports sbp_mmdet, but has no LeanHook in custom_hooks and no backbone of it, so training '
        f'is plain{hint}',
        stacklevel=2,
    )


def on_meta(config: Config) -> torch.nn.Module | None:
    """Build the model without memory for its weights; return ``None`` if that fails, which mmdet reports later."""
    init_default_scope(config.get('default_scope', 'mmdet'))
    for device in ('meta', 'cpu'):  # mmdet's Swin reads numbers that it makes, so they have to be somewhere
        with contextlib.suppress(Exception), torch.device(device):
            return MODELS.build(copy.deepcopy(config.model)).to('meta')  # DINO writes into its config
    return None


def _check_scales(config, min_size):
    """Find pipelines whose images are smaller than the backbone's stride, however they are padded."""
    divisor = (config.model.get('data_preprocessor') or {}).get('pad_size_divisor', 1)
    for split in ('train', 'val', 'test'):
        for step in _dicts(config.get(f'{split}_dataloader')):
            scales = step.get('scale', step.get('scales')) if 'Resize' in str(step.get('type')) else None
            scales = (scales, scales) if isinstance(scales, (int, float)) else scales or []
            scales = [scales] if scales and not isinstance(scales[0], (list, tuple)) else scales
            longest = max((max(scale) for scale in scales), default=min_size)
            if -(-longest // divisor) * divisor < min_size:
                raise PreflightError(
                    f'{split}_dataloader: {step["type"]} makes images of at most {longest} pixels, smaller than the '
                    f'total stride {min_size} of the backbone; give a larger scale, or pad with '
                    f'model.data_preprocessor.pad_size_divisor={min_size}'
                )


def _dicts(node) -> Iterator[dict]:
    """Yield every dict inside of a config."""
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for item in node:
            yield from _dicts(item)


def _datasets(node) -> Iterator[tuple[type, dict]]:
    """Yield class and config of each COCO-format data set of a dataloader, inside of wrappers such as RepeatDataset."""
    for dataset in _dicts(node):
        kind = dataset.get('type')
        kind = DATASETS.get(kind) if isinstance(kind, str) else kind
        if inspect.isclass(kind) and issubclass(kind, CocoDataset):
            yield kind, dataset


def _local(ann_file, data_root, backend_args) -> Path | None:
    """Return the path of an annotation file, joined as in mmengine; None if it is not a local file."""
    remote = backend_args and backend_args.get('backend', 'local') not in ('local', 'LocalBackend')
    if not ann_file or remote or '://' in f'{data_root or ""}{ann_file}':
        return None
    return Path(data_root or '') / ann_file
