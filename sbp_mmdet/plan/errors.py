"""Errors that a model's own code raises, in one line for the user."""

import traceback
from pathlib import Path

__all__ = ['reason_of']


def reason_of(error: Exception) -> str:
    """Return an error's class, message and place in one line.

    Args:
        error (Exception): An error that was raised.

    Returns:
        str: Class, first 200 characters of the message, and the innermost file and line outside of torch.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if 'torch' not in Path(f.filename).parts]
    text = ' '.join(str(error).split())[:200]
    where = f'{Path(frames[-1].filename).name}, line {frames[-1].lineno}'
    return f'{type(error).__name__}{text and ": "}{text} ({where})'
