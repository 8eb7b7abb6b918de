"""Tables, pictures and files of what the tools measured: the same for memory, times, gradients and trainings.

A table is data: columns, each with a head and what it says of a record, and records.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .provenance import portable
from .resume import AtomicBackend

__all__ = [
    'COLOURS',
    'Column',
    'add_outputs',
    'aligned',
    'compact',
    'format_bytes',
    'markdown_table',
    'output_file',
    'panels',
    'save_picture',
    'text_table',
    'write_json',
    'write_outputs',
]

COLOURS = ('#1f77b4', '#d95f02', '#1b9e77', '#7b4fa3', '#e7298a', '#66a61e', '#a6761d', '#444444')


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
    return aligned(_cells(columns, records))


def markdown_table(columns: Sequence[Column], records: Iterable[dict]) -> str:
    """Lines of Markdown."""
    head, *lines = (f'| {" | ".join(cells)} |' for cells in _cells(columns, records))
    return '\n'.join([head, '|' + '---|' * len(columns), *lines])


def _cells(columns, records):
    lines = [[column.cell(record) or '' for column in columns] for record in records]
    return [[column.head for column in columns], *lines]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text, the first cell of each set left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([f'{first:<{widths[0]}}', *map(str.rjust, rest, widths[1:])] for first, *rest in lines)
    return '\n'.join('  '.join(row).rstrip() for row in rows)


def format_bytes(n: int) -> str:
    """GB (1e9 bytes), or MB below one GB."""
    return f'{n / 1e9:.2f} GB' if n >= 1e9 else f'{n / 1e6:.0f} MB'


def compact(node, digits: int = 5):
    """A copy of nested dicts and lists with numbers rounded to significant digits, for JSON."""
    if isinstance(node, dict):
        return {key: compact(value, digits) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [compact(value, digits) for value in node]
    return float(f'{node:.{digits}g}') if isinstance(node, float) else node


def panels(rows: int = 1, columns: int = 1, **options) -> tuple:
    """An empty picture, drawn without a display.

    Args:
        rows (int): Of panels. Default: 1.
        columns (int): Of panels. Default: 1.
        **options: Of ``matplotlib.pyplot.subplots``.

    Returns:
        tuple: Figure, and its axes as an array (rows, columns).
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, squeeze=False, **{'layout': 'constrained', **options})
    for axes in grid.flat:
        axes.spines[['top', 'right']].set_visible(False)
    return figure, grid


def save_picture(figure, path: Path, title: str = '', legend: Sequence = (), columns: int = 5, dpi: int = 100) -> None:
    """Writes a picture and closes it.

    Args:
        figure (matplotlib.figure.Figure): Of :func:`panels`.
        path (Path): A PNG file; its folder is made.
        title (str): Above all panels. Default: ''.
        legend (Sequence): Handles with labels, below all panels. Default: ().
        columns (int): Of the legend. Default: 5.
        dpi (int): Pixels an inch. Default: 100.
    """
    import matplotlib.pyplot as plt

    if legend:
        figure.legend(handles=legend, loc='outside lower center', ncols=columns, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10, x=0.01, ha='left')
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def add_outputs(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """Adds ``--json`` and ``--plot``; a folder is refused before anything is measured.

    Args:
        parser (ArgumentParser): Of the tool.
        plot (bool): With ``--plot``. Default: True.
    """
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    if plot:
        parser.add_argument('--plot', type=output_file, help='write a picture (PNG) here')


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


def write_json(path: Path, results, indent: int | None = None) -> None:
    """Writes a JSON file whole or not at all: some are read back by a later call, and hours stand in them.

    Args:
        path (Path): The file; its folder is made.
        results: What goes into it.
        indent (int | None): Of the JSON file. Default: None.
    """
    AtomicBackend().put_text(json.dumps(results, indent=indent) + '\n', path)


def write_outputs(
    args: argparse.Namespace, results: dict, draw: Callable[[Path], None] | None = None, indent: int | None = None
) -> None:
    """Writes what was asked for, folders included, and says where. No path of this machine gets into the JSON file.

    Args:
        args (Namespace): With the arguments of :func:`add_outputs`.
        results (dict): What goes into the JSON file.
        draw (Callable | None): Draws the picture into a file. Default: None.
        indent (int | None): Of the JSON file. Default: None.
    """
    if args.json:
        write_json(args.json, portable(results), indent)
        print(f'written to {args.json}')
    if draw and args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(args.plot)
        print(f'written to {args.plot}')
