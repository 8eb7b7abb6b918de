"""Checks of a config before mmdet builds anything from it: bad input ends in one line that names it and the remedy.

Nothing here imports sbp_mmdet: whether the config does is one of the checks.
"""

import difflib
import inspect
import os
import re
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from annotation_files import (
    KEYS,
    TEST_KEYS,
    PreflightError,
    check_annotations,
    check_image_folder,
    check_training_images,
    shortened,
)
from hook_checks import build_on_meta, check_hooks, class_name, dicts, warn, warn_if_unused, with_our_import
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS, MODELS, TRANSFORMS
from mmdet_script import find_work_dir
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.runner import Runner
from runner_checks import check_launcher, check_optimizer, check_runner_keys, list_loaders
from torch.utils.data import DataLoader

__all__ = [
    'PreflightError',
    'build_on_meta',
    'check_arguments',
    'check_backbone',
    'check_config',
    'load_config',
]


def load_config(path: str, options: dict | None = None) -> Config:
    """Read a config as mmdet's scripts do.

    Args:
        path (str): Path of the config file.
        options (dict | None): Overrides by key, as ``--cfg-options`` gives them. If ``None``, there are none. Default:
            None.

    Returns:
        Config: The config, overrides merged.

    Raises:
        PreflightError: If there is no such file, or it cannot be read with these overrides.
    """
    if '::' in path:
        raise PreflightError(
            f'config {path}: this script takes a file; write one that inherits from it: _base_ = {path!r}'
        )
    if Path(path).is_dir():
        raise PreflightError(f'{path} is a folder; give the path of a config file in it')
    if not Path(path).is_file():
        raise PreflightError(f'config file {path} does not exist (working folder: {Path.cwd()}); check the path')
    try:
        config = Config.fromfile(path)
    except RecursionError as error:
        raise PreflightError(
            f'config file {path} inherits from itself; look at _base_ in it and in its parents'
        ) from error
    except (Exception, SystemExit) as error:  # a config is a program: whatever it may raise
        text = _describe_missing_import(error) or f'{type(error).__name__}: {error}'
        raise PreflightError(f'config file {path}: {text}') from error
    _check_options(config, options or {})
    try:
        config.merge_from_dict(options or {})
    except Exception as error:  # the overrides may be of any kind
        from sbp_mmdet.plan.config_keys import describe_bad_override  # noqa: PLC0415  nothing is checked after this

        raise PreflightError(describe_bad_override(config, options, error)) from error
    return config


def _describe_missing_import(error):
    """Return which module of ``custom_imports`` is missing; mmengine's own message lists the whole search path."""
    while error.__context__ is not None:
        error = error.__context__
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or 'import_modules_from_strings' not in {f.name for f in traceback.extract_tb(error.__traceback__)}:
        return None
    near = difflib.get_close_matches(name, ['sbp_mmdet'], n=1)
    remedy = f'did you mean {near[0]!r}?' if near else 'run this from the folder of your project, with PYTHONPATH=.'
    return f'custom_imports: {error}; {remedy}'


def _check_options(config, options):
    """Refuse a misspelt key, which mmengine would add at the top of the config and not read."""
    known = {*config, *inspect.signature(Runner.__init__).parameters, 'tta_model', 'tta_pipeline'}
    for key in options:
        first = key.partition('.')[0]
        near = [] if first in known else difflib.get_close_matches(first, known, n=1, cutoff=0.8)
        if near:
            raise PreflightError(f"--cfg-options {key}: the config has no '{first}'; did you mean '{near[0]}'?")


def check_arguments(config: Config, args: Namespace) -> None:
    """Check what a script's arguments need of the config and of the machine.

    Args:
        config (Config): The config, with the overrides of the command line.
        args (Namespace): Arguments of mmdet's or mmpretrain's script.

    Raises:
        PreflightError: For ``--auto-scale-lr`` without ``auto_scale_lr.base_batch_size``, ``--amp`` on a CPU, a work
            directory that cannot be made or in which the config would be overwritten, or a file for predictions that is
            not named as a pickle.
    """
    check_launcher(getattr(args, 'launcher', 'none'))
    scaling = config.get('auto_scale_lr') or {}
    if getattr(args, 'auto_scale_lr', False) and not {'enable', 'base_batch_size'} <= set(scaling):
        raise PreflightError(
            '--auto-scale-lr: the config does not say for which batch size its learning rate is; add '
            'auto_scale_lr = dict(enable=False, base_batch_size=16)'
        )
    if getattr(args, 'amp', False) and get_device() == 'cpu':
        raise PreflightError('--amp: mixed precision needs a GPU, and there is none; leave --amp out')
    _check_work_dir(find_work_dir(config, args), config)
    out = getattr(args, 'out', None)
    if out and getattr(args, 'out_item', None) in ('pred', None) and not out.endswith(('.pkl', '.pickle')):
        raise PreflightError(f'--out {out}: predictions are written as a pickle; give a name that ends in .pkl')


