"""Checks of a config for mistakes that mmengine would find later, in a traceback, or not at all."""

import argparse
import difflib
import inspect
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from mmdet.models.detectors import SemiBaseDetector
from mmdet.models.mot import BaseMOTModel
from mmdet.registry import DATASETS, HOOKS, MODELS
from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from ..hooks import LeanHook
from ..surgery import ModelHook, hook_arguments, hook_class, model_hooks
from .backbone_checks import check_backbones, is_ours
from .config_keys import refuse_bad_priorities, refuse_missing_scope
from .config_values import list_loaders, refuse_bad_values
from .rehearse import RehearseHook
from .transforms import name_of

__all__ = [
    'add_config',
    'check_config',
    'check_options',
    'count_data_classes',
    'find_dropped_hooks',
    'find_missing_import',
    'find_own_hooks',
    'find_small_heads',
    'list_imports',
    'refuse_two_changes',
    'refuse_uncounted_models',
    'refuse_wrapped_detectors',
]

_LIBRARIES = ('mmdet', 'mmcv', 'mmengine', 'mmpretrain', 'mmcls', 'projects')
# Preprocessors of other batches than images with boxes.
_UNCOUNTED = {
    'TrackDataPreprocessor': 'clips of videos',
    'ReIDDataPreprocessor': 'crops of persons for re-identification',
    'MultiBranchDataPreprocessor': 'branches of images for a student and a teacher',
}
_INSTEAD = 'give the config of a detector that trains on single images'
# Models that hold a detector, and what it is trained with.
_TRAINED_WITH = {SemiBaseDetector: 'a teacher', BaseMOTModel: 'a tracker'}
_DICT = re.compile(r'(^|[\[(,])\s*[\'"]?(dict\(|\{)')  # at the beginning of an override, or of a member of it
_DICTS = ('model', 'optim_wrapper', 'train_dataloader', 'val_dataloader', 'strategy', 'model_wrapper_cfg', 'env_cfg')


class ConfigOptions(DictAction):
    """Action of ``--cfg-options``: values that cannot be parsed end in a message instead of a traceback."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Parse the values, see :class:`argparse.Action`."""
        for value in values:
            if value.find('=') < 1:
                raise argparse.ArgumentError(self, f'{value!r} must be KEY=VALUE, for example model.backbone.depth=101')
            if _DICT.search(value.partition('=')[2].strip('\'"')):
                raise argparse.ArgumentError(
                    self,
                    f'{value!r} contains a dict; override one of its keys, such as optim_wrapper.type=X, or write the '
                    'dict in a config',
                )
            try:
                super().__call__(parser, argparse.Namespace(), [value], option_string)
            except (AssertionError, ValueError):  # mmengine's own, of brackets
                raise argparse.ArgumentError(self, f'{value!r} has a bracket without its counterpart') from None
            except RecursionError:  # mmengine's, which looks for a comma outside of brackets
                raise argparse.ArgumentError(self, f'{value!r} has text in front of a bracket') from None
        super().__call__(parser, namespace, values, option_string)


def add_config(verb: argparse.ArgumentParser, what: str = 'config file, or mmdet::FAMILY/NAME.py') -> None:
    """Add the arguments ``config`` and ``--cfg-options`` to a parser.

    Args:
        verb (argparse.ArgumentParser): The parser of a subcommand.
        what (str): Help of ``config``. Default: that of a config whose data are not needed.
    """
    verb.add_argument('config', help=what)
    verb.add_argument('--cfg-options', nargs='+', action=ConfigOptions, help='overrides of the config')


def check_options(config: Config, options: Mapping | None) -> None:
    """Check the overrides of ``--cfg-options`` for misspelt keys, which mmengine would add to the config and not read.

    Args:
        config (Config): The config without the overrides.
        options (Mapping | None): Values by key, such as 'optim_wrapper.optimizer.lr'. If ``None``, there are none.

    Raises:
        ValueError: If the config has no such key at its top level, but a similar one.
    """
    known = {*config, *inspect.signature(Runner.__init__).parameters, 'tta_model', 'tta_pipeline'}
    for key in options or ():
        first = key.partition('.')[0]
        near = [] if first in known else difflib.get_close_matches(first, known, n=1, cutoff=0.8)
        if near:
            raise ValueError(f"--cfg-options {key}: the config has no '{first}'; did you mean '{near[0]}'?")


