"""What a GPU has to have beyond the tensors of a counted step: memory that the allocator cannot use."""

from collections.abc import Sequence

from .caching_allocator import CachingAllocator, least_capacity, replay

__all__ = ['reserved_bytes', 'scaled']

# Smaller storages, such as boxes and losses, do not follow the size of the images.
_OF_MAPS = 64 * 2**10


def scaled(
    events: Sequence[tuple[int, int]], share: float, fixed: frozenset[int] = frozenset()
) -> list[tuple[int, int]]:
    """Return the events of a step on smaller images.

    Storages of feature maps shrink with the images. Held against counted steps of Faster R-CNN R-50 on images of four
    sizes, plain and with `exact`, this changes what is reserved by 0.1 %, and by 2 % with expandable segments.

    Args:
        events (Sequence[tuple[int, int]]): Of a counted step, see :func:`.caching_allocator.replay`.
        share (float): Pixels relative to those of the counted images.
        fixed (frozenset[int]): Bytes of parameters: storages of these sizes are gradients, and stay. Default: none.
    """
    return [
        (number, nbytes if nbytes < _OF_MAPS or nbytes in fixed else int(nbytes * share)) for number, nbytes in events
    ]


def reserved_bytes(held: Sequence[int], events: Sequence[tuple[int, int]], usual_share: float = 1) -> dict[str, int]:
    """Count what CUDA's caching allocator reserves over several steps.

    Images change in size from step to step. Steps on usual images, on some between, and on the largest ones are
    replayed, and once more, for the largest leave segments that the others are cut out of.

    Args:
        held (Sequence[int]): Bytes of each tensor that stays between steps.
        events (Sequence[tuple[int, int]]): Of a step on the largest batch.
        usual_share (float): Pixels of the usual batch relative to those of the largest one. Default: 1.

    Returns:
        dict[str, int]: ``reserved``: bytes on a GPU that has plenty, as ``nvidia-smi`` shows them beside the context;
        ``capacity``: the least within which the steps go on, since torch gives cached segments back before it runs out
        of memory; ``expandable``: the same with ``expandable_segments:True``.
    """
    fixed = frozenset(held)
    shares = dict.fromkeys((usual_share, (1 + 2 * usual_share) / 3, (2 + usual_share) / 3, 1.0))
    steps = [scaled(events, share, fixed) for share in shares] * 2
    return dict(
        reserved=replay(CachingAllocator(), held, steps).most_reserved,
        capacity=least_capacity(held, steps),
        expandable=least_capacity(held, steps, expandable=True),
    )
