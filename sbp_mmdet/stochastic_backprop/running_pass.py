"""The forward pass that a thread runs: several threads may call one backbone at the same time, each with its images."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ['RunningPass']


class RunningPass(threading.local):
    """The forward pass of a backbone that is running in this thread. Copies and pickles begin without one.

    Attributes:
        now (Any): The state of the pass. If ``None``, there is none. Default: None.
        again (bool): Whether a layer is recomputed within a pass that has ended. Default: False.
    """

    now: Any = None
    again = False

    def __reduce__(self):
        return RunningPass, ()

    @contextlib.contextmanager
    def within(self, this: Any, again: bool = False) -> Iterator[None]:
        """Run a pass within the context. It ends also if an error is raised. Passes may be nested.

        Args:
            this (Any): The state of the pass.
            again (bool): Whether a layer is recomputed. Default: False.
        """
        outer = self.now, self.again
        self.now, self.again = this, again or self.again
        try:
            yield
        finally:
            self.now, self.again = outer
