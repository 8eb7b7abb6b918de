"""Values of a config with which no training runs, although no class refuses them."""

import logging
import math

from mmengine.config import Config

__all__ = ['list_loaders', 'refuse_bad_values']

# The least value of each key that is a whole number.
_WHOLE_NUMBERS = {
    'train_cfg.max_epochs': 1,
    'train_cfg.max_iters': 1,
    'train_cfg.val_begin': 0,
    'train_cfg.val_interval': 1,
    'train_dataloader.num_workers': 0,
    'val_dataloader.num_workers': 0,
    'test_dataloader.num_workers': 0,
    'randomness.seed': 0,
    'optim_wrapper.accumulative_counts': 1,
    'default_hooks.logger.interval': 1,
    'log_processor.window_size': 1,
}
# Those that mmengine also takes as floats.
_MAY_BE_FLOATS = 'max_epochs', 'max_iters', 'val_begin', 'val_interval', 'accumulative_counts'
_LEVELS = ('DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL')


def refuse_bad_values(config: Config) -> None:
    """Refuse values whose errors, raised by mmengine or torch much later, would not name their keys.

    Args:
        config (Config): Any config.

    Raises:
        ValueError: If a number is no whole number or too small, ``log_level`` is no level of logging, or a wrapper of
            data sets leaves no image.
    """
    for key, least in _WHOLE_NUMBERS.items():
        *owners, name = key.split('.')
        node = config
        for owner in owners:
            node = node.get(owner) if isinstance(node, (dict, Config)) else None
        value = node.get(name) if isinstance(node, dict) else None
        if value is not None and not (_is_whole(value, name) and value >= least):
            raise ValueError(f'{key}={value!r} must be a whole number of {least} or more')
    level = config.get('log_level')
    if level is not None and not isinstance(level, int) and level not in logging._nameToLevel:
        raise ValueError(f'log_level={level!r} is unknown; write one of {", ".join(map(repr, _LEVELS))}')
    for split in ('train', 'val', 'test'):
        for key, loader in list_loaders(config, f'{split}_dataloader').items():
            _refuse_empty_wrappers(f'{key}.dataset', loader.get('dataset'))


def list_loaders(config: Config, key: str) -> dict[str, dict]:
    """Return the data loaders of a loop by their keys: one, or several, which a loop of the user's own may have.

    Args:
        config (Config): Any config.
        key (str): 'train_dataloader', or that of another loop.
    """
    loader = config.get(key)
    if not isinstance(loader, (dict, list, tuple)):
        return {}
    parts = loader.items() if isinstance(loader, dict) else enumerate(loader)
    # A member with a type is the data set, a wrapper, under a misspelt name.
    parts = [(name, one) for name, one in parts if isinstance(one, dict) and 'dataset' in one and 'type' not in one]
    several = {f'{key}.{name}': one for name, one in parts}
    is_one = isinstance(loader, dict) and ('dataset' in loader or not several)
    return {key: loader} if is_one else several


def _is_whole(value, name):
    """Return whether a value is a whole number, or a float that mmengine takes for one: 9e4, or inf for never."""
    if isinstance(value, float) and name in _MAY_BE_FLOATS:
        return value.is_integer() or (value == math.inf and name.startswith('val_'))
    return type(value) is int


def _refuse_empty_wrappers(key, dataset):
    if not isinstance(dataset, dict):
        return
    times, parts = dataset.get('times'), dataset.get('datasets')
    if type(times) is int and times < 1:  # a sampler would look for an image for ever
        raise ValueError(f'{key}.times={times} leaves no image; write 1 or more')
    parts = parts if isinstance(parts, (list, tuple)) else None
    if parts is not None and not parts:
        raise ValueError(f'{key}.datasets=[] leaves no image; name one data set or more')
    _refuse_empty_wrappers(f'{key}.dataset', dataset.get('dataset'))
    for i, part in enumerate(parts or ()):
        _refuse_empty_wrappers(f'{key}.datasets.{i}', part)
