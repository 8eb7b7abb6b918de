"""Checks of the keys of a config that mmengine's runner reads, and of the variables that a launcher sets.

What sbp_mmdet checks is checked here only if the config has imported it, see :mod:`preflight`.
"""

import os
import sys

import torch
from annotation_files import PreflightError
from hook_checks import class_name
from mmdet.registry import OPTIMIZERS
from mmengine.config import Config
from mmengine.device import get_device

__all__ = ['check_launcher', 'check_optimizer', 'check_runner_keys', 'list_loaders']

_VARIABLES = {
    'pytorch': (('RANK', 'LOCAL_RANK', 'WORLD_SIZE'), 'tools/dist_train.sh or torchrun'),
    'slurm': (('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_NODELIST'), 'tools/slurm_train.sh or srun'),
    'mpi': (('OMPI_COMM_WORLD_LOCAL_RANK',), 'mpirun'),
}
_OF_LOOPS = dict(
    train=('train_dataloader', 'train_cfg', 'optim_wrapper'),
    val=('val_dataloader', 'val_cfg', 'val_evaluator'),
    test=('test_dataloader', 'test_cfg', 'test_evaluator'),
)


def check_launcher(launcher: str) -> None:
    """Check that the program which starts distributed processes has set its variables.

    Args:
        launcher (str): Value of ``--launcher``.

    Raises:
        PreflightError: If a variable is missing; mmengine would end with a ``KeyError`` of its name.
    """
    names, programs = _VARIABLES.get(launcher, ((), ''))
    if missing := [name for name in names if name not in os.environ]:
        raise PreflightError(
            f'--launcher {launcher}: {", ".join(missing)} not in the environment; start the processes by {programs}, '
            'or leave --launcher out for a single one'
        )


def check_runner_keys(config: Config, splits: tuple[str, ...]) -> None:
    """Check that what a loop needs is there and of the right kind.

    Args:
        config (Config): The config.
        splits (tuple[str, ...]): Loops that are run: 'train', 'val', 'test'.

    Raises:
        PreflightError: If the model is no dict, a loop has some of its keys only, a number is no whole number or too
            small, or a wrapper of data sets holds none.
    """
    if not isinstance(config.get('model'), dict):
        raise PreflightError(
            f"{config.filename}: model={config.get('model')!r} must be a dict such as dict(type='DINO')"
        )
    if 'sbp_mmdet' in sys.modules:  # imported by the config
        from sbp_mmdet.plan.config_values import refuse_bad_values  # noqa: PLC0415

        try:
            refuse_bad_values(config)
        except ValueError as error:
            raise PreflightError(f'{config.filename}: {error}') from error
    for split in splits:
        keys = _OF_LOOPS[split]
        missing = [key for key in keys if config.get(key) is None]
        if missing and (split == 'train' or len(missing) < len(keys)):
            given = [key for key in keys if key not in missing]
            instead = '' if split == 'train' else f', or set {", ".join(given)} to None to leave this loop out'
            raise PreflightError(f'{config.filename} has no {" and no ".join(missing)}; add what is missing{instead}')
        for key, loader in list_loaders(config, split).items():
            _check_loader(loader, key)


def list_loaders(config: Config, split: str) -> dict[str, dict]:
    """Return the data loaders of a loop by their keys: one, or several of a loop of the user's own.

    The planner has the same function, which nothing here may import (see :mod:`preflight`). A test runs both.

    Args:
        config (Config): The config.
        split (str): 'train', 'val' or 'test'.
    """
    key = f'{split}_dataloader'
    loader = config.get(key)
    if not isinstance(loader, (dict, list, tuple)):
        return {}
    parts = loader.items() if isinstance(loader, dict) else enumerate(loader)
    # A member with a type is the data set, a wrapper, under a misspelt name.
    parts = [(name, one) for name, one in parts if isinstance(one, dict) and 'dataset' in one and 'type' not in one]
    several = {f'{key}.{name}': one for name, one in parts}
    is_one = isinstance(loader, dict) and ('dataset' in loader or not several)
    return {key: loader} if is_one else several


def _check_loader(loader, key):
    batch = loader.get('batch_size', 1)
    if type(batch) is not int or batch < 1:
        raise PreflightError(f'{key}.batch_size={batch!r} must be a whole number of 1 or more')
    dataset, key = loader.get('dataset'), f'{key}.dataset'
    while isinstance(dataset, dict):
        times, inner = dataset.get('times', 1), dataset.get('datasets', True)
        if type(times) is int and times < 1:  # a sampler would look for an image for ever
            raise PreflightError(f'{key}.times={times} leaves no image; write 1 or more')
        if inner == []:
            raise PreflightError(f'{key}.datasets=[] leaves no image; name one data set or more')
        dataset, key = dataset.get('dataset'), f'{key}.dataset'


def check_optimizer(config: Config) -> None:
    """Check the optimizer, which mmengine would refuse with a traceback after reading the data.

    Args:
        config (Config): The config.

    Raises:
        PreflightError: For mixed precision without a GPU, and for an optimizer that is not registered or, if it is one
            of torch's, does not accept its arguments.
    """
    wrapper = config.get('optim_wrapper') or {}
    if class_name(wrapper) == 'AmpOptimWrapper' and get_device() == 'cpu':
        raise PreflightError(
            'optim_wrapper: AmpOptimWrapper (mixed precision) needs a GPU, and none is there; on a CPU add '
            '--cfg-options optim_wrapper.type=OptimWrapper'
        )
    optimizer = wrapper.get('optimizer') or {}
    name = optimizer.get('type')
    kind = OPTIMIZERS.get(name) if isinstance(name, str) else name
    if kind is None and name is not None:
        needs = ': pip install bitsandbytes' if '8bit' in name else '; name its module in custom_imports'
        raise PreflightError(f'optim_wrapper.optimizer: no optimizer is registered as {name!r}{needs}')
    if kind is None or not kind.__module__.startswith('torch.optim.'):
        return
    arguments = {key: value for key, value in optimizer.items() if key not in ('type', '_scope_')}
    try:
        kind([torch.zeros(1, requires_grad=True)], **arguments)
    except (TypeError, ValueError) as error:
        given = ', '.join(f'{key}={value!r}' for key, value in arguments.items())
        raise PreflightError(
            f'optim_wrapper.optimizer: {class_name(optimizer)} does not accept {given} ({error}); correct that key'
        ) from error
    except RuntimeError:
        pass  # fused optimizers of some versions of torch need parameters on a GPU
