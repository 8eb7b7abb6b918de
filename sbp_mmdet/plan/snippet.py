"""The lines to add to a config for a variant, in the style of the config's file."""

import symtable
from pathlib import Path

from mmengine.config import Config

from .config_checks import list_imports
from .planner import OWN
from .variants import PLAIN, PLAIN_RUN, STANDS_IN, find_piece_changes, is_lean, needs_mmpretrain

__all__ = ['format_heading', 'snippet']

_WIDTH = 120


def snippet(config: Config, variant: str, batch: int | None = None) -> str:
    """Return the lines to add to a config for a variant.

    Args:
        config (Config): The config as it was loaded from its file.
        variant (str): The variant. :data:`.planner.OWN` changes no part of the model.
        batch (int | None): Number of images of a batch. If ``None``, it is not changed. Default: None.

    Returns:
        str: Lines of Python for the end of the file. If the file is not Python, or was installed with a package, they
        are a config that inherits from it. The trials of ``cudnn_benchmark=True``, which no plan can count, are
        turned off. If there is nothing to change, the text is empty.
    """
    style = _Style(config)
    lines = [] if variant == OWN else _lines_of_variant(config, variant, style)
    lines += style.changed('train_dataloader', dict(batch_size=batch) if batch else {})
    if (config.get('env_cfg') or {}).get('cudnn_benchmark'):
        lines += style.changed('env_cfg', dict(cudnn_benchmark=False))
    return '\n'.join([*style.head, *lines] if lines else [])


def _lines_of_variant(config, variant, style):
    name, *pieces = variant.split('+')
    change, backbone = find_piece_changes(config, pieces), config.model.get('backbone') or {}
    hooks = [] if name == 'none' else [dict(type=style.kind('LeanHook'), preset=name)]
    hooks += [dict(hook, type=style.kind(hook['type'])) for hook in change['custom_hooks']]
    missing = needs_mmpretrain(config)
    lines = []
    imports = [one for one in list_imports(config) if not (missing and one.startswith('mmpretrain'))]
    if hooks and style.lazy:
        lines.append(f'from sbp_mmdet.hooks import {", ".join(hook["type"].name for hook in hooks)}')
    elif hooks or missing:
        # A child's list replaces its parent's, so the parent's items are repeated.
        lines.append(
            f'custom_imports = dict(imports={[*dict.fromkeys([*imports, "sbp_mmdet"])]}, allow_failed_imports=False)'
        )
    kept = [not is_lean(hook) for hook in config.get('custom_hooks') or []]
    if hooks or not all(kept):
        lines.append(_list('custom_hooks', [*style.kept('custom_hooks', kept), *map(_literal, hooks)]))
    off = {key: value for key, value in PLAIN.items() if backbone.get(key)}
    if missing:
        off = dict(type=STANDS_IN[backbone['type']], **off)
    lines += style.changed('model', dict(backbone=off) if off else {})
    lines += [f'{key} = None' for key in PLAIN_RUN if config.get(key)]
    optimizer = dict(optimizer=change['optimizer']) if change['optimizer'] else {}
    changed = style.changed('optim_wrapper', change['wrapper'] | optimizer)
    if optimizer:
        changed[-1] += '  # needs bitsandbytes'
    return [*lines, *changed]


def format_heading(config: Config) -> str:
    """Return a heading for the lines of :func:`snippet`, which says what to do with them."""
    return 'Train with this config:' if _Style(config).head else 'Add to the config:'


class _Style:
    """Style of a config's file.

    Args:
        config (Config): The config. If it was not loaded from a file, lines are written as in a child config.

    Attributes:
        head (list[str]): Lines that inherit from the file, if lines cannot be added to it.
        lazy (bool): Whether the file imports its parents (``read_base``).
    """

    def __init__(self, config: Config):
        self._config, self.head, self.lazy, self._names = config, [], False, set()
        file = Path(config.filename) if config.filename else None
        if file is None:
            return
        if '.mim' in file.parts:  # installed with a package
            at = len(file.parts) - 1 - file.parts[::-1].index('.mim')
            self.head = [f"_base_ = '{file.parts[at - 1]}::{'/'.join(file.parts[at + 2 :])}'"]
        elif file.suffix != '.py':
            self.head = [f"_base_ = './{file.name}'"]
        else:
            self.lazy = Config._is_lazy_import(str(file))
            text = file.read_text(encoding='utf-8')  # as mmengine reads it
            symbols = symtable.symtable(text, str(file), 'exec').get_symbols()  # of the module alone
            stored = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
            self._names = set(config.keys()) if self.lazy else stored
            if self.lazy and 'site-packages' in file.parts:
                module = '.'.join(file.with_suffix('').parts[file.parts.index('site-packages') + 1 :])
                self.head = [
                    'from mmengine.config import read_base',
                    'with read_base():',
                    f'    from {module} import *',
                ]

    def kind(self, name: str):
        """Return the ``type`` of a class of this package: a string, or the class if the file uses ``read_base``."""
        return _Class(name) if self.lazy else name

    def kept(self, name: str, which: list[bool]) -> list[str]:
        """Return expressions for the kept items of a list.

        Args:
            name (str): Name of the list in the config.
            which (list[bool]): Whether each item is kept.
        """
        owner = name if name in self._names else f'_base_.{name}'
        if all(which):
            return [f'*{owner}'] if which else []
        runs, start = [], None
        for i, keep in enumerate([*which, False]):
            if keep and start is None:
                start = i
            elif not keep and start is not None:
                runs.append(f'*{owner}[{start or ""}:{i if i < len(which) else ""}]')
                start = None
        return runs

    def changed(self, name: str, values: dict) -> list[str]:
        """Return lines that change values of a dict, which the file itself defines or inherits.

        Args:
            name (str): Name of the dict in the config.
            values (dict): The changed values.
        """
        if not values:
            return []
        if name not in self._names:
            return [f'{name} = {_literal(values)}']
        flat = {key: value for key, value in values.items() if not isinstance(value, dict)}
        inner = {key: value for key, value in values.items() if isinstance(value, dict)}
        lines = [f'{name}.update({_arguments(flat)})'] if flat else []
        return [*lines, *(f"{name}.setdefault('{key}', {{}}).update({_arguments(of)})" for key, of in inner.items())]


class _Class:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


def _list(name, items):
    line = f'{name} = [{", ".join(items)}]'
    return line if len(line) <= _WIDTH else '\n'.join([f'{name} = [', *(f'    {item},' for item in items), ']'])


def _literal(value):
    return f'dict({_arguments(value)})' if isinstance(value, dict) else repr(value)


def _arguments(values):
    return ', '.join(f'{key}={_literal(item)}' for key, item in values.items())
