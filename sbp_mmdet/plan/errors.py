"""Errors that a config's own code and data raise, in one line for the user."""

import json
import traceback
from collections.abc import Iterator
from pathlib import Path

from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.structures import BaseDataElement

from .config_keys import describe_mistake, shorten_names

__all__ = ['bad_input', 'describe_data_error', 'describe_error']

_PACKAGE = Path(__file__).parents[1]
_LENGTH = 200  # of a message that is quoted
_DISPATCH = ('__torch_dispatch__', '__torch_function__')


def bad_input(name: str, what: str, error: Exception, config: Config, made_up: bool = False) -> ValueError:
    """Return the error that the command reports in place of any error that a config's classes raise.

    Args:
        name (str): Name of the config, as the user gave it.
        what (str): What failed, such as 'its model cannot be built here'.
        error (Exception): The error that was raised.
        config (Config): The config, in which the value that is wrong is looked for.
        made_up (bool): Whether the model ran on a batch of :func:`.batch.build_batch`. Default: False.

    Returns:
        ValueError: Error whose message is a line.
    """
    text = f'{error}' if _is_ours(error) else describe_mistake(config, error)
    remedy = _find_remedy(error) or (made_up and _describe_missing_annotation(error)) or ''
    return ValueError(f'{name}: {text or f"{what}: {describe_error(error)}{remedy}"}')


def describe_error(error: Exception) -> str:
    """Return an error's class, message and place in one line.

    Args:
        error (Exception): An error that was raised.

    Returns:
        str: Class, beginning of the message (if it has none, the line of code), and the innermost file and line outside
        of torch and of this package's dispatch modes; for a data set without images what to look at.
    """
    if _says_no_images(error):
        return f'its data set {_describe_no_images(error)}'
    name, text, where = _class_text_and_place(error)
    return f'{name}{text and ": "}{text} ({where}){_describe_read_file(error)}'


def describe_data_error(what: str, error: Exception, config: Config) -> str:
    """Return an error of a data set in one line.

    Args:
        what (str): What failed, such as 'its train pipeline cannot be run'.
        error (Exception): The error that was raised.
        config (Config): The config of the data set.

    Returns:
        str: The line, which names the transform that failed; for a data set without images what to look at.
    """
    if _says_no_images(error):
        return f'{what} here: it {_describe_no_images(error)}'
    if text := describe_mistake(config, error):
        return f'{what} here ({text})'
    name, text, where = _class_text_and_place(error)
    text = text if _message_of(error) else f'{text}, {where}'
    transform = _find_transform(error)
    return f'{what} here ({transform and f"{transform}: "}{name}: {text}){_describe_read_file(error)}'


def _find_remedy(error):
    """Return a remedy for an error that a model's own code raises, or an empty text."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f'; install {error.name.partition(".")[0]}'
    if isinstance(error, ValueError) and 'more than 1 value per channel' in str(error):  # torch's, of a batch norm
        return '; a batch norm after global pooling needs 2 images or more: set --batch or train_dataloader.batch_size'
    return ''


def _describe_missing_annotation(error):
    """Return what to do if a model reads an annotation that a made-up batch lacks, or an empty text."""
    if isinstance(error, AttributeError) and isinstance(getattr(error, 'obj', None), BaseDataElement):
        return (
            f'; the model reads {error.name!r} from its data, and the batch here has images, boxes, labels and masks '
            'alone; sbp-mmdet rehearse runs a step on your own data'
        )
    return ''


def _is_ours(error):
    """Return whether an error is a message of this package for the user, and not one of the code that it runs."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised_here = _PACKAGE in Path(last.filename).parents and (last.line or '').startswith('raise')
    return isinstance(error, ValueError) and raised_here


def _class_text_and_place(error):
    frames = [*traceback.extract_tb(error.__traceback__)]
    # Operations of the model run inside of dispatch modes of this package, which are not the place of the mistake.
    ours = [f.name in _DISPATCH and _PACKAGE in Path(f.filename).parents for f in frames]
    frames = frames[: ours.index(True)] if any(ours[1:]) else frames
    frames = [f for f in frames if 'torch' not in Path(f.filename).parts] or frames
    text = _message_of(error) or _shorten(frames[-1].line)
    return type(error).__name__, text, f'{Path(frames[-1].filename).name}, line {frames[-1].lineno}'


def _message_of(error):
    message = error.args[0] if isinstance(error, KeyError) and error.args else None
    return _shorten(message if isinstance(message, str) and ' ' in message else error)


def _shorten(text):
    """Return a text in one line, cut at the end of a sentence or of a word if it is long."""
    text = ' '.join(str(text).split())
    if len(text) <= _LENGTH:
        return text
    start = text[: _LENGTH + 1]
    end = start.rfind('. ') + 1
    return start[:end] if end > _LENGTH // 4 else f'{start.rpartition(" ")[0] or start[:-1]} ...'


def _find_transform(error):
    """Return the class of the innermost transform of a pipeline in which an error was raised, or an empty text."""
    found = ''
    for variables in _variables_of_frames(error):
        own = variables.get('self')
        step = variables.get('t') if type(own).__name__ == 'Compose' else own
        if callable(step) and (isinstance(step, BaseTransform) or step is not own):
            blank = type(step).__module__.startswith(f'{__package__}.')  # one that takes the place of a transform
            found = '' if blank and not hasattr(step, 'loader') else type(getattr(step, 'loader', step)).__name__
    return found


def _variables_of_frames(error) -> Iterator[dict]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_locals


def _describe_read_file(error):
    """Return which annotation file a data set was reading when an error was raised, or an empty text."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = getattr(frame.f_locals.get('self'), 'ann_file', None)
        if frame.f_code.co_name == 'load_data_list' and isinstance(file, str) and file:
            return f'; this happened while {file} was read: look at that file, or name another in ann_file'
    return ''


def _says_no_images(error):
    return isinstance(error, ValueError) and 'at least one array' in str(error)  # mmengine's, of a list of no images


def _describe_no_images(error):
    owners = (variables.get('self') for variables in _variables_of_frames(error))
    dataset = next((one for one in owners if getattr(one, 'ann_file', None) and hasattr(one, 'metainfo')), None)
    try:
        known = [category['name'] for category in json.loads(Path(dataset.ann_file).read_bytes())['categories']]
        classes = [*dataset.metainfo['classes']]
    except Exception:  # noqa: BLE001  another format than COCO's, or another error than that of a data set
        known = classes = ()
    if known and classes and not {*known} & {*classes}:
        return (
            f'has no image with a box: no category of {dataset.ann_file} is one of the classes of metainfo; the file '
            f'has {shorten_names(known)}, metainfo has {shorten_names(classes)}; set metainfo=dict(classes=(...)) to '
            "the file's names, and num_classes to their number"
        )
    return 'has no image; look at ann_file, at the classes in metainfo and at filter_cfg'
