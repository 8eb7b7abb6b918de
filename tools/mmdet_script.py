"""Runs a script of the installed mmdet, after the checks of :mod:`preflight`."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

__all__ = ['find_script', 'run']


def find_script(name: str) -> Path:
    """Finds mmdet's own script, without importing mmdet.

    Args:
        name (str): File name, such as 'train.py'.

    Returns:
        Path: In an installed package ``mmdet/.mim/tools``, in a source checkout ``tools`` beside the package.

    Raises:
        FileNotFoundError: If mmdet is not installed, or without its scripts.
    """
    spec = importlib.util.find_spec('mmdet')
    if spec is None or not spec.origin:
        raise FileNotFoundError(
            f'mmdet is not installed for {sys.executable}; tools/setup_env.sh makes an environment and says where'
        )
    package = Path(spec.origin).parent
    places = [package / '.mim/tools' / name, package.parent / 'tools' / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"mmdet's {name} was not found at {' or '.join(map(str, places))}; reinstall mmdet")


def run(name: str, splits: tuple[str, ...]) -> None:
    """Checks the config that the command line names and runs mmdet's script on the same command line.

    Args:
        name (str): File name of the script.
        splits (tuple[str, ...]): Of 'train', 'val' and 'test', those whose data it reads.
    """
    try:
        script = runpy.run_path(str(find_script(name)))
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')
    args = script['parse_args']()  # mmdet's own, so that --help and wrong options are its business

    from preflight import PreflightError, check_config, load_config  # needs mmdet, which is there by now

    try:
        config = load_config(args.config, args.cfg_options)
        check_config(config, splits)
    except PreflightError as error:
        sys.exit(f'error: {error}')
    if args.launcher != 'none':
        _allow_cpu_ranks(config)
    script['main']()


def _allow_cpu_ranks(config):
    """mmengine's distributed start assumes an accelerator. Where there is none, for trying things out:

    - ``torch.cuda.set_device``, which it calls in every process, does nothing;
    - the processes talk through gloo;
    - DistributedDataParallel is not given the number of a GPU.

    Where there is an accelerator this changes nothing.
    """
    import torch
    from mmengine.device import get_device

    if get_device() != 'cpu':
        return
    torch.cuda.set_device = lambda device: None
    options = ['env_cfg.dist_cfg.backend=gloo', 'model_wrapper_cfg.device_ids=None']
    if 'model_wrapper_cfg' not in config:  # then mmengine would have made this one
        find_unused = config.get('find_unused_parameters', False)
        options += [
            'model_wrapper_cfg.type=MMDistributedDataParallel',
            'model_wrapper_cfg.broadcast_buffers=False',
            f'model_wrapper_cfg.find_unused_parameters={find_unused}',
        ]
    sys.argv += ['--cfg-options', *options]
    if os.environ.get('RANK', os.environ.get('SLURM_PROCID', '0')) == '0':
        print(f'no GPU here: CPU ranks, as if with --cfg-options {" ".join(options)}', file=sys.stderr)
