"""What a config says about its transforms and images, read without building them."""

from collections.abc import Iterable, Iterator

from mmengine.config import Config

__all__ = ['channels_of', 'innermost_of', 'name_of', 'transforms_of']


def transforms_of(dataset: dict | None) -> Iterator[dict]:
    """Yield the configs of a data set's transforms in the order in which they run: those of inner data sets first.

    Args:
        dataset (dict | None): Config of a data set.
    """
    if not isinstance(dataset, dict):
        return
    for inner in dataset.get('datasets') or [dataset.get('dataset')]:
        yield from transforms_of(inner)
    yield from dataset.get('pipeline') or []


def name_of(step: dict) -> str:
    """Return the name of a class in a config's ``type``, without its scope."""
    kind = step.get('type')
    return (kind if isinstance(kind, str) else getattr(kind, '__name__', '')).split('.')[-1]


def innermost_of(steps: Iterable) -> Iterator[dict]:
    """Yield the configs of transforms; a transform that contains others is replaced by those.

    Args:
        steps (Iterable): Configs of transforms. Items that are no dicts are skipped.
    """
    for step in steps:
        if not isinstance(step, dict):
            continue
        inner = [value for value in step.values() if isinstance(value, (dict, list, tuple))]
        held = [item for value in inner for item in _flat(value) if isinstance(item, dict) and 'type' in item]
        yield from innermost_of(held) if held else [step]


def channels_of(config: Config) -> int:
    """Return the number of channels of the images that a config's backbone takes: 3 unless it says otherwise.

    Args:
        config (Config): Config of a detector, or of a model that holds one.
    """
    model = config.get('model') or {}  # a runner of objects has no config
    return ((model.get('detector') or model).get('backbone') or {}).get('in_channels') or 3


def _flat(value):
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
