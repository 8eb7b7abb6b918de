"""Checks of annotation files: whether they are there, COCO format, and have some of the classes.

Nothing here imports sbp_mmdet, see :mod:`preflight`.
"""

import json
import mmap
from pathlib import Path

__all__ = ['KEYS', 'TEST_KEYS', 'PreflightError', 'check_annotations']

KEYS = ('images', 'annotations', 'categories')
TEST_KEYS = ('images', 'categories')  # the test sets of COCO come without annotations
_REMEDY = 'give the path of a COCO-format file in ann_file (it is joined to data_root)'
# Up to here a file is parsed (a second for this size); beyond, its ends and its keys are looked at.
_PARSE_BYTES = 50_000_000


class PreflightError(ValueError):
    """Bad input; the message is meant for the person who typed it."""


def check_annotations(
    path: Path, key: str, classes: tuple[str, ...] | None = None, needed: tuple[str, ...] = KEYS
) -> list[str]:
    """Check that a file is COCO format and has annotations for some of the classes.

    Returns:
        list[str]: Names of its categories; empty where a large file does not show them.

    Raises:
        PreflightError: If the file is missing, not COCO format, or has no category of that name.
    """
    if not path.is_file():
        raise PreflightError(f'{key}: {path} does not exist (working folder: {Path.cwd()}); {_REMEDY}')
    try:
        names = _category_names(path, needed)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PreflightError(f'{key}: {path} is not a COCO-format annotation file: {error}; {_REMEDY}') from error
    if classes and names and not set(classes) & set(names):
        raise PreflightError(
            f'{key}: no category of {path} is one of the classes of metainfo, so there is nothing to learn; '
            f'the file has {_shortened(names)}, metainfo has {_shortened(classes)}; set '
            "metainfo=dict(classes=(...)) to the file's names, and num_classes to their number"
        )
    return names


def _category_names(path, needed):
    if path.stat().st_size > _PARSE_BYTES:
        return _category_names_of_large(path, needed)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f'it is not valid JSON ({error})') from error
    if not isinstance(content, dict):
        raise ValueError(f'it holds a {type(content).__name__}, not an object with {", ".join(needed)}')
    _require(needed, content.__contains__)
    return [category['name'] for category in content['categories']]


def _category_names_of_large(path, needed):
    """Read the category names without parsing: 450 MB of COCO take several seconds in each process."""
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not content[:64].lstrip().startswith(b'{') or not content[-64:].rstrip().endswith(b'}'):
            raise ValueError('it is not one whole JSON object; is it complete?')
        _require(needed, lambda key: content.find(f'"{key}"'.encode()) >= 0)
        tail = content[content.rfind(b'"categories"') :][:1_000_000].decode(errors='ignore')
    try:
        categories, _ = json.JSONDecoder().raw_decode(tail[tail.index('[') :])
        return [category['name'] for category in categories]
    except (ValueError, TypeError, KeyError):
        return []  # an unusual layout: mmdet will read it, or say why not


def _require(needed, has):
    lacks = [key for key in needed if not has(key)]
    if lacks:
        raise ValueError(f'it lacks {", ".join(lacks)}')


def _shortened(names):
    return f'{list(names)[:10]}' + (f' and {len(names) - 10} more' if len(names) > 10 else '')