def _check_work_dir(path, config):
    found = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not found.is_dir():
        raise PreflightError(f'work directory {path}: {found} is a file; give another folder with --work-dir')
    try:
        os.rmdir(tempfile.mkdtemp(dir=found))  # permissions alone do not tell: not every file system can be written to
    except OSError as error:
        raise PreflightError(
            f'work directory {path}: {found} cannot be written to ({error.strerror}); give another one with --work-dir'
        ) from error
    file = Path(config.filename or '')
    copy = path / file.name
    if file.is_file() and copy.exists() and copy.samefile(file) and _is_written_by_hand(file):
        raise PreflightError(
            f'work directory {path}: mmengine would overwrite {file} with its copy of the config, in which all parents '
            'are merged; give another folder with --work-dir'
        )


def _is_written_by_hand(file):
    """Return whether a config is none of mmengine's copies, which have no parents and no comments."""
    return re.search(r'^\s*#|_base_|read_base', file.read_text(), re.M) is not None


def check_config(config: Config, splits: tuple[str, ...]) -> None:
    """Check a config before a run, for mistakes that mmengine would find late or not at all.

    Args:
        config (Config): The config.
        splits (tuple[str, ...]): Datasets that the run reads: 'train', 'val', 'test'.

    Raises:
        PreflightError: For the first bad input.
    """
    check_runner_keys(config, splits)
    check_backbone(config)
    check_hooks(config)
    warn_if_unused(config)
    if 'train' in splits:
        _check_channels(config)
        check_optimizer(config)
    for split in splits:
        needed = TEST_KEYS if split == 'test' else KEYS
        loaders = list_loaders(config, split)
        for key, loader in loaders.items():
            _check_dataloader(key, loader)
            _check_datasets(config, split, f'{key}.dataset', loader.get('dataset'), alone=len(loaders) == 1)
            _check_imagenet(key, loader)
        for evaluator in dicts(config.get(f'{split}_evaluator')):
            path = class_name(evaluator) == 'CocoMetric' and _local(
                evaluator.get('ann_file'), None, evaluator.get('backend_args')
            )
            if path:
                check_annotations(path, f'{split}_evaluator.ann_file', needed=needed)


def _check_datasets(config, split, key, node, alone):
    """Check the data sets of a dataloader. If it is not ``alone``, the heads may be of other loaders' data."""
    for kind, dataset in _datasets(node):
        path = _local(dataset.get('ann_file'), dataset.get('data_root'), dataset.get('backend_args'))
        if not path:
            continue
        classes = kind._load_metainfo(dataset.get('metainfo')).get('classes')
        names = check_annotations(path, f'{key}.ann_file', classes, TEST_KEYS if split == 'test' else KEYS)
        if split == 'train' and classes and _labels_are_categories(kind, node):
            if alone:
                _check_num_classes(config, len(set(classes) & set(names)), len(classes))
            _check_training_set(path, f'{key}.ann_file', dataset, classes, names)
        _check_images(path, f'{key}.data_prefix', kind, dataset)


def _check_dataloader(key, loader):
    """Find a misspelt key of a dataloader, whose error would name neither."""
    known = {*inspect.signature(DataLoader.__init__).parameters, 'num_batch_per_epoch', '_scope_', '_delete_'}
    known -= {'self'}
    for name, value in loader.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f'did you mean {near[0]!r}?' if near else 'remove it'
            raise PreflightError(f'{key}.{name}={value!r}: DataLoader has no argument {name!r}; {remedy}')


def _labels_are_categories(kind, node):
    """Return whether the labels of boxes are the file's categories: no transform of the user's own may map them.

    A panoptic data set, for example, has categories that no box has.
    """
    found = [step.get('type') for step in dicts(node)]
    steps = [TRANSFORMS.get(name) if isinstance(name, str) else name for name in found]
    return kind.parse_data_info is CocoDataset.parse_data_info and all(map(_is_of_mmdet, steps))


def _check_training_set(path, key, dataset, classes, names):
    """Check that the data set has images to train with, and warn of classes that its file does not have."""
    if not dataset.get('test_mode'):  # which filters nothing
        masks = any(step.get('with_mask') for step in dicts(dataset.get('pipeline')))
        check_training_images(path, key, classes, dataset.get('filter_cfg'), masks)
    if names and (absent := [name for name in classes if name not in names]):
        warn(
            f'{key}: metainfo has classes that are no category of {path}, so nothing is learnt of them: '
            f'{shortened(absent)}; the file has {shortened(names)}'
        )


