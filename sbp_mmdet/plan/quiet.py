"""Standard output without the messages of pycocotools, and of mmengine where it loads a checkpoint."""

import contextlib
import re
import sys
from collections.abc import Iterator

__all__ = ['without_reading_of_files']

_OF_LIBRARIES = re.compile(
    r'(loading annotations into memory|creating index)\.\.\.|Done \(t=.*s\)|index created!'
    r'|Loads checkpoint by \w+ backend from path: .*'
)


class _Lines:
    """Stream that forwards complete lines, except those of libraries that read files.

    All else is that of the stream behind.

    Args:
        stream: Stream that the lines are written to.
    """

    def __init__(self, stream):
        self._stream, self._begun = stream, ''

    def write(self, text: str) -> int:
        """Write some text; a line is forwarded when it is complete, or by :meth:`flush`."""
        *lines, self._begun = f'{self._begun}{text}'.split('\n')
        self._stream.write(''.join(f'{line}\n' for line in lines if not _OF_LIBRARIES.fullmatch(line)))
        return len(text)

    def flush(self) -> None:
        """Forward a line that is not complete."""
        self._stream.write(self._begun)
        self._begun = ''
        self._stream.flush()

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextlib.contextmanager
def without_reading_of_files() -> Iterator[None]:
    """Suppress what pycocotools and mmengine print while they load annotations and weights, within the context."""
    lines = _Lines(sys.stdout)
    try:
        with contextlib.redirect_stdout(lines):
            yield
    finally:
        lines.flush()
