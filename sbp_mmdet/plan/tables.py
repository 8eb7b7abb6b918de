"""Tables for a terminal.

A table consists of columns, each with a heading and a function that formats a cell, and of records.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ['Column', 'format_cells', 'format_gib', 'format_images', 'format_table']


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        head (str): Heading of the column.
        cell (Callable): Returns the text of a record's cell. If it returns ``None``, the cell is empty.
    """

    head: str
    cell: Callable[[dict], str | None]


def format_table(columns: Sequence[Column], records: Iterable[dict]) -> str:
    """Format a table for a terminal, with the first column aligned to the left and the others to the right."""
    lines = format_cells(columns, records)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([f'{first:<{widths[0]}}', *map(str.rjust, rest, widths[1:])] for first, *rest in lines)
    return '\n'.join('  '.join(row).rstrip() for row in rows)


def format_cells(columns: Sequence[Column], records: Iterable[dict]) -> list[list[str]]:
    """Return the cells of a table line by line, the headings first."""
    lines = [[column.cell(record) or '' for column in columns] for record in records]
    return [[column.head for column in columns], *lines]


def format_gib(n: int) -> str:
    """Format a number of bytes in GiB (2**30 bytes), the unit of GPUs and of torch, or in MiB below one GiB."""
    return f'{n / 2**30:.2f} GiB' if n >= 2**30 else f'{n / 2**20:.0f} MiB'


def format_images(batch: int, height: int, width: int, boxes: int, **_) -> str:
    """Return number, size and boxes of the images of a batch as a text.

    Args:
        batch (int): Number of images.
        height (int): Height of the largest, in pixels.
        width (int): Width of the largest, in pixels.
        boxes (int): Number of boxes in each image.
        **_: Other arguments of :func:`.detector.measure_detector`, which are not said.
    """
    return f'{batch} image{"s" * (batch > 1)} of {height} x {width} with {boxes} box{"es" * (boxes != 1)} each'
