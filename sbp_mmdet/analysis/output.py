"""Where the tools write what they measured."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

__all__ = ['add_outputs', 'write_outputs']


def add_outputs(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """Adds ``--json`` and ``--plot``; a folder is refused before anything is measured.

    Args:
        parser (ArgumentParser): Of the tool.
        plot (bool): With ``--plot``. Default: True.
    """
    parser.add_argument('--json', type=_file, help='write the results here as well')
    if plot:
        parser.add_argument('--plot', type=_file, help='write a picture (PNG) here')


def _file(text):
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f'{path} is a folder; give the name of a file in it')
    return path


def write_outputs(
    args: argparse.Namespace, results: dict, draw: Callable[[Path], None] | None = None, indent: int | None = None
) -> None:
    """Writes what was asked for, folders included, and says where.

    Args:
        args (Namespace): With the arguments of :func:`add_outputs`.
        results (dict): What goes into the JSON file.
        draw (Callable | None): Draws the picture into a file. Default: None.
        indent (int | None): Of the JSON file. Default: None.
    """
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=indent) + '\n')
        print(f'written to {args.json}')
    if draw and args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(args.plot)
        print(f'written to {args.plot}')
