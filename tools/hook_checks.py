"""Checks of the hooks of a config, before mmdet builds anything from it.

Nothing here imports sbp_mmdet: whether the config does is one of the checks.
"""

import contextlib
import copy
import difflib
import sys
from collections.abc import Iterator

import torch
from annotation_files import PreflightError
from mmdet.registry import HOOKS, MODELS
from mmdet_script import say
from mmengine.config import Config
from mmengine.registry import init_default_scope

__all__ = ['build_on_meta', 'check_hooks', 'class_name', 'dicts', 'given', 'warn', 'warn_if_unused', 'with_our_import']

given = []  # warnings of this run
_OWN_HOOKS = ('LeanHook', 'CheckpointModulesHook', 'TargetsInChunksHook', 'RehearseHook')


def check_hooks(config):
    """Find hooks of sbp_mmdet that are not registered, and presets that do not apply to the detector.

    Raises:
        PreflightError: For the first mistake.
    """
    hooks, ours = config.get('custom_hooks') or [], []
    if not isinstance(hooks, (list, tuple)):
        raise PreflightError(
            f'{config.filename}: custom_hooks={_plain(hooks)!r} must be a list of dicts, for example '
            "[dict(type='LeanHook')]"
        )
    for hook in hooks:
        if not isinstance(hook, dict) or 'type' not in hook:
            raise PreflightError(
                f'{config.filename}: custom_hooks: {_plain(hook)!r} must be a dict with a type, for example '
                "dict(type='LeanHook')"
            )
        name = class_name(hook)
        if name not in _OWN_HOOKS:
            near = difflib.get_close_matches(name, _OWN_HOOKS, n=1, cutoff=0.75)
            if near and HOOKS.get(name) is None:
                raise PreflightError(f'{config.filename}: custom_hooks has {name!r}; did you mean {near[0]!r}?')
            continue
        if HOOKS.get(name) is None:
            raise PreflightError(
                f'{config.filename}: custom_hooks has {name}, but its custom_imports is '
                f'{config.get("custom_imports")}; write in the config: {with_our_import(config)}'
            )
        try:
            hook = HOOKS.build({key: value for key, value in hook.items() if key != 'priority'})
            if name != 'RehearseHook' and (detector := build_on_meta(config)):  # which changes nothing
                hook.apply(detector)
        except (TypeError, ValueError) as error:
            text = f'{error}'.removeprefix(f'{name}: ')
            raise PreflightError(f'{config.filename}, custom_hooks, {name}: {text}') from error
        ours += [hook] if name == 'LeanHook' else []
    _check_priorities(config, hooks)
    if ours:
        from sbp_mmdet.plan.config_checks import find_dropped_hooks  # noqa: PLC0415  the config has imported it

        if problem := find_dropped_hooks(config):
            warn(f'{config.filename}: {problem}')
    if len(ours) > 1:
        from sbp_mmdet.plan.config_checks import refuse_two_changes  # noqa: PLC0415  the config has imported it

        try:
            refuse_two_changes(config, ours)
        except ValueError as error:
            raise PreflightError(f'{config.filename}: {error}') from error


def _check_priorities(config, hooks):
    if 'sbp_mmdet' not in sys.modules:  # the config has not imported it
        return
    from sbp_mmdet.plan.config_keys import refuse_bad_priorities  # noqa: PLC0415

    try:
        refuse_bad_priorities(hooks)
    except ValueError as error:
        raise PreflightError(f'{config.filename}: {error}') from error


def _plain(node):
    """Convert a part of a config to plain dicts and lists, which are printed as the user writes them."""
    return node.to_dict() if hasattr(node, 'to_dict') else node


def with_our_import(config):
    """Return a line that imports this package beside what the config imports. A config's list replaces its parent's."""
    return f'custom_imports = dict(imports={[*_imported(config), "sbp_mmdet"]}, allow_failed_imports=False)'


def _imported(config):
    """Return the names of the modules that a config imports."""
    names = (config.get('custom_imports') or {}).get('imports') or []
    return [names] if isinstance(names, str) else [*names]


def warn_if_unused(config):
    """Warn if a config imports this package but does not use it, for example because a key is misspelt."""
    ours = [*dicts(config.get('model')), *(config.get('custom_hooks') or []), *dicts(config.get('optim_wrapper'))]
    kinds = [*map(class_name, ours)]
    used = any(kind in _OWN_HOOKS or kind.startswith('SBP') or '8bit' in kind for kind in kinds)
    if 'sbp_mmdet' not in _imported(config) or used:
        return
    near = difflib.get_close_matches('custom_hooks', [key for key in config if key != 'custom_hooks'], n=1, cutoff=0.8)
    hint = f'; {near[0]!r} is no key of mmengine, did you mean custom_hooks?' if near else ''
    warn(
        f'{config.filename} imports sbp_mmdet, but has no LeanHook in custom_hooks and no backbone of it, so training '
        f'is plain{hint}'
    )


def build_on_meta(config: Config) -> torch.nn.Module | None:
    """Build the model without memory for its weights; return ``None`` if that fails, which mmdet reports later."""
    init_default_scope(config.get('default_scope') or 'mmdet')
    for device in ('meta', 'cpu'):  # mmdet's Swin reads numbers that it makes, so they have to be somewhere
        with contextlib.suppress(Exception), torch.device(device):
            return MODELS.build(copy.deepcopy(config.model)).to('meta')  # DINO writes into its config
    return None


def class_name(node: dict) -> str:
    """Return the name of the class of a dict of a config, whose ``type`` is a string with a scope, or the class."""
    kind = node.get('type')
    return getattr(kind, '__name__', str(kind).rpartition('.')[2])


def dicts(node) -> Iterator[dict]:
    """Yield every dict inside of a config."""
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for item in node:
            yield from dicts(item)


def warn(message: str) -> None:
    """Print a warning in a line of its own, and once more after the traceback if the script fails."""
    given.append(f'warning: {message}')
    say(given[-1])
