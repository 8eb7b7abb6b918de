"""``sbp-mmdet plan CONFIG --batch max``: the largest batch that fits into a GPU, for each preset."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from mmengine.config import Config

from ..presets import PRESETS
from .planner import ORDER, count_needed_bytes, count_update_bytes
from .variants import NotApplicable, find_piece_changes

__all__ = ['LARGEST', 'BatchRow', 'find_largest_batch', 'find_largest_batches', 'learning_rate']

# Relative error of a need that is extrapolated by one image along a line through counts.
_LINE_ERRS = 0.01
_FURTHER = 4  # by which factor a line is extended beyond the counts
LARGEST = 256  # largest number of images that is counted; a count takes longer the more images there are


class BatchRow(NamedTuple):
    """A variant with its largest batch.

    Attributes:
        variant (str): Preset, with '+amp' for mixed precision if the config has none.
        gradients (str): 'exact', 'int8' or 'sbp', followed by ', fp16' in mixed precision.
        images (int): Largest batch on one GPU; 0 if not even one image fits.
        need (int): Bytes of GPU memory with this batch, or with one image if none fits.
        learning_rate (float | None): Learning rate that ``--auto-scale-lr`` sets for it. If ``None``, the config does
            not say which batch its learning rate is for.
        update (int): See :func:`.planner.count_update_bytes`. Default: 0.
    """

    variant: str
    gradients: str
    images: int
    need: int
    learning_rate: float | None
    update: int = 0


def find_largest_batch(
    need: Callable[[int], int], budget: int, counted: dict[int, int] | None = None
) -> tuple[int, int]:
    """Find the largest batch that fits into a budget.

    The memory of a step is nearly linear in the number of images, so the answer is interpolated from counts on both
    sides of it. Every second guess halves the interval, in case it is not linear. If three counts lie on a line by
    which one image more exceeds the budget by more than the line's error, that number is not counted.

    Args:
        need (Callable): Returns the bytes that a number of images needs; called once for each number.
        budget (int): Memory of the GPU, in bytes.
        counted (dict[int, int] | None): Earlier counts, to which new ones are added. If ``None``, there are none.
            Default: None.

    Returns:
        tuple[int, int]: Number of images, at most :data:`LARGEST`, and their need; or 0 and the need of one image if
        not even one fits. If a model cannot run one image, the smallest number is two.
    """
    counted = {} if counted is None else counted

    def count(images):
        if images not in counted:
            counted[images] = need(images)
        return counted[images]

    try:
        least = 1
        count(1)
    except Exception:  # noqa: BLE001  a batch norm behind a global pooling needs two
        least = 2
    if count(least) > budget:
        return 0, counted[least]
    count(least + 1)
    while True:
        low = max(images for images, bytes_ in counted.items() if bytes_ <= budget)
        above = [images for images, bytes_ in counted.items() if bytes_ > budget]
        high = min(above, default=LARGEST + 1)
        if high - low == 1:
            return low, counted[low]
        # Counts of 45 and 46 images may be equal, so a line goes through one of half as many images or fewer.
        other = high if above else max(images for images in counted if images <= max(low / 2, least))
        slope = max((counted[other] - counted[low]) / (other - low), 1)
        guess = int(low + (budget - counted[low]) / slope)
        if guess == low and _lie_on_a_line(counted, low) and counted[low] + slope > budget * (1 + _LINE_ERRS):
            return low, counted[low]
        if not above:  # one and two images say little of fifty, and a count of fifty takes this machine's memory
            guess = min(max(guess, low + 1), _FURTHER * low)
        elif len(counted) % 2 == 0:
            guess = (low + high) // 2
        count(min(max(guess, low + 1), high - 1))


def _lie_on_a_line(counted, low):
    """Return whether the three counts next to one lie on a line, and it is one of them or between them."""
    if len(counted) < 3:
        return False
    near = sorted(sorted(counted, key=lambda images: abs(images - low))[:3])
    first, middle, last = (counted[images] for images in near)
    expected = first + (last - first) * (near[1] - near[0]) / (near[2] - near[0])
    return abs(expected / middle - 1) < _LINE_ERRS / 2


def find_largest_batches(
    config: Config,
    budget: int,
    measure: Callable[[str, int], dict],
    presets: Collection[str],
    *,
    gpus: int = 1,
    found: Callable[[BatchRow], object] = lambda row: None,
    failed: Callable[[str, Exception], object] | None = None,
) -> list[BatchRow]:
    """Find the largest batch of each preset, in the precision of the config and in mixed precision.

    Args:
        config (Config): A plain config, see :func:`.variants.plain`.
        budget (int): Memory of the GPU, in bytes.
        measure (Callable): Returns the result of ``measure_detector`` for a variant and a number of images.
        presets (Collection[str]): Presets that apply to the model.
        gpus (int): Number of GPUs. Default: 1.
        found (Callable): Called with each row as soon as it is known. Default: does nothing.
        failed (Callable | None): See :func:`.planner.plan`. Default: None.

    Returns:
        list[BatchRow]: A row for each variant.
    """
    rows = []
    for pieces in ((), ('amp',)):
        try:
            find_piece_changes(config, pieces)
        except NotApplicable:
            continue
        for name in ('none', 'with_cp', *ORDER):
            if name not in presets or (pieces and PRESETS[name].gradients != 'exact'):
                continue
            variant = '+'.join((name, *pieces))
            updates = []

            def count(images, variant=variant, updates=updates):
                row = measure(variant, images)
                updates.append(count_update_bytes(row, gpus > 1))
                return count_needed_bytes(row, gpus > 1)

            try:
                images, need = find_largest_batch(count, budget)
            except Exception as error:  # whatever a model's own code raises, for example in half precision
                if variant == 'none' or failed is None:
                    raise
                failed(variant, error)
                continue
            gradients = ', '.join((PRESETS[name].gradients, *(['fp16'] if pieces else [])))
            rate = learning_rate(config, images * gpus)
            rows.append(BatchRow(variant, gradients, images, need, rate, min(updates)))
            found(rows[-1])
    return rows


def learning_rate(config: Config, images: int) -> float | None:
    """Return the learning rate that mmdet's ``--auto-scale-lr`` sets.

    Args:
        config (Config): A config.
        images (int): Number of images of a step, on all GPUs together.

    Returns:
        float | None: The learning rate, or ``None`` if the config has no ``auto_scale_lr.base_batch_size`` or no image
        fits.
    """
    base = (config.get('auto_scale_lr') or {}).get('base_batch_size')
    rate = config.optim_wrapper.optimizer.get('lr')
    return rate * images / base if base and rate and images else None
