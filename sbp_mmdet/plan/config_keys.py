"""The key of a config that an error is about: a file that is missing, an unknown class, an unknown argument."""

import difflib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import mmdet.registry
from mmengine.config import Config
from mmengine.registry import Registry
from mmengine.runner import Priority, Runner, get_priority

from .config_files import find_config_file, find_similar_config

__all__ = [
    'describe_bad_override',
    'describe_mistake',
    'refuse_bad_priorities',
    'refuse_missing_scope',
    'scope_of',
    'shorten_names',
    'values_in',
]

_UNKNOWN_CLASS = re.compile(r'(\S+) is not in the (?:\S+::)?([\w ]+) registry|Cannot find (\S+) in registry')
# An optimizer's constructor and the averaged model of EMAHook are named without a dict.
_KEYS_OF_CLASSES = 'type', 'constructor', 'ema_type'
# Functions of mmengine's runner that look up submodules, and the keys of a config whose values they are called with.
_LOOKUPS = {'turn_on_activation_checkpointing': 'activation_checkpointing'}
_LOOKUPS['turn_on_efficient_conv_bn_eval'] = 'efficient_conv_bn_eval'
_MISSING_FILE = re.compile(r'\[Errno 2\] No such file or directory: ([\'"])(.+)\1')
_UNKNOWN_ARGUMENT = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def describe_mistake(config: Config, error: Exception) -> str | None:
    """Return which value of a config an error is about, and the remedy.

    Args:
        config (Config): Any config.
        error (Exception): An error that was raised while something was built of the config.

    Returns:
        str | None: The key with its value, what is wrong with it, and the remedy; ``None`` for other errors.
    """
    text = str(error.args[0]) if error.args else ''
    if isinstance(error, FileNotFoundError):
        return _describe_missing_file(config, error)
    if isinstance(error, KeyError) and (found := _UNKNOWN_CLASS.search(text)):
        return _describe_unknown_class(config, found[1] or found[3], found[2] or 'model')
    if isinstance(error, AttributeError):
        return _describe_missing_submodule(config, error)
    if isinstance(error, TypeError) and (found := _UNKNOWN_ARGUMENT.search(text)):
        return _describe_unknown_argument(config, *found.groups())
    return None


def describe_bad_override(config: Config, options: dict, error: Exception) -> str:
    """Return which override does not fit a config, with the remedy.

    Args:
        config (Config): The config, which is of no use afterwards.
        options (dict): Overrides, as of ``--cfg-options``.
        error (Exception): What merging all of them raised.
    """
    for key, value in options.items():
        try:
            config.merge_from_dict({key: value})
        except Exception as one:  # the overrides may be of any kind
            text = _describe_path(config, key) or f'{type(one).__name__}: {one}'
            return f'--cfg-options {key}={value}: {text}'
    return f'--cfg-options: {type(error).__name__}: {error}'


def _describe_path(config, key):
    """Return where the key of an override does not match the config, and the remedy. ``None`` if it matches."""
    node, words = config._cfg_dict, key.split('.')
    for i, word in enumerate(words):
        where = '.'.join(words[:i])
        if isinstance(node, (list, tuple)):
            if not (word.isdigit() and int(word) < len(node)):
                rest = words[i + word.isdigit() :]
                example = '.'.join([where, '0', *rest])
                return f'{where} is a list of {len(node)}; its members have numbers from 0, such as {example}'
            if i == len(words) - 1:
                return f'{where} is a list, whose members are replaced together; override {where} itself'
            node = node[int(word)]
        elif isinstance(node, dict):
            if word not in node:
                return None
            node = node[word]
        else:
            return f'{where} is {node!r}, and has no {word!r}; override {where} itself'
    return None


def scope_of(config: Config) -> str:
    """Return the registry scope of a config: mmdet's where it names none, as pure Python configs do.

    Args:
        config (Config): Any config.
    """
    return str(config.get('default_scope') or 'mmdet')


