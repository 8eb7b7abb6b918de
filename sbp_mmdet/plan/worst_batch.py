"""The largest batches that a config's sampler and preprocessor put together from the outputs of its pipeline.

The sampler groups images by their orientation on disk, but a crop may turn a landscape image into a portrait one. Then
a batch is padded to the height of one image and the width of another, 1.5 times the size of any of its images. Images
that remain of the two groups at the end of an epoch share a batch, too.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from mmengine.config import Config

from .index_batches import GROUPING, index_batches
from .pipeline import Samples
from .rare_sizes import expected_largest
from .transforms import name_of

__all__ = ['Batch', 'Batches', 'draw_batches', 'groups_of_samples']

# Number of batches that are drawn. A training on COCO, 12 epochs of two images on each of eight GPUs, has 88,000.
_DRAWS = 100_000
# Number of batches that are drawn with each sample, even a rare one: an epoch contains all images.
_OF_EACH = 8
_MOST_NUMBERS = 2_000_000


class Batch(NamedTuple):
    """A batch, or a branch of a semi-supervised batch.

    Attributes:
        images (int): Number of images.
        height, width (int): Size that all images are padded to, before the preprocessor's divisor.
        boxes (int): Number of boxes in each image of the most crowded batch.
        truth (list[np.ndarray]): Boxes of that batch's images as shares of width and height, shape (boxes, 4) each.
    """

    images: int
    height: int
    width: int
    boxes: int
    truth: list


class Batches(NamedTuple):
    """Batches of a training.

    Attributes:
        largest (dict[str, Batch]): Largest batch by branch; a single branch '' unless the training is semi-supervised.
        rare (tuple[int, int]): Height and width that one batch in a thousand reaches.
        usual (tuple[int, int]): Height and width of the median batch.
    """

    largest: dict[str, Batch]
    rare: tuple[int, int]
    usual: tuple[int, int]

    @property
    def main(self) -> Batch:
        """Branch with the most pixels."""
        return max(self.largest.values(), key=lambda one: one.images * one.height * one.width)


def draw_batches(samples: Samples, config: Config, dataset, batch: int, processes: int) -> Batches:
    """Draw batches as the config's sampler groups images, and return the largest, a rare and the usual one.

    The largest one is at least as large as the one that is expected once in the training, see :mod:`.rare_sizes`.
    Samplers that do not draw at random, and the user's own, are run.

    Args:
        samples (Samples): Result of :func:`.pipeline.sample_pipeline`.
        config (Config): Config of the detector.
        dataset: The train data set, of which the samples are.
        batch (int): Number of images of a batch.
        processes (int): Number of processes of the training, among which images are distributed at random.

    Returns:
        Batches: The batches.
    """
    rng = np.random.default_rng(0)
    drawn, every = [], []
    draws = max(1000, min(_DRAWS, _MOST_NUMBERS // (batch * len(samples.branches))))
    # A sampler that is run gives as many batches as in the training; in order, more would be the same ones again.
    own = max(1000, math.ceil(_count_batches(config, samples, batch, processes)))
    if (indices := index_batches(samples, config, dataset, batch, min(draws, own), processes)) is not None:
        drawn.append(_draw_batches_of(rng, samples, indices))
        every += _draw_with_each_sample(rng, samples, indices)
    else:
        groups = list(groups_of_samples(samples, config, batch))
        if (samples.sizes == samples.sizes[0]).all():
            draws = 1
        shares = np.array([samples.weight[np.concatenate([inside for inside, _ in group])].sum() for group in groups])
        for group, share in zip(groups, shares / shares.sum(), strict=True):
            drawn.append(_draw(rng, samples, group, math.ceil(draws * share)))
            every += _draw_with_each(rng, samples, group)
            every += _expect_rarest(samples, group, share * _count_batches(config, samples, batch, processes))
        drawn += _draw_mixed(rng, samples, config, batch, draws, processes)
    sizes = np.concatenate(drawn)
    pixels = _count_pixels(sizes, config)
    order = pixels.argsort(kind='stable')
    all_sizes = np.concatenate([sizes, *every])
    largest = all_sizes[_count_pixels(all_sizes, config).argmax()]
    batches = {}
    for i, (branch, (images, height, width)) in enumerate(zip(samples.branches, largest, strict=True)):
        if images:
            size = _resize_and_pad(int(height), int(width), config)
            batches[branch] = Batch(int(images), *size, *_find_crowd(samples, i, int(images)))
    rare, usual = (_size_of_main(sizes[order[int(share * (len(order) - 1))]], config) for share in (0.999, 0.5))
    return Batches(batches, rare, usual)


def _size_of_main(batch, config):
    _, height, width = max(batch.tolist(), key=math.prod)
    return _resize_and_pad(int(height), int(width), config, usual=True)


def groups_of_samples(samples: Samples, config: Config, batch: int) -> Iterator[list[tuple]]:
    """Yield the sampler's groups: lists of (indices of the samples of a source, number of them in a batch).

    Args:
        samples (Samples): Result of :func:`.pipeline.sample_pipeline`.
        config (Config): Config of the detector.
        batch (int): Number of images of a batch.
    """
    loader = config.get('train_dataloader') or {}
    sampler, of_batches = loader.get('sampler') or {}, name_of(loader.get('batch_sampler') or {})
    grouped = of_batches in GROUPING or name_of(sampler).startswith('Group')
    ratio = sampler.get('source_ratio')
    if ratio:
        numbers = [int(batch * share / sum(ratio)) for share in ratio]
        numbers[0] = batch - sum(numbers[1:])
        sources = [[(samples.source == i, number) for i, number in enumerate(numbers) if number]]
    elif of_batches.startswith('MultiData'):
        sources = [[(samples.source == i, batch)] for i in np.unique(samples.source)]
    else:
        sources = [[(np.ones(len(samples.source), bool), batch)]]
    for parts in sources:
        for portrait in (False, True) if grouped else (None,):
            inside = [(mask if portrait is None else mask & (samples.portrait == portrait), n) for mask, n in parts]
            parts_inside = [(np.flatnonzero(mask), number) for mask, number in inside if mask.any()]
            if parts_inside:
                yield parts_inside


def _draw(rng, samples, parts, number, first=None):
    """Draw batches; return their number of images, height and width, shape (number, branches, 3)."""
    chosen = []
    for inside, images in parts:
        weight = samples.weight[inside]
        chosen.append(inside[rng.choice(len(inside), (number, images), p=weight / weight.sum())])
    chosen = np.concatenate(chosen, 1)
    if first is not None:
        place = sum(images for inside, images in parts[: first[0]])
        chosen[:, place] = first[1]
    sizes = samples.sizes[chosen]  # (number, images, branches, 2)
    images = (sizes[..., :1] > 0).sum(1)
    return np.concatenate([images, sizes.max(1)], -1)


def _draw_with_each(rng, samples, parts):
    for i, (inside, _) in enumerate(parts):
        yield _draw(rng, samples, parts, len(inside) * _OF_EACH, (i, np.repeat(inside, _OF_EACH)))


def _count_batches(config, samples, batch, processes):
    """Count the batches of a training, on all GPUs."""
    train = config.get('train_cfg') or {}
    if iterations := train.get('max_iters'):
        return iterations * processes
    return (train.get('max_epochs') or 1) * samples.total / batch


def _expect_rarest(samples, parts, batches):
    """Yield the batch that is expected once in so many batches, if its images are of one source and one branch."""
    (inside, images), *others = parts
    if others or images < 2 or len(samples.branches) > 1:
        return
    # Images that were added because they are large are no random sample.
    inside = inside[samples.weight[inside] == samples.weight.max()]
    if len(inside):
        heights, widths = samples.sizes[inside, 0].T
        size = expected_largest(heights, widths, images, batches, int(samples.sizes.max()))
        yield np.array([[[images, *size]]])


def _draw_batches_of(rng, samples, indices):
    """Return batches of given images as :func:`_draw` does; of each image one of its samples is drawn."""
    begins = np.cumsum([0, *map(len, indices)])[:-1]
    sizes = samples.sizes[_draw_samples(rng, samples, np.concatenate(indices))]  # (images, branches, 2)
    images = np.add.reduceat(sizes[..., :1] > 0, begins, dtype=int)
    return np.concatenate([images, np.maximum.reduceat(sizes, begins)], -1)


def _draw_with_each_sample(rng, samples, indices):
    """Yield a batch for each sample, in which the sample replaces its image.

    An image that is in many batches is replaced in the first few of them.
    """
    places = {}
    for number, batch in enumerate(indices):
        for place, image in enumerate(batch):
            if len(known_places := places.setdefault(image, [])) < _OF_EACH:
                known_places.append((number, place))
    for sample, image in enumerate(samples.images):
        for number, place in places.get(int(image), ()):
            chosen = _draw_samples(rng, samples, np.array(indices[number]))
            chosen[place] = sample
            sizes = samples.sizes[chosen]
            yield np.concatenate([(sizes[..., :1] > 0).sum(0), sizes.max(0)], -1)[None]


def _draw_samples(rng, samples, images):
    """Draw a sample of each image, or any sample for an image that has none."""
    order = np.argsort(samples.images, kind='stable')
    low, high = (np.searchsorted(samples.images[order], images, side) for side in ('left', 'right'))
    known = low < high
    return order[rng.integers(np.where(known, low, 0), np.where(known, high, len(order)))]


def _draw_mixed(rng, samples, config, batch, draws, processes):
    """Yield batches of the images that remain of both orientations at the end of an epoch."""
    loader = config.get('train_dataloader') or {}
    of_batches = loader.get('batch_sampler') or {}
    name, sampler = name_of(of_batches), name_of(loader.get('sampler') or {})
    ends = name in GROUPING and not of_batches.get('drop_last', name.startswith('MultiData'))
    landscape, portrait = (np.flatnonzero(samples.portrait == side) for side in (False, True))
    if batch == 1 or not ends or 'Infinite' in sampler or not (len(landscape) and len(portrait)):
        return
    if samples.groups and processes == 1 and sampler == 'DefaultSampler':
        rests = [tuple(number % batch for number in samples.groups)]  # the same in each epoch
    else:
        rests = [(wide, high) for wide in range(batch) for high in range(batch)]
    number = draws * min(1, batch / samples.total)  # number of epochs
    splits = [(high, min(batch - high, wide)) for wide, high in rests]
    for high, wide in dict.fromkeys(splits):
        times = round(number * splits.count((high, wide)) / len(splits))
        if times and high and wide:
            yield _draw(rng, samples, [(portrait, high), (landscape, wide)], times)


def _find_crowd(samples, branch, batch):
    """Return the mean number of boxes of the most crowded images of a batch, and those boxes."""
    order = np.argsort(-samples.boxes[:, branch], kind='stable')
    _, first = np.unique(samples.images[order], return_index=True)  # each image once, as it is most crowded
    top = np.resize(order[np.sort(first)[:batch]], batch)  # of fewer images, some come twice
    return -(-int(samples.boxes[top, branch].sum()) // batch), [samples.truth[i][branch] for i in top]


# --- The preprocessor -------------------------------------------------------------------------------------------------


def _preprocessor(config):
    preprocessor = (config.get('model') or {}).get('data_preprocessor') or {}
    return preprocessor.get('data_preprocessor') or preprocessor


def _count_pixels(sizes, config):
    divisor = _preprocessor(config).get('pad_size_divisor') or 1
    images, height, width = np.moveaxis(sizes, -1, 0)
    return (images * (-(-height // divisor) * divisor) * (-(-width // divisor) * divisor)).sum(1)


def _resize_and_pad(height: int, width: int, config: Config, usual: bool = False) -> tuple[int, int]:
    """Return the size to which the preprocessor resizes or pads an image, before it pads it to a divisor."""
    for augment in _preprocessor(config).get('batch_augments') or []:
        if name_of(augment) == 'BatchFixedSizePad':
            height, width = map(max, (height, width), _pair(augment['size']))
        elif name_of(augment) == 'BatchSyncRandomResize':  # the height is drawn, the width follows
            low, high = (side // (step := augment.get('size_divisor', 32)) for side in augment['random_size_range'])
            tall = (low + high) // 2 if usual else high
            height, width = step * tall, step * int(width / height * tall)
        elif name_of(augment) == 'BatchResize':
            factor = min(min(augment['scale']) / min(height, width), max(augment['scale']) / max(height, width))
            height, width = round(height * factor), round(width * factor)
    return height, width


def _pair(value) -> tuple:
    return (value, value) if isinstance(value, (int, float)) else tuple(value)
