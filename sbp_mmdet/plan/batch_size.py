"""``sbp-mmdet plan CONFIG --batch max``: the largest batch that fits into a GPU, for each preset."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from mmengine.config import Config

from ..presets import PRESETS
from .planner import ORDER, needed
from .variants import NotApplicable, piece_change

__all__ = ['LARGEST', 'BatchRow', 'largest_batch', 'largest_batches', 'learning_rate']

# Share of a need by which a line through counts on both sides, or below, may be wrong for one image more.
_LINE_ERRS = 0.01
LARGEST = 256  # images; nobody asks for more on one GPU, and a count takes longer the more there are


class BatchRow(NamedTuple):
    """A variant with its largest batch.

    Attributes:
        variant (str): Preset, and 'amp' for mixed precision where the config has none.
        gradients (str): 'exact', 'int8' or 'sbp'; in mixed precision ', fp16'.
        images (int): The largest batch on one GPU; 0 if not even one image fits.
        need (int): Bytes of GPU memory with this batch, or with one image if that is too much.
        learning_rate (float | None): What ``--auto-scale-lr`` sets for it. If ``None``, the config does not say for how
            many images its learning rate is.
    """

    variant: str
    gradients: str
    images: int
    need: int
    learning_rate: float | None


def largest_batch(need: Callable[[int], int], budget: int, counted: dict[int, int] | None = None) -> tuple[int, int]:
    """Find the largest batch whose need is within a budget.

    What a step holds is nearly linear in the images, so the answer is guessed from counts on both sides of it. Every
    second guess halves the interval, for where it is not linear. Where three counts lie on a line which says that one
    image more is too much, by more than a line errs, that one is not counted.

    Args:
        need (Callable): Images to bytes; called once for each number.
        budget (int): Bytes.
        counted (dict[int, int] | None): What was counted before, to which counts are added. If `None`, nothing was.
            Default: None.

    Returns:
        tuple[int, int]: Images, at most :data:`LARGEST`, and their need; (0, need of one image) if that is too much.
    """
    counted = {} if counted is None else counted

    def count(images):
        if images not in counted:
            counted[images] = need(images)
        return counted[images]

    if count(1) > budget:
        return 0, counted[1]
    count(2)
    while True:
        low = max(images for images, bytes_ in counted.items() if bytes_ <= budget)
        above = [images for images, bytes_ in counted.items() if bytes_ > budget]
        high = min(above, default=LARGEST + 1)
        if high - low == 1:
            return low, counted[low]
        other = high if above else max(images for images in counted if images < low)
        slope = max((counted[other] - counted[low]) / (other - low), 1)
        guess = int(low + (budget - counted[low]) / slope)
        if guess == low and _on_a_line(counted, low) and counted[low] + slope > budget * (1 + _LINE_ERRS):
            return low, counted[low]
        if not above and guess == low:
            guess = low + 1
        elif above and len(counted) % 2 == 0:
            guess = (low + high) // 2
        count(min(max(guess, low + 1), high - 1))


def _on_a_line(counted, low):
    """Return whether the three counts next to one lie on a line, and it is one of them or between them."""
    if len(counted) < 3:
        return False
    near = sorted(sorted(counted, key=lambda images: abs(images - low))[:3])
    first, middle, last = (counted[images] for images in near)
    expected = first + (last - first) * (near[1] - near[0]) / (near[2] - near[0])
    return abs(expected / middle - 1) < _LINE_ERRS / 2


def largest_batches(
    config: Config,
    budget: int,
    measure: Callable[[str, int], dict],
    presets: Collection[str],
    *,
    gpus: int = 1,
) -> list[BatchRow]:
    """Find the largest batch of each preset, in the precision of the config and in mixed precision.

    Args:
        config (Config): A plain config, see :func:`.variants.plain`.
        budget (int): Bytes of the GPU.
        measure (Callable): Gives ``measure_detector``'s row of a variant with a number of images.
        presets (Collection[str]): Those that apply to the model.
        gpus (int): Number of GPUs. Default: 1.

    Returns:
        list[BatchRow]: A row for each variant.
    """
    rows = []
    for pieces in ((), ('amp',)):
        try:
            piece_change(config, pieces)
        except NotApplicable:
            continue
        for name in ('none', 'with_cp', *ORDER):
            if name not in presets or (pieces and PRESETS[name].gradients != 'exact'):
                continue
            variant = '+'.join((name, *pieces))
            images, need = largest_batch(lambda n, v=variant: needed(measure(v, n), gpus > 1), budget)
            gradients = ', '.join((PRESETS[name].gradients, *(['fp16'] if pieces else [])))
            rows.append(BatchRow(variant, gradients, images, need, learning_rate(config, images * gpus)))
    return rows


def learning_rate(config: Config, images: int) -> float | None:
    """Return the learning rate that mmdet's ``--auto-scale-lr`` sets.

    Args:
        config (Config): A config.
        images (int): Images of a step, on all GPUs.

    Returns:
        float | None: The rate. If ``None``, the config has no ``auto_scale_lr.base_batch_size``, or no image fits.
    """
    base = (config.get('auto_scale_lr') or {}).get('base_batch_size')
    rate = config.optim_wrapper.optimizer.get('lr')
    return rate * images / base if base and rate and images else None