def list_imports(config: Config) -> list[str]:
    """Return the names of the modules in ``custom_imports`` of a config.

    Args:
        config (Config): Any config.

    Raises:
        ValueError: If it is no dict with names.
    """
    imports = config.get('custom_imports') or {}
    modules = imports.get('imports') or [] if isinstance(imports, dict) else None
    modules = [modules] if isinstance(modules, str) else modules
    if not isinstance(modules, (list, tuple)) or not all(isinstance(name, str) for name in modules):
        raise ValueError(f"custom_imports={imports!r} must be a dict with names, such as dict(imports=['sbp_mmdet'])")
    return list(modules)


def check_config(config: Config) -> None:
    """Check the kinds of values of a config, and its hooks.

    Args:
        config (Config): A config whose modules in ``custom_imports`` were imported.

    Raises:
        ValueError: For the first mistake; the message names the value and the remedy.
    """
    for key in _DICTS:
        several = key.endswith('_dataloader') and list_loaders(config, key)  # of a loop of the user's own
        if config.get(key) is not None and not isinstance(config[key], dict) and not several:
            raise ValueError(f'{key}={config[key]!r} must be a dict')
    hooks = config.get('custom_hooks') or []
    if not isinstance(hooks, (list, tuple)):
        raise ValueError(f"custom_hooks={hooks!r} must be a list of dicts, for example [dict(type='LeanHook')]")
    for hook in hooks:
        if not isinstance(hook, dict) or 'type' not in hook:
            raise ValueError(f"custom_hooks: {hook!r} must be a dict with a type, for example dict(type='LeanHook')")
        if name_of(hook) == 'RehearseHook':  # the other hooks of this package are built below
            RehearseHook(**hook_arguments(hook))
    refuse_bad_priorities(hooks)
    refuse_bad_values(config)
    refuse_missing_scope(config)
    for name, hook in (config.get('default_hooks') or {}).items():
        if isinstance(hook, dict) and hook.get('type') and isinstance(kind := hook_class(hook), type):
            if issubclass(kind, ModelHook):
                raise ValueError(
                    f'default_hooks: {name}={kind.__name__} changes the model; move it to custom_hooks=[...], where '
                    'plan, report and verify look for such hooks'
                )
    refuse_two_changes(config, [hook for hook in model_hooks(hooks) if isinstance(hook, LeanHook)])
    check_backbones(config)


def find_missing_import(config: Config) -> str | None:
    """Return what is wrong with a config that names classes of this package and does not import it.

    A training would not know these classes. Modules that the config imports may import this package in turn.

    Args:
        config (Config): A config that :func:`check_config` has approved of.

    Returns:
        str | None: The problem with its remedy, or ``None``.
    """
    hooks = config.get('custom_hooks') or []
    named = [(HOOKS, hook['type']) for hook in hooks] + [(MODELS, (config.model.get('backbone') or {}).get('type'))]
    ours = [kind for registry, kind in named if isinstance(kind, str) and is_ours(registry.get(kind))]
    imports = [*list_imports(config)]
    if not ours or _use_this_package(imports):
        return None
    return (
        f'the config uses {ours[0]} and does not import sbp_mmdet, so a training would not find it; write in '
        f'it: custom_imports = dict(imports={[*imports, "sbp_mmdet"]}, allow_failed_imports=False)'
    )


