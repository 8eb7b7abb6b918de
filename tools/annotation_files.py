"""Checks of annotation files: whether they are there, COCO format, have some of the classes, and images to train with.

Nothing here imports sbp_mmdet, see :mod:`preflight`.
"""

import json
import mmap
from pathlib import Path

__all__ = [
    'KEYS',
    'TEST_KEYS',
    'PreflightError',
    'check_annotations',
    'check_image_folder',
    'check_training_images',
    'shortened',
]

KEYS = ('images', 'annotations', 'categories')
TEST_KEYS = ('images', 'categories')  # the test sets of COCO come without annotations
_READ_BY_MMDET = ('image_id', 'category_id', 'bbox', 'area')
_REMEDY = 'give the path of a COCO-format file in ann_file (it is joined to data_root)'
# Up to here a file is parsed (a second for this size); beyond, its ends and its keys are looked at.
_PARSE_BYTES = 50_000_000


class PreflightError(ValueError):
    """Bad input; the message is meant for the person who typed it."""


def check_annotations(
    path: Path, key: str, classes: tuple[str, ...] | None = None, needed: tuple[str, ...] = KEYS
) -> list[str]:
    """Check that a file is COCO format and has annotations for some of the classes.

    Args:
        path (Path): The annotation file.
        key (str): Key of the config that names it, for messages.
        classes (tuple[str, ...] | None): Classes in ``metainfo`` of the dataset. If ``None``, they are not compared.
            Default: None.
        needed (tuple[str, ...]): Keys that the file must have. Default: :data:`KEYS`.

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
    if isinstance(classes, str):
        raise PreflightError(
            f'{key}: metainfo has classes={classes!r}, a string, whose letters would be the classes; a tuple of one '
            f'name has a comma: classes=({classes!r},)'
        )
    if classes and names and not set(classes) & set(names):
        raise PreflightError(
            f'{key}: no category of {path} is one of the classes of metainfo, so there is nothing to learn; '
            f'the file has {shortened(names)}, metainfo has {shortened(classes)}; set '
            "metainfo=dict(classes=(...)) to the file's names, and num_classes to their number"
        )
    return names


def check_training_images(
    path: Path, key: str, classes: tuple[str, ...], filter_cfg: dict | None = None, masks: bool = False
) -> None:
    """Check that mmdet can train with a file in COCO format: that images are left, and annotations are complete.

    Files that are too large to be parsed are not checked.

    Args:
        path (Path): A file that :func:`check_annotations` accepts.
        key (str): Where the config names it.
        classes (tuple[str, ...]): Names of the classes.
        filter_cfg (dict | None): That of the data set. Default: None.
        masks (bool): Whether masks are loaded. Default: False.

    Raises:
        PreflightError: If the data set removes all images, or an annotation lacks what mmdet reads from it.
    """
    if path.stat().st_size > _PARSE_BYTES:
        return
    content = json.loads(path.read_bytes())
    known = {category.get('id') for category in content['categories'] if category['name'] in classes}
    annotations = [one for one in content['annotations'] if not one.get('ignore')]  # mmdet skips the rest
    for one in annotations:
        if lacks := [name for name in _READ_BY_MMDET if name not in one]:
            raise PreflightError(
                f'{key}: the annotation with id={one.get("id")} in {path} lacks {", ".join(lacks)}; mmdet reads '
                f'{", ".join(_READ_BY_MMDET)} of every annotation'
            )
    annotations = [one for one in annotations if one['category_id'] in known]
    filter_cfg = filter_cfg or {}
    _check_filter(path, key, content, {one['image_id'] for one in annotations}, filter_cfg)
    if masks and annotations and not any(one.get('segmentation') for one in annotations):
        raise PreflightError(
            f'{key}: no annotation of {path} has a segmentation, but LoadAnnotations has with_mask=True; train a '
            'detector of boxes with with_mask=False, or add the masks to the file'
        )


def check_image_folder(path: Path, key: str, folder: Path) -> None:
    """Check that a folder has one of the images that a file in COCO format lists. Large files are not checked.

    Args:
        path (Path): A file that :func:`check_annotations` accepts.
        key (str): Where the config names the folder.
        folder (Path): The folder.

    Raises:
        PreflightError: If the folder has none of them, so that the first step would fail.
    """
    if path.stat().st_size > _PARSE_BYTES:
        return
    names = [image.get('file_name') for image in json.loads(path.read_bytes())['images']]
    if not names or None in names or any((folder / name).exists() for name in names):
        return
    raise PreflightError(
        f'{key}: none of the {len(names)} images of {path} is in {folder}, for example {folder / names[0]} (working '
        f'folder: {Path.cwd()}); give the folder that the file names in it start from (it is joined to data_root)'
    )


def _check_filter(path, key, content, annotated, filter_cfg):
    """Raise an error if a filter removes all images: that of mmengine would name neither the file nor the filter."""
    images, min_size = content['images'], filter_cfg.get('min_size', 0)
    if not images:
        raise PreflightError(f'{key}: {path} lists no images; {_REMEDY}')
    if filter_cfg.get('filter_empty_gt'):
        images = [image for image in images if image.get('id') in annotated]
    if not images:
        seen = 'it has no annotations'
        if content['annotations']:
            first = content['annotations'][0]
            seen = (
                f'the first of its {len(content["annotations"])} annotations has image_id={first["image_id"]!r}, '
                f'category_id={first["category_id"]!r}; these must be ids of its images and categories'
            )
        raise PreflightError(
            f'{key}: filter_cfg.filter_empty_gt removes all {len(content["images"])} images of {path}, because none '
            f'has an annotation of the classes; {seen}'
        )
    if all(min(image.get('width', min_size), image.get('height', min_size)) < min_size for image in images):
        raise PreflightError(
            f'{key}: filter_cfg.min_size={min_size} removes all images of {path}, because their shorter sides are '
            'smaller; set a smaller min_size'
        )


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


def shortened(names: list[str]) -> str:
    """Return the first ten names, and the number of the others."""
    return f'{list(names)[:10]}' + (f' and {len(names) - 10} more' if len(names) > 10 else '')
