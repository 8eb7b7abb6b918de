"""Batches that a config's sampler and preprocessor put together from the images that its pipeline puts out.

The sampler groups images by their shape on disk, but a crop may turn a landscape image into a portrait one afterwards:
then a batch is padded to the height of one image and the width of another, which is half as large again as any of its
images. And what remains of the two groups at the end of an epoch shares a batch.
"""

import math
from typing import NamedTuple

import numpy as np
from mmengine.config import Config

from .pipeline import Samples
from .steps import name_of

__all__ = ['DRAWS', 'Batch', 'Batches', 'batches_of']

# A training on COCO, 12 epochs of two images on each of eight GPUs, has 88,000.
DRAWS = 100_000
_GROUPING = ('AspectRatioBatchSampler', 'MultiDataAspectRatioBatchSampler', 'TrackAspectRatioBatchSampler')
# So many batches for each sample, whatever its share: an epoch has all images.
_OF_EACH = 8
_MOST_NUMBERS = 2_000_000


class Batch(NamedTuple):
    """A batch, or a branch of one.

    Attributes:
        images (int): How many.
        height, width (int): Of all of them, padded to one size; to the preprocessor's divisor it pads them itself.
        boxes (int): In each image of the most crowded batch.
        truth (list[np.ndarray]): Boxes of that batch's images as shares of width and height, (boxes, 4) each.
    """

    images: int
    height: int
    width: int
    boxes: int
    truth: list


class Batches(NamedTuple):
    """Batches of a training.

    Attributes:
        largest (dict[str, Batch]): The largest one, by branch: '' alone unless the training is semi-supervised.
        rare (tuple[int, int]): Height and width that one batch in a thousand reaches.
        usual (tuple[int, int]): Those of the batch in the middle.
    """

    largest: dict[str, Batch]
    rare: tuple[int, int]
    usual: tuple[int, int]

    @property
    def main(self) -> Batch:
        """The branch with the most pixels."""
        return max(self.largest.values(), key=lambda one: one.images * one.height * one.width)


def batches_of(samples: Samples, config: Config, batch: int, processes: int = 1) -> Batches:
    """Put batches together as the sampler groups images.

    Args:
        samples (Samples): Of :func:`.pipeline.samples_of`.
        config (Config): Config of the detector.
        batch (int): Images of a batch.
        processes (int): Of the training, between which images are dealt out by chance. Default: 1.

    Returns:
        Batches: The largest, a rare and the usual one.
    """
    rng = np.random.default_rng(0)
    drawn, every = [], []
    groups = list(_groups(samples, config, batch))
    draws = max(1000, min(DRAWS, _MOST_NUMBERS // (batch * len(samples.branches))))
    if (samples.sizes == samples.sizes[0]).all():
        draws = 1
    shares = np.array([samples.weight[np.concatenate([inside for inside, _ in group])].sum() for group in groups])
    for group, share in zip(groups, shares / shares.sum(), strict=True):
        drawn.append(_draw(rng, samples, group, math.ceil(draws * share)))
        every += _with_each(rng, samples, group)
    drawn += _mixed(rng, samples, config, batch, draws, processes)
    sizes = np.concatenate(drawn)
    pixels = _pixels(sizes, config)
    order = pixels.argsort(kind='stable')
    all_sizes = np.concatenate([sizes, *every])
    largest = all_sizes[_pixels(all_sizes, config).argmax()]
    found = {}
    for i, (branch, (images, height, width)) in enumerate(zip(samples.branches, largest, strict=True)):
        if images:
            size = _padded(int(height), int(width), config)
            found[branch] = Batch(int(images), *size, *_crowd(samples, i, int(images)))
    rare, usual = (_of_main(sizes[order[int(share * (len(order) - 1))]], config) for share in (0.999, 0.5))
    return Batches(found, rare, usual)


def _of_main(batch, config):
    _, height, width = max(batch.tolist(), key=math.prod)
    return _padded(int(height), int(width), config, usual=True)


def _groups(samples, config, batch):
    """Return for each of the sampler's groups, and each of its sources, the samples and how many of them it takes."""
    loader = config.get('train_dataloader') or {}
    sampler, of_batches = loader.get('sampler') or {}, name_of(loader.get('batch_sampler') or {})
    grouped = of_batches in _GROUPING or name_of(sampler).startswith('Group')
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
            found = [(np.flatnonzero(mask), number) for mask, number in inside if mask.any()]
            if found:
                yield found


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


def _with_each(rng, samples, parts):
    for i, (inside, _) in enumerate(parts):
        yield _draw(rng, samples, parts, len(inside) * _OF_EACH, (i, np.repeat(inside, _OF_EACH)))


def _mixed(rng, samples, config, batch, draws, processes):
    """Return what remains of two groups at the end of an epoch."""
    loader = config.get('train_dataloader') or {}
    of_batches = loader.get('batch_sampler') or {}
    name, sampler = name_of(of_batches), name_of(loader.get('sampler') or {})
    ends = name in _GROUPING and not of_batches.get('drop_last', name.startswith('MultiData'))
    landscape, portrait = (np.flatnonzero(samples.portrait == side) for side in (False, True))
    if batch == 1 or not ends or 'Infinite' in sampler or not (len(landscape) and len(portrait)):
        return
    if samples.groups and processes == 1 and sampler == 'DefaultSampler':
        rests = [tuple(number % batch for number in samples.groups)]  # the same ones in each epoch
    else:
        rests = [(wide, high) for wide in range(batch) for high in range(batch)]
    number = draws * min(1, batch / samples.total)  # of epochs
    splits = [(high, min(batch - high, wide)) for wide, high in rests]
    for high, wide in dict.fromkeys(splits):
        times = round(number * splits.count((high, wide)) / len(splits))
        if times and high and wide:
            yield _draw(rng, samples, [(portrait, high), (landscape, wide)], times)


def _crowd(samples, branch, batch):
    """Boxes an image where the most crowded images meet, and those boxes."""
    order = np.argsort(-samples.boxes[:, branch], kind='stable')
    _, first = np.unique(samples.images[order], return_index=True)  # each image once, as it is most crowded
    top = order[np.sort(first)[:batch]]
    return -(-int(samples.boxes[top, branch].sum()) // batch), [samples.truth[i][branch] for i in top]


# --- The preprocessor -------------------------------------------------------------------------------------------------


def _preprocessor(config):
    found = config.model.get('data_preprocessor') or {}
    return found.get('data_preprocessor') or found


def _pixels(sizes, config):
    divisor = _preprocessor(config).get('pad_size_divisor') or 1
    images, height, width = np.moveaxis(sizes, -1, 0)
    return (images * (-(-height // divisor) * divisor) * (-(-width // divisor) * divisor)).sum(1)


def _padded(height: int, width: int, config: Config, usual: bool = False) -> tuple[int, int]:
    """Return the size that the preprocessor makes of an image, before it pads to a divisor."""
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