def _check_images(path, key, kind, dataset):
    """Check that there are images, if mmdet's own code finds and reads them."""
    if (kind.load_data_list, kind.parse_data_info) != (CocoDataset.load_data_list, CocoDataset.parse_data_info):
        return
    prefix = dataset.get('data_prefix')
    prefix = prefix.get('img') if isinstance(prefix, dict) else None
    steps = [step for step in dicts(dataset.get('pipeline')) if isinstance(step.get('type'), (str, type))]
    kinds = [TRANSFORMS.get(step['type']) if isinstance(step['type'], str) else step['type'] for step in steps]
    reads = [step for step, loads in zip(steps, kinds, strict=True) if loads is LoadImageFromFile]
    if not isinstance(prefix, str) or not reads or not all(map(_is_of_mmdet, kinds)):
        return
    found = [
        _local(prefix or '.', dataset.get('data_root'), node.get('backend_args') or node.get('file_client_args'))
        for node in (dataset, *reads)
    ]
    if all(found):
        check_image_folder(path, f'{key}.img={prefix!r}', found[0])


def _is_of_mmdet(kind):
    """Return whether a class is of mmdet or mmcv. ``None``, for a name that is not registered yet, counts as theirs."""
    return kind is None or kind.__module__.partition('.')[0] in ('mmcv', 'mmdet')


def _check_num_classes(config, labels, known):
    """Find heads with fewer classes than the training data, which on a GPU fail with an assertion that names nothing.

    With more classes than metainfo names, training runs, and ``CocoMetric`` fails at the first box of another class.
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
                warn(
                    f'model.{name}: num_classes={number}, but metainfo of the training data names {known} '
                    f'class{"es" if known > 1 else ""}: CocoMetric raises an IndexError at the first detection of any '
                    f'other class; set num_classes={known} in every head of the model'
                )


def _check_channels(config):
    """Find images that are loaded in grey for a model that takes colours, which fail in the first step."""
    if 'sbp_mmdet' not in sys.modules:  # the config has not imported it
        return
    from sbp_mmdet.plan.channels import find_channel_mismatch, loaded_channels  # noqa: PLC0415

    channels = loaded_channels(config)
    if channels and (problem := find_channel_mismatch(config, channels)):
        raise PreflightError(f'{config.filename}, {problem}')


def _check_imagenet(key, loader):
    """Check the folder of mmpretrain's ImageNet, which mmpretrain's own error would not name."""
    for dataset in dicts(loader.get('dataset')):
        if class_name(dataset) == 'ImageNet':
            root = _local(dataset.get('data_root'), None, dataset.get('backend_args'))
            if root and not root.is_dir():
                raise PreflightError(
                    f'{key}: data_root={str(root)!r} of ImageNet is no folder (working folder: '
                    f'{Path.cwd()}); give the folder that holds train and val'
                )


def check_backbone(config: Config) -> None:
    """Check that a backbone of this package is registered, because its package was imported, and accepts its arguments.

    Raises:
        PreflightError: If the backbone is not registered, or refuses its arguments.
    """
    names = [name for node in dicts(config.get('model')) if re.fullmatch(r'SBP\w+', name := class_name(node))]
    for name in names:
        if MODELS.get(name) is None:
            raise PreflightError(
                f'{config.filename} uses {name} but does not import it: its custom_imports is '
                f'{config.get("custom_imports")}; write in the config: {with_our_import(config)}'
            )
    if names:
        from sbp_mmdet.plan.backbone_checks import check_backbones  # noqa: PLC0415  the config has imported it

        try:
            backbones = check_backbones(config)
        except ValueError as error:
            raise PreflightError(f'{config.filename}, {error}') from error
        for backbone in backbones:
            _check_scales(config, getattr(backbone, 'min_size', 1))


def _check_scales(config, min_size):
    """Find pipelines whose images are smaller than the backbone's stride, however they are padded."""
    divisor = (config.model.get('data_preprocessor') or {}).get('pad_size_divisor', 1)
    for split in ('train', 'val', 'test'):
        for step in dicts(config.get(f'{split}_dataloader')):
            scales = step.get('scale', step.get('scales')) if 'Resize' in class_name(step) else None
            scales = (scales, scales) if isinstance(scales, (int, float)) else scales or []
            scales = [scales] if scales and not isinstance(scales[0], (list, tuple)) else scales
            longest = max((max(scale) for scale in scales), default=min_size)
            if -(-longest // divisor) * divisor < min_size:
                raise PreflightError(
                    f'{split}_dataloader: {class_name(step)} makes images of at most {longest} pixels, smaller than '
                    f'the total stride {min_size} of the backbone; give a larger scale, or pad with '
                    f'model.data_preprocessor.pad_size_divisor={min_size}'
                )


def _datasets(node) -> Iterator[tuple[type, dict]]:
    """Yield class and config of each COCO-format data set of a dataloader, inside of wrappers such as RepeatDataset."""
    for dataset in dicts(node):
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
