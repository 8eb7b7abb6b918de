"""Strategies of a training and wrappers of its model: whether each GPU holds all of the model."""

import difflib

from mmengine._strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from mmengine.config import Config
from mmengine.registry import MODEL_WRAPPERS, STRATEGIES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .transforms import name_of

__all__ = ['refuse_strategies']

# Those with which it does, by their keys in a config. FSDP's strategy is derived from one of them.
_WHOLE = dict(
    strategy=(STRATEGIES, (SingleDeviceStrategy, DDPStrategy)),
    model_wrapper_cfg=(MODEL_WRAPPERS, (DistributedDataParallel, nn.DataParallel)),
)


def refuse_strategies(path: str, config: Config) -> None:
    """Refuse a config that shards weights and states over GPUs, because counts are for a GPU that holds all of them.

    Args:
        path (str): The config as the user named it.
        config (Config): The config.

    Raises:
        ValueError: If a strategy or a wrapper of the model shards it, or is not registered.
    """
    for key, (registry, whole) in _WHOLE.items():
        cfg = config.get(key) or {}
        kind = cfg.get('type')
        kind = registry.get(kind) if isinstance(kind, str) else kind
        if kind is None and cfg.get('type'):
            near = difflib.get_close_matches(name_of(cfg), registry.module_dict, n=1)
            remedy = f'did you mean {near[0]!r}?' if near else 'import its module by custom_imports'
            raise ValueError(f'{path}: {key}.type={cfg["type"]!r} is not registered; {remedy}')
        if isinstance(kind, type) and (not issubclass(kind, whole) or issubclass(kind, FSDPStrategy)):
            raise ValueError(
                f'{path}: {key}={name_of(cfg)} spreads weights, gradients and optimizer states over GPUs, which is not '
                f'counted; take {key} out of the config to plan for GPUs that each hold all of it'
            )
