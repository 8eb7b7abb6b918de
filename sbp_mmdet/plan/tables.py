"""Tables and files of what was counted or measured, and where a number comes from.

A table is data: columns, each with a head and what it says of a record, and records.
"""

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import mmcv
import mmdet
import mmengine
import torch

from .. import __version__
from ..resume import AtomicBackend

__all__ = [
    'CHECKOUT',
    'Column',
    'commit',
    'describe_machine',
    'format_bytes',
    'format_gib',
    'markdown_table',
    'output_file',
    'portable',
    'text_table',
    'write_json',
]

CHECKOUT = Path(__file__).resolve().parents[2]
# Two components or more, so that 'forward / backward' and '1/2' are none; '://' is no start of a path.
_ABSOLUTE = re.compile(r'(?<![\w.:/$}~])/[^\s/,;:=\'"()\[\]{}]+(?:/[^\s/,;:=\'"()\[\]{}]+)+/?')


class Column(NamedTuple):
    """A column of a table.

    Args:
        head (str): Above it.
        cell (Callable): Record -> what stands in its line; None leaves the cell empty.
    """

    head: str
    cell: Callable[[dict], str | None]


def text_table(columns: Sequence[Column], records: Iterable[dict]) -> str:
    """Lines for a terminal; the first column is set left, the others right."""
    lines = _cells(columns, records)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([f'{first:<{widths[0]}}', *map(str.rjust, rest, widths[1:])] for first, *rest in lines)
    return '\n'.join('  '.join(row).rstrip() for row in rows)


def markdown_table(columns: Sequence[Column], records: Iterable[dict]) -> str:
    """Lines of Markdown."""
    head, *lines = (f'| {" | ".join(cells)} |' for cells in _cells(columns, records))
    return '\n'.join([head, '|' + '---|' * len(columns), *lines])


def _cells(columns, records):
    lines = [[column.cell(record) or '' for column in columns] for record in records]
    return [[column.head for column in columns], *lines]


def format_bytes(n: int) -> str:
    """GB (1e9 bytes), or MB below one GB."""
    return f'{n / 1e9:.2f} GB' if n >= 1e9 else f'{n / 1e6:.0f} MB'


def format_gib(n: int) -> str:
    """GiB (2**30 bytes), in which GPUs are sold and torch reports, or MiB below one GiB."""
    return f'{n / 2**30:.2f} GiB' if n >= 2**30 else f'{n / 2**20:.0f} MiB'


def output_file(text: str) -> Path:
    """``type=`` of an argument that names a file to write: what cannot be written is refused before anything runs.

    Args:
        text (str): The argument.

    Raises:
        argparse.ArgumentTypeError: If it is a folder, or cannot be made where it is to lie.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f'{path} is a folder; give the name of a file in it')
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f'{path} cannot be written: {there} is no folder to write in')
    return path


def write_json(path: Path, results, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all, its folder included. No path of this machine gets into it.

    Args:
        path (Path): The file.
        results (object): What goes into it.
        indent (int | None): Of the file. Default: 1.
    """
    AtomicBackend().put_text(json.dumps(portable(results), indent=indent) + '\n', path)


def describe_machine(device: torch.device | str = 'cpu') -> dict:
    """Describe where a published number comes from: ``date``, ``device``, versions, on a GPU those of CUDA too,
    :func:`commit`, ``command``.

    Args:
        device (torch.device | str): Where it was measured. Default: 'cpu'.
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
        sbp_mmdet=__version__,
        **commit(),
        command=portable(shlex.join(['python', *sys.argv])),
    )


def commit() -> dict:
    """``commit`` of the checkout that this package runs from, and ``dirty``: whether tracked files differ from it,
    except documents and results.

    Both are None without a checkout. The environment variable SBP_COMMIT names it where there is no git.
    """
    # The package may be installed inside of somebody else's checkout: is this very file tracked?
    if _git('ls-files', '--error-unmatch', __file__) is None:
        return dict(commit=os.environ.get('SBP_COMMIT'), dirty=None)
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
        with open('/proc/cpuinfo') as info:
            return next(line.split(':')[1].strip() for line in info if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