def find_dropped_hooks(config: Config) -> str | None:
    """Return which hooks a config drops from its parents, if its own list of hooks has a ``LeanHook``.

    A list in a config replaces that of its parent, so adding a ``LeanHook`` may drop an ``EMAHook`` unnoticed.

    Args:
        config (Config): A config that was read from a file.

    Returns:
        str | None: The problem with its remedy, or ``None``; also ``None`` if the parents cannot be read.
    """
    names = _hook_names(config)
    if 'LeanHook' not in names or not config.filename:
        return None
    try:
        paths = [Config._get_cfg_path(base, config.filename)[0] for base in Config._get_base_files(config.filename)]
        parents = [Config.fromfile(path, import_custom_modules=False) for path in paths]
    except Exception:  # noqa: BLE001  of another kind of config, or a version of mmengine that reads them otherwise
        return None
    dropped = [name for name in dict.fromkeys(itertools.chain(*map(_hook_names, parents))) if name not in names]
    if not dropped:
        return None
    return (
        f"custom_hooks replaces the parent's {', '.join(dropped)}; to keep what it has, write "
        "custom_hooks=[*_base_.custom_hooks, dict(type='LeanHook', ...)]"
    )


def _hook_names(config):
    """Return the names of the classes in ``custom_hooks``, without their scope."""
    return [name_of(hook) for hook in config.get('custom_hooks') or [] if isinstance(hook, dict)]


def _use_this_package(names):
    """Return whether modules use this package, or a module of the user's that they import does."""
    names, seen = [*names], set()
    while names:
        name = names.pop()
        top = name.partition('.')[0]
        if top == 'sbp_mmdet':
            return True
        module = sys.modules.get(name)
        file = getattr(module, '__file__', None)
        if name in seen or top in _LIBRARIES or not file or {'site-packages', 'lib-dynload'} & {*Path(file).parts}:
            continue
        seen.add(name)
        values = [*vars(module).values()]
        used = [getattr(value, '__name__' if isinstance(value, ModuleType) else '__module__', None) for value in values]
        names += [name for name in used if isinstance(name, str)]
    return False


def find_small_heads(config: Config, classes: int) -> dict[str, int]:
    """Find the heads of a model that have fewer classes than its data.

    Heads that do not tell classes apart, and heads of the user's own class, may have any number.

    Args:
        config (Config): Config of a detector, or of a model that holds one.
        classes (int): Number of classes of the training data.

    Returns:
        dict[str, int]: ``num_classes`` by the name of the head.
    """
    model = config.get('model') or {}
    model = model.get('detector') or model
    roi_head = model.get('roi_head')
    roi_head = roi_head if isinstance(roi_head, dict) else {}  # Co-DETR has a list of them
    heads = {'bbox_head': model.get('bbox_head')}
    heads |= {f'roi_head.{name}': roi_head.get(name) for name in ('bbox_head', 'mask_head')}
    small = {}
    for name, found in heads.items():
        for head in found if isinstance(found, (list, tuple)) else [found]:
            if not isinstance(head, dict):
                continue
            number, kind = head.get('num_classes'), head.get('type')
            kind = MODELS.get(kind) if isinstance(kind, str) else kind
            ours = kind is None or kind.__module__.partition('.')[0] in _LIBRARIES
            if isinstance(number, int) and number < classes and ours and not head.get('class_agnostic'):
                small.setdefault(name, number)
    return small


def count_data_classes(dataset: dict | None) -> int:
    """Return the number of classes that the config of a data set names; 0 if it names none.

    Classes are those in ``metainfo`` or, if it names none, in ``METAINFO`` of the class. Of a panoptic data set, only
    things are counted.

    Args:
        dataset (dict | None): Config of a data set, or of a wrapper of data sets.
    """
    if not isinstance(dataset, dict):
        return 0
    if inner := dataset.get('datasets') or dataset.get('dataset'):
        return max(map(count_data_classes, inner if isinstance(inner, (list, tuple)) else [inner]))
    kind = dataset.get('type')
    kind = DATASETS.get(kind) if isinstance(kind, str) else kind
    for names in (dataset.get('metainfo'), getattr(kind, 'METAINFO', None)):
        classes = isinstance(names, Mapping) and (names.get('thing_classes') or names.get('classes'))
        if classes:  # a string is the path of a file with class names
            return len(classes) if isinstance(classes, (list, tuple, set, dict)) else 0
    return 0


