"""Where a published number comes from, and result files, which are written whole or not at all."""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mmcv
import mmdet
import mmengine
import torch

import sbp_mmdet
from sbp_mmdet.resume import AtomicBackend

__all__ = ['CHECKOUT', 'commit', 'describe_machine', 'output_file', 'portable', 'write_json']

PACKAGE = Path(sbp_mmdet.__file__).resolve()
CHECKOUT = PACKAGE.parents[1]
# An absolute path of two components or more, so that 'forward / backward' and '1/2' are none; '://' is no start of one.
_ABSOLUTE = re.compile(r'(?<![\w.:/$}~])/[^\s/,;:=\'"()\[\]{}]+(?:/[^\s/,;:=\'"()\[\]{}]+)+/?')


def output_file(text: str) -> Path:
    """Check that a file can be written, before anything runs; the ``type=`` of a command line's argument.

    Args:
        text (str): The argument, a path.

    Returns:
        Path: The path.

    Raises:
        argparse.ArgumentTypeError: If the path is a folder, or its folder cannot be made or written to.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f'{path} is a folder; give the name of a file in it')
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f'{path} cannot be written: {there} is no folder to write in')
    return path


def write_json(path: Path, results, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all, and make its folder. Paths of this machine are made portable.

    Args:
        path (Path): The file.
        results (object): Data of the file.
        indent (int | None): Number of spaces that nested data are indented by. Default: 1.
    """
    AtomicBackend().put_text(json.dumps(portable(results), indent=indent) + '\n', path)


def describe_machine(device: torch.device | str = 'cpu') -> dict:
    """Describe where a number is measured.

    Args:
        device (torch.device | str): Device of the measurement. Default: 'cpu'.

    Returns:
        dict: ``date``, ``device``, versions (on a GPU also of driver, CUDA and cuDNN), :func:`commit` and ``command``.
    """
    cuda = torch.device(device).type == 'cuda'
    return dict(
        date=datetime.date.today().isoformat(),
        device=torch.cuda.get_device_name(device) if cuda else f'{_cpu_name()}, {torch.get_num_threads()} threads',
        **(_cuda() if cuda else {}),
        python=platform.python_version(),
        torch=torch.__version__,
        mmcv=mmcv.__version__,
        mmdet=mmdet.__version__,
        mmengine=mmengine.__version__,
        sbp_mmdet=sbp_mmdet.__version__,
        **commit(),
        command=portable(shlex.join(['python', *sys.argv])),
    )


def commit() -> dict:
    """Return the commit of the checkout that the package runs from, and whether tracked files differ from it.

    Documents and results may differ. Without a checkout, both are ``None``. Whoever copies the files without their
    history names the commit by the environment variable SBP_COMMIT, which git's answer does not replace.

    Returns:
        dict: ``commit`` and ``dirty``.
    """
    # The package may be installed inside of somebody else's checkout: is its own file tracked?
    named = os.environ.get('SBP_COMMIT')
    if named or _git('ls-files', '--error-unmatch', PACKAGE) is None:
        return dict(commit=named, dirty=None)
    changed = _git('status', '--porcelain', '--untracked-files=no', '--', ':/', ':(top,exclude)docs')
    return dict(commit=_git('rev-parse', 'HEAD'), dirty=bool(changed))


def _cuda():
    words = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    driver = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
    return dict(driver=driver, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())


def _git(*words):
    try:
        done = subprocess.run(['git', '-C', CHECKOUT, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None
    return done.stdout.strip()


def portable(node):
    """Return a copy of nested dicts and lists whose strings name no folder of this machine.

    An absolute path becomes relative to the checkout or to the working folder; any other becomes ``$DATA/NAME``.
    """
    if isinstance(node, dict):
        return {key: portable(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [portable(value) for value in node]
    return _ABSOLUTE.sub(_relative, node) if isinstance(node, str) else node


def _relative(match):
    path = Path(match[0])
    for folder in (CHECKOUT, Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return f'$DATA/{path.name}'


def _cpu_name():
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as info:
            return next(line.split(':')[1].strip() for line in info if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
