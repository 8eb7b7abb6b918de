"""Standard output without what pycocotools prints when it reads annotations."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator

__all__ = ['without_reading_of_annotations']

_OF_PYCOCOTOOLS = re.compile(r'(loading annotations into memory|creating index)\.\.\.|Done \(t=.*s\)|index created!')


class _Lines(io.TextIOBase):
    """Stream that passes on whole lines, but none of pycocotools.

    Args:
        stream: Stream that the lines are passed on to.
    """

    def __init__(self, stream):
        self._stream, self._begun = stream, ''

    def write(self, text: str) -> int:
        """Write some text; a line is passed on when it ends."""
        *lines, self._begun = f'{self._begun}{text}'.split('\n')
        self._stream.write(''.join(f'{line}\n' for line in lines if not _OF_PYCOCOTOOLS.fullmatch(line)))
        return len(text)

    def close(self) -> None:
        """Pass on a last line that did not end; the stream behind stays open."""
        self._stream.write(self._begun)
        self._begun = ''


@contextlib.contextmanager
def without_reading_of_annotations() -> Iterator[None]:
    """Drop what pycocotools prints to stdout within the context."""
    lines = _Lines(sys.stdout)
    with contextlib.closing(lines), contextlib.redirect_stdout(lines):
        yield
