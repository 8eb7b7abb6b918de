"""Where a number comes from: date, machine, versions, commit and command, in words that hold on any machine."""

import datetime
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

from . import __version__

__all__ = ['CHECKOUT', 'commit', 'describe_machine', 'portable']

CHECKOUT = Path(__file__).resolve().parents[1]
# Two components or more, so that 'forward / backward' and '1/2' are none; '://' is no start of a path.
_ABSOLUTE = re.compile(r'(?<![\w.:/$}~])/[^\s/,;:=\'"()\[\]{}]+(?:/[^\s/,;:=\'"()\[\]{}]+)+/?')


def describe_machine(device: torch.device | str = 'cpu') -> dict:
    """What stands beside every published number.

    Args:
        device (torch.device | str): Where it was measured. Default: 'cpu'.

    Returns:
        dict: ``date``, ``device``, ``python``, versions of ``torch``, ``mmcv``, ``mmdet``, ``mmengine`` and
        ``sbp_mmdet``, ``commit`` and ``dirty`` (of :func:`commit`), and ``command``.
    """
    cuda = torch.device(device).type == 'cuda'
    return dict(
        date=datetime.date.today().isoformat(),
        device=torch.cuda.get_device_name(device) if cuda else f'{_cpu_name()}, {torch.get_num_threads()} threads',
        python=platform.python_version(),
        torch=torch.__version__,
        mmcv=mmcv.__version__,
        mmdet=mmdet.__version__,
        mmengine=mmengine.__version__,
        sbp_mmdet=__version__,
        **commit(),
        command=portable(shlex.join(['python', *sys.argv])),
    )


def commit() -> dict:
    """The commit of the checkout that this package runs from, as it is now.

    Returns:
        dict: ``commit``, and ``dirty``: whether tracked files differ from it; both None without a checkout.
    """
    # The package may be installed inside of somebody else's checkout: is this very file tracked?
    if _git('ls-files', '--error-unmatch', __file__) is None:
        return dict(commit=None, dirty=None)
    return dict(commit=_git('rev-parse', 'HEAD'), dirty=bool(_git('status', '--porcelain', '--untracked-files=no')))


def _git(*words):
    try:
        done = subprocess.run(['git', '-C', CHECKOUT, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None
    return done.stdout.strip()


def portable(node):
    """A copy of nested dicts and lists whose strings name no folder of this machine.

    An absolute path becomes one relative to the checkout or to the working folder; of any other one its last
    component stays, as ``$DATA/NAME``.

    Args:
        node (object): Dict, list, tuple, or a value; strings may hold several paths.

    Returns:
        object: The copy.
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
        with open('/proc/cpuinfo') as info:
            return next(line.split(':')[1].strip() for line in info if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
