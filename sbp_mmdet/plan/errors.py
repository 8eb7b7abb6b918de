"""Errors that a model's own code raises, in one line for the user."""

import traceback
from pathlib import Path

__all__ = ['describe_data_error', 'describe_error']


def describe_error(error: Exception) -> str:
    """Return an error's class, message and place in one line.

    Args:
        error (Exception): An error that was raised.

    Returns:
        str: Class, first 200 characters of the message (if it has none, of the line of code), and the innermost file
        and line outside of torch; for a data set without images what to look at.
    """
    if _says_no_images(error):
        return f'its data set {_NO_IMAGES}'
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if 'torch' not in Path(f.filename).parts] or every
    text = _shorten(error) or _shorten(frames[-1].line)
    where = f'{Path(frames[-1].filename).name}, line {frames[-1].lineno}'
    return f'{type(error).__name__}{text and ": "}{text} ({where})'


def describe_data_error(what: str, error: Exception) -> str:
    """Return an error of a data set in one line.

    Args:
        what (str): What failed, such as 'its train pipeline cannot be run'.
        error (Exception): The error that was raised.

    Returns:
        str: The line; for a data set without images with what to look at.
    """
    if _says_no_images(error):
        return f'{what} here: it {_NO_IMAGES}'
    return f'{what} here ({type(error).__name__}: {_shorten(error)})'


_NO_IMAGES = 'has no image; look at ann_file, at the classes in metainfo and at filter_cfg'


def _says_no_images(error):
    return isinstance(error, ValueError) and 'at least one array' in str(error)  # mmengine's, of a list of no images


def _shorten(error):
    return ' '.join(str(error).split())[:200]