def refuse_bad_priorities(hooks: Sequence[dict]) -> None:
    """Refuse priorities of hooks that mmengine does not know. Its own ``KeyError`` has the name alone.

    Args:
        hooks (Sequence[dict]): ``custom_hooks`` of a config.

    Raises:
        ValueError: For the first one.
    """
    for i, hook in enumerate(hooks):
        if (priority := hook.get('priority')) is None:
            continue
        try:
            get_priority(priority)
        except (KeyError, TypeError, ValueError):
            names = ', '.join(repr(one.name) for one in Priority)
            raise ValueError(
                f'custom_hooks.{i}.priority={priority!r} is unknown; write one of {names}, or a whole number '
                'from 0 to 100'
            ) from None


def refuse_missing_scope(config: Config) -> None:
    """Refuse a config for a toolbox that is not installed. Otherwise mmengine looks for its classes elsewhere.

    Args:
        config (Config): A config whose modules in ``custom_imports`` were imported.

    Raises:
        ValueError: If neither a package nor a registry has the name of ``default_scope``.
    """
    if text := _describe_missing_scope(config):
        raise ValueError(f'model.type={config.model.get("type")!r}: {text}')


def _describe_missing_scope(config):
    """Return a message if the toolbox that a config is written for is not installed, otherwise ``None``."""
    scope = scope_of(config)
    if importlib.util.find_spec(scope.partition('.')[0]) or scope in mmdet.registry.MODELS.root.children:
        return None
    return (
        f'this is a config for {scope} (default_scope={scope!r}), which is not installed; install it, or give a config '
        'for mmdet'
    )


def shorten_names(names: Sequence[str]) -> str:
    """Return the first ten of some names, and the number of the others.

    Args:
        names (Sequence[str]): The names.
    """
    return f'{[*names[:10]]}' + (f' and {len(names) - 10} more' if len(names) > 10 else '')


def _describe_missing_file(config, error):
    """Return the key whose value is the end of the missing path, or ``None``; data sets join it to their ``data_root``.

    Other classes join it to a folder of their own, as distillation does with the config of its teacher.
    """
    # torch raises an error of a loader's process again with the text alone.
    file = error.filename or ((found := _MISSING_FILE.search(str(error))) and found[2])
    missing = str(file or error).removesuffix(' can not be found.')  # mmengine's, of weights
    words = [] if file else re.split(r'[\s\'"]+', missing)
    paths = [missing, *(word.rstrip('.,:;') for word in words)]  # a path may have blanks
    named = [
        (key, value)
        for key, value in _values(config)
        if isinstance(value, str) and any(_ends_with(path, value) for path in paths)
    ] or [
        (key, value)
        for key, value in _values(config)
        if isinstance(value, str) and 'data_prefix' in key.split('.') and _lies_in(missing, value)
    ]
    if not named:  # code of the user's own may have looked for it
        return None
    # What reads a file first is a data set; an evaluator or a hook may name the same file.
    key, value = max(named, key=lambda one: ('dataset' in one[0].split('.'), len(one[1])))
    path = next((path for path in paths if _ends_with(path, value)), missing)
    joined = '' if path == value else f' ({path})'
    root = ' or its data_root' if joined and _has_data_root(config, key) else ''
    similar = find_similar_config(Path(value)) if value.endswith('.py') else None
    remedy = f'did you mean {find_config_file(similar)}?' if similar else f'correct it{root}'
    return f'{key}={value!r}{joined} does not exist; {remedy}'


