"""The transforms that a config names, without building them."""

from collections.abc import Iterable, Iterator

__all__ = ['leaves_of', 'name_of', 'steps_of']


def steps_of(dataset: dict | None) -> Iterator[dict]:
    """Transform in the order in which an image meets them: those of inner data sets first.

    Args:
        dataset (dict | None): Config of a data set.
    """
    if not isinstance(dataset, dict):
        return
    for inner in dataset.get('datasets') or [dataset.get('dataset')]:
        yield from steps_of(inner)
    yield from dataset.get('pipeline') or []


def name_of(step: dict) -> str:
    """Name of a transform's class, without its scope."""
    kind = step.get('type')
    return (kind if isinstance(kind, str) else getattr(kind, '__name__', '')).split('.')[-1]


def leaves_of(steps: Iterable) -> Iterator[dict]:
    """Transform, and those that they hold instead of what holds them.

    Args:
        steps (Iterable): Configs of transforms; others are passed over.
    """
    for step in steps:
        if not isinstance(step, dict):
            continue
        inner = [value for value in step.values() if isinstance(value, (dict, list, tuple))]
        held = [item for value in inner for item in _flat(value) if isinstance(item, dict) and 'type' in item]
        yield from leaves_of(held) if held else [step]


def _flat(value):
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
