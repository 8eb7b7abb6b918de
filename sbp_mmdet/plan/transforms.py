"""The transforms in a config, read without building them."""

from collections.abc import Iterable, Iterator

__all__ = ['innermost_of', 'name_of', 'transforms_of']


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


def _flat(value):
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