def _describe_missing_submodule(config, error):
    """Return the key of the runner that names a submodule which the model does not have, or ``None``."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        key, name = _LOOKUPS.get(frame.f_code.co_name), frame.f_locals.get('module_name')
        if key in config and name:
            return f'{key}={config[key]!r}: the model has no {name!r}; name submodules as print(model) shows them'
    return None


def _has_data_root(config, key):
    """Return whether a dict of the config that a key leads through has a ``data_root``."""
    return any(
        isinstance(node, dict) and 'data_root' in node
        for name, node in _values(config)
        if f'{key}.'.startswith(f'{name}.')
    )


def _ends_with(path, value):
    return bool(value) and (path == value or path.endswith(f'/{value}'))


def _lies_in(path, folder):
    return bool(folder.strip('./')) and f'/{folder.strip("./")}/' in f'/{path}'


def _describe_unknown_class(config, name, registry):
    named = [key for key, value in _values(config) if key.rpartition('.')[2] in _KEYS_OF_CLASSES and value == name]
    key = next(iter(named), None)
    if key is None:
        return None
    package = name.partition('.')[0] if '.' in name else ''
    if package and importlib.util.find_spec(package) is None:  # a config may import it if it is there
        return f'{key}={name!r} is a class of {package}, which is not installed; install it'
    if text := _describe_missing_scope(config):
        return f'{key}={name!r}: {text}'
    near = difflib.get_close_matches(name.rpartition('.')[2], _registered(registry), n=1)
    remedy = f'did you mean {near[0]!r}?' if near else 'import its module by custom_imports'
    if near and near[0] == name:  # which mmengine looked for in its own registry
        remedy = "mmdet has it; write default_scope = 'mmdet' in the config"
    return f'{key}={name!r} is not registered; {remedy}'


def _describe_unknown_argument(config, class_name, argument):
    for key, node in _values(config):
        if not isinstance(node, dict) or argument not in node or 'type' not in node:
            continue
        for kind in _classes_of(node['type']):
            if class_name not in {one.__name__ for one in kind.__mro__}:
                continue
            known = {name for one in kind.__mro__ for name in inspect.signature(one.__init__).parameters}
            near = difflib.get_close_matches(argument, known - {'self', 'args', 'kwargs'}, n=1)
            remedy = (
                f'did you mean {near[0]!r}?' if near else f'remove it; if it is inherited, set _delete_=True in {key}'
            )
            if '_delete_' in node:  # which a merge takes away
                root = key.partition('.')[0]
                remedy = f'update() does not read _delete_; write {root}.merge(dict(...)) in place of {root}.update'
            elif argument == 'sbp_cfg':
                hook = "custom_hooks = [dict(type='LeanHook', preset=...)]"
                remedy = f'backbones of this package have it; remove it and write {hook}'
            return f'{key}: {kind.__name__} has no argument {argument!r}; {remedy}'
    return None


def _values(config) -> Iterator[tuple[str, object]]:
    """Yield every value of a config with its key as of ``--cfg-options``: first what a runner reads, then the rest."""
    known = [key for key in inspect.signature(Runner.__init__).parameters if key in config]
    for key in dict.fromkeys([*known, *config]):
        yield from values_in(key, config[key])


def values_in(key: str, node) -> Iterator[tuple[str, object]]:
    """Yield a value of a config and every value inside of it, with their keys as of ``--cfg-options``.

    Args:
        key (str): Key of the value.
        node: The value.
    """
    yield key, node
    parts = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for name, value in parts:
        yield from values_in(f'{key}.{name}', value)


def _registries() -> list[Registry]:
    return [value for value in vars(mmdet.registry).values() if isinstance(value, Registry)]


def _registered(name):
    """Return the names in mmdet's registry of a name, and in the one of mmengine that it extends."""
    found = [registry for registry in _registries() if registry.name == name]
    found += [registry.parent for registry in found if registry.parent]
    return [*dict.fromkeys(key for registry in found for key in registry.module_dict)]


def _classes_of(kind):
    """Return the classes that a config's ``type`` may mean: it does not say in which registry it is."""
    if isinstance(kind, str):
        return [one for registry in _registries() if isinstance(one := registry.get(kind), type)]
    return [kind] if isinstance(kind, type) else []