def find_own_hooks(config: Config) -> list[str]:
    """Return the names of the hooks whose classes are the user's own; what they hold on the GPU is unknown.

    Args:
        config (Config): A config that :func:`check_config` has approved of.
    """
    hooks = [*(config.get('custom_hooks') or []), *filter(None, (config.get('default_hooks') or {}).values())]
    kinds = [kind for kind in map(hook_class, hooks) if isinstance(kind, type)]
    known = (*_LIBRARIES, 'sbp_mmdet')
    return [kind.__name__ for kind in kinds if kind.__module__.partition('.')[0] not in known]


def refuse_uncounted_models(path: str, config: Config, done: str = 'counted', instead: str = _INSTEAD) -> None:
    """Refuse a training whose batches are not images with boxes, such as clips of videos.

    Args:
        path (str): The config as the user named it.
        config (Config): The config.
        done (str): What the command does with steps. Default: 'counted'.
        instead (str): The remedy. Default: another config.

    Raises:
        ValueError: If the preprocessor of the model is one for other batches, or ``train_dataloader`` is a dict or list
            of data loaders.
    """
    preprocessor = config.model.get('data_preprocessor') or {}
    what = _UNCOUNTED.get(name_of(preprocessor))
    if what and preprocessor.get('use_det_processor'):  # with it, a tracker's detector trains on images
        what = None
    if loaders := list_loaders(config, 'train_dataloader').keys() - {'train_dataloader'}:
        what = f'batches that its loop takes from a dict or list of data loaders ({", ".join(sorted(loaders))})'
    if what:
        raise ValueError(
            f'{path}: {name_of(config.model)} trains on {what}. Such steps are not {done}, and --size does not help; '
            f'{instead}'
        )


def refuse_wrapped_detectors(path: str, config: Config) -> None:
    """Refuse a model that holds the detector as a part of itself, ``model.detector``.

    Args:
        path (str): The config as the user named it.
        config (Config): The config.

    Raises:
        ValueError: If the model has a key ``detector``. The message says what the detector is trained with, if that is
            known of the model's class.
    """
    if 'detector' not in config.model:
        return
    kind = config.model.get('type')
    kind = MODELS.get(kind) if isinstance(kind, str) else kind
    others = [what for known, what in _TRAINED_WITH.items() if isinstance(kind, type) and issubclass(kind, known)]
    what = f'trains its model.detector together with {others[0]}' if others else 'is a wrapper of its model.detector'
    remedy = 'plan for the config of the detector alone' if others else 'give the config of a detector of mmdet'
    raise ValueError(f'{path}: {name_of(config.model)} {what}. Such steps are not counted; {remedy}')


def refuse_two_changes(config: Config, hooks: Sequence[LeanHook]) -> None:
    """Refuse two changes of one part of the model.

    Args:
        config (Config): A config.
        hooks (Sequence[LeanHook]): Its hooks.

    Raises:
        ValueError: If two hooks, or a hook and the backbone's ``sbp_cfg``, change one part.
    """
    parts = [hook.settings.modules or ('',) for hook in hooks if hook.settings.preset.name != 'none']
    if (config.model.get('backbone') or {}).get('sbp_cfg') is not None and any('' in names for names in parts):
        raise ValueError(
            'the backbone has an sbp_cfg of its own, and LeanHook would change it too; write sbp_cfg=None there, or '
            "name the other parts of the model in the hook: modules=['neck', ...]"
        )
    for first, second in itertools.combinations(parts, 2):
        for a, b in itertools.product(first, second):
            if not a or not b or f'{a}.'.startswith(f'{b}.') or f'{b}.'.startswith(f'{a}.'):
                both = max(a, b, key=len) or 'the whole model'
                raise ValueError(
                    f'custom_hooks has two LeanHooks, and both change {both}; remove one, or give them different '
                    'modules=[...]'
                )
