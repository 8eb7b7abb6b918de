"""What is said of an error that a model's own code raises."""

import traceback
from pathlib import Path

__all__ = ['reason_of']


def reason_of(error: Exception) -> str:
    """Return what went wrong and where, in a line.

    Args:
        error (Exception): A raised error.

    Returns:
        str: Its class, its message up to 200 characters, and the innermost line outside of torch.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if 'torch' not in Path(f.filename).parts]
    text = ' '.join(str(error).split())[:200]
    where = f'{Path(frames[-1].filename).name}, line {frames[-1].lineno}'
    return f'{type(error).__name__}{text and ": "}{text} ({where})'
