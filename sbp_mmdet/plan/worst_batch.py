"""The largest batch that a config's pipeline, sampler and preprocessor can put together, and the usual one.

Sizes of images are followed through the transforms as intervals. The sampler groups images by their shape on disk, but
a crop may turn a landscape image into a portrait one afterwards: then a batch is padded to the height of one image and
the width of another, which is half as large again as any of its images.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mmengine.config import Config

__all__ = ['Batch', 'name_of', 'steps_of', 'substeps', 'usual_batch', 'worst_batch']


class Batch(NamedTuple):
    """Size of a batch.

    Attributes:
        height, width (int): Of all images of it, padded to one size; to the preprocessor's divisor it pads them itself.
        cause (str): What in the config makes it as large.
    """

    height: int
    width: int
    cause: str


class _Sizes(NamedTuple):
    """Sizes that images can have: bounds of height and width, and of width / height."""

    low: tuple[float, float] = (1, 1)
    high: tuple[float, float] = (math.inf, math.inf)
    ratio: tuple[float, float] = (0, math.inf)
    cause: str = ''  # the transform that made them
    turn: str = ''  # the one that made portrait images of landscape ones, or the reverse

    def tightened(self):
        """Bounds that follow from each other."""
        (low_h, low_w), (high_h, high_w), (least, most) = self[:3]
        high = (min(high_h, high_w / least if least else math.inf), min(high_w, high_h * most))
        low = (max(low_h, low_w / most), max(low_w, low_h * least))
        return self._replace(low=low, high=high, ratio=(max(least, low[1] / high[0]), min(most, high[1] / low[0])))


# The most usual photograph of COCO.
_USUAL = _Sizes((480, 640), (480, 640), (4 / 3, 4 / 3))
# What the aspect-ratio sampler tells apart.
_GROUPS = (_Sizes(ratio=(1, math.inf)), _Sizes(ratio=(0, 1)))


def worst_batch(config: Config, batch: int) -> Batch | None:
    """The largest size that a batch can be padded to, whatever the shapes of the images on disk.

    Args:
        config (Config): Config of a detector.
        batch (int): Images of a batch; one alone is not padded to another's size.

    Returns:
        Batch | None: The size; None: the config does not tell it, so it is that of the files.
    """
    loader = config.get('train_dataloader') or {}
    samplers = {name_of(loader.get(key) or {}) for key in ('sampler', 'batch_sampler')}
    grouped = samplers & {'AspectRatioBatchSampler', 'GroupMultiSourceSampler'}
    found = [followed(_pipelines(config), group) for group in _GROUPS]
    if not grouped:
        found = [[sizes for group in found for sizes in group]]
    padded = [_padded(batch_of, config) for group in found if (batch_of := _largest(group, batch))]
    return max(padded, key=lambda size: size.height * size.width, default=None)


def usual_batch(config: Config) -> Batch | None:
    """The size that a photograph of 640 x 480 has in the middle of what the pipeline draws.

    Args:
        config (Config): Config of a detector.

    Returns:
        Batch | None: See :func:`worst_batch`.
    """
    middles = []
    for sizes in followed(_pipelines(config), _USUAL):
        height, width = ((low + high) / 2 for low, high in zip(sizes.low, sizes.high, strict=True))
        if math.isfinite(height * width):
            middles.append(Batch(round(height), round(width), sizes.cause))
    middles.sort(key=lambda size: size.height * size.width)
    return _padded(middles[len(middles) // 2], config, usual=True) if middles else None


def _largest(group: list[_Sizes], batch: int) -> Batch | None:
    """The padded size of a batch whose images are of any of these sizes."""
    if not all(math.isfinite(side) for sizes in group for side in sizes.high):
        return None
    single = max(group, key=lambda sizes: math.prod(sizes.high))
    if batch == 1:
        return Batch(*map(math.floor, single.high), single.cause)
    tall, wide = (max(group, key=lambda sizes: sizes.high[side]) for side in (0, 1))
    height, width = math.floor(tall.high[0]), math.floor(wide.high[1])
    if height * width <= math.prod(single.high):
        return Batch(height, width, single.cause)
    turn = tall.turn or wide.turn
    why = f'{turn} turns images, so' if turn else 'landscape and portrait images share batches, so'
    return Batch(height, width, f'{why} {_text(tall)} meets {_text(wide)}; sizes by {single.cause}')


def _text(sizes):
    return ' x '.join(str(math.floor(side)) for side in sizes.high)


# --- The transforms of a config ---------------------------------------------------------------------------------------


def steps_of(dataset: dict | None) -> Iterator[dict]:
    """Transforms in the order in which an image meets them: those of an inner data set first.

    Args:
        dataset (dict | None): Config of a data set. Parts of a concatenation may have pipelines of their own: a choice.
    """
    if not isinstance(dataset, dict):
        return
    inner = dataset.get('datasets') or [dataset.get('dataset')]
    yield from (
        steps_of(inner[0])
        if len(inner) == 1
        else [dict(type='RandomChoice', transforms=[list(steps_of(part)) for part in inner])]
    )
    yield from dataset.get('pipeline') or []


def _pipelines(config):
    """That of the data set, or one that a hook puts in its place in the last epochs."""
    first = list(steps_of((config.get('train_dataloader') or {}).get('dataset')))
    later = [list(hook['switch_pipeline']) for hook in config.get('custom_hooks') or [] if hook.get('switch_pipeline')]
    return [dict(type='RandomChoice', transforms=[first, *later])] if later else first


def name_of(step: dict) -> str:
    """Name of a transform's class, without its scope."""
    kind = step.get('type')
    return (kind if isinstance(kind, str) else getattr(kind, '__name__', '')).split('.')[-1]


def substeps(step: dict) -> list[list[dict]]:
    """The alternatives that a transform chooses from, each a list of transforms; none: it is a transform itself."""
    choices = step.get('transforms') or []
    name = name_of(step)
    if name == 'RandomChoice':
        return [[choice] if isinstance(choice, dict) else list(choice) for choice in choices]
    if name in ('RandomApply', 'Compose', 'TransformBroadcaster', 'ProposalBroadcaster'):
        return [[choices] if isinstance(choices, dict) else list(choices)]
    if name == 'MultiBranch':  # semi-supervised: a pipeline for each kind of image
        named = [value for key, value in step.items() if key not in ('type', 'branch_field')]
        return [list(value) for value in named if isinstance(value, (list, tuple))]
    return []


def followed(steps: Iterable[dict], sizes: _Sizes) -> list[_Sizes]:
    """The sizes that transforms make of some, one entry for each way through them."""
    found = [sizes.tightened()]
    for step in steps:
        if branches := substeps(step):
            made = [out for sizes in found for branch in branches for out in followed(branch, sizes)]
            found = made + found if name_of(step) == 'RandomApply' else made
        elif rule := _RULES.get(name_of(step)):
            found = [_after(sizes, out.tightened(), step) for sizes in found for out in rule(step, sizes)]
        found = list(dict.fromkeys(found))
    return found


def _after(before, sizes, step):
    """With the transform that turned them."""
    one_way = before.ratio[0] >= 1 or before.ratio[1] <= 1
    turned = one_way and sizes.ratio[0] < 1 < sizes.ratio[1]
    return sizes._replace(turn=_said(step, 'crop_size', 'crop_type') if turned else before.turn)


# --- What a transform makes of sizes ----------------------------------------------------------------------------------


def _pair(value) -> tuple:
    return (value, value) if isinstance(value, (int, float)) else tuple(value)


def _said(step, *keys):
    def shown(value):
        long = isinstance(value, (list, tuple)) and len(value) > 3
        return f'[{value[0]}, ..., {value[-1]}]' if long else value

    given = ', '.join(f'{key}={shown(step[key])}' for key in keys if step.get(key) is not None)
    return f'{name_of(step)}({given})'


def _fixed(height, width, cause):
    return _Sizes((height, width), (height, width), (width / height, width / height), cause)


def _scaled(sizes, shorts, longs, cause):
    """Sizes with their ratio kept, within a shorter and a longer side that are drawn from ranges.

    Landscape and portrait apart: together, their bounds would be those of a square.
    """
    ends = [(int(s + 0.5), int(e + 0.5) if math.isfinite(e) else e) for s, e in zip(shorts, longs, strict=True)]
    for turned in (False, True):
        least, most = (1 / sizes.ratio[1], 1 / max(sizes.ratio[0], 1e-9)) if turned else sizes.ratio
        least = max(least, 1)
        if most < least:
            continue
        low = min(min(s, e / most) for s, e in ends), min(min(e, s * least) for s, e in ends)
        high = max(min(s, e / least) for s, e in ends), max(min(e, s * most) for s, e in ends)
        low, high = (
            tuple(max(1, math.floor(side + 0.5)) if math.isfinite(side) else side for side in sides)
            for sides in (low, high)
        )
        ratio = (1 / most, 1 / least) if turned else (least, most)
        yield _Sizes(low[::-1] if turned else low, high[::-1] if turned else high, ratio, cause)


def _resize(step, sizes):
    """Of one scale (width, height), a list of them, or a range; each of them or a factor of it."""
    cause = _said(step, 'scale', 'scales', 'scale_factor', 'ratio_range')
    keep = step.get('keep_ratio') or name_of(step) == 'FixScaleResize'
    scale = step.get('scale') or step.get('scales')
    if scale is None:
        w, h = _pair(step.get('scale_factor') or 1)
        yield _Sizes(
            (sizes.low[0] * h, sizes.low[1] * w),
            (sizes.high[0] * h, sizes.high[1] * w),
            tuple(side * w / h for side in sizes.ratio),
            cause,
        )
        return
    nested = not all(isinstance(side, (int, float)) for side in _pair(scale))
    scales = [_pair(one) for one in scale] if nested or name_of(step) == 'RandomChoiceResize' else [_pair(scale)]
    if name_of(step) == 'RandomResize' and nested:  # sides are drawn between those of two scales
        shorts, longs = ([kind(one) for one in scales] for kind in (min, max))
        ranges = [((min(shorts), max(shorts)), (min(longs), max(longs)))]
        scales = [(min(one[0] for one in scales), min(one[1] for one in scales)), tuple(map(max, *scales))]
    else:
        factors = step.get('ratio_range') or (1, 1)
        ranges = [tuple(tuple(kind(one) * f for f in factors) for kind in (min, max)) for one in scales]
        scales = [tuple(int(side * f) for side in one) for one in scales for f in factors]
    if keep:
        for shorts, longs in ranges:
            yield from _scaled(sizes, shorts, longs, cause)
    else:
        yield from (_fixed(height, width, cause) for width, height in dict.fromkeys(scales))


def _shortest_edge(step, sizes):
    short, long = min(_pair(step['scale'])), step.get('max_size') or math.inf
    yield from _scaled(sizes, (short, short), (long, long), _said(step, 'scale', 'max_size'))


def _crop(step, sizes):
    kind, (first, second) = step.get('crop_type', 'absolute'), _pair(step['crop_size'])
    cause = _said(step, 'crop_size', 'crop_type')
    if kind == 'absolute_range':  # both sides are drawn between the same two numbers
        low, high = (first, first), (second, second)
    elif kind == 'absolute':
        low = high = (second, first)
    else:  # shares of the width and of the height
        shares = min(second, 1), min(first, 1)
        low = tuple(max(1, int(side * share)) for side, share in zip(sizes.low, shares, strict=True))
        high = (
            sizes.high
            if kind == 'relative_range'
            else tuple(side * share + 0.5 for side, share in zip(sizes.high, shares, strict=True))
        )
    if kind.startswith('relative') and math.isinf(sum(sizes.high)):
        yield sizes._replace(low=low, high=high, ratio=(sizes.ratio[0] * shares[1], sizes.ratio[1] / shares[0]))
        return
    yield _Sizes(tuple(map(min, sizes.low, low)), tuple(map(min, sizes.high, high)), cause=cause)


def _pad(step, sizes):
    cause = _said(step, 'size', 'size_divisor', 'pad_to_square')
    low, high = sizes.low, sizes.high
    if step.get('size') is not None:
        padded = _pair(step['size'])[::-1]
        low, high = tuple(map(max, low, padded)), tuple(map(max, high, padded))
    elif step.get('pad_to_square'):
        low, high = (max(low),) * 2, (max(high),) * 2
    if divisor := step.get('size_divisor'):
        low, high = (
            tuple(math.ceil(s / divisor) * divisor if math.isfinite(s) else s for s in sides) for sides in (low, high)
        )
    yield _Sizes(low, high, (1, 1) if step.get('pad_to_square') else (0, math.inf), cause)


def _mosaic(step, sizes):
    width, height = _pair(step.get('img_scale', (640, 640)))
    yield _fixed(2 * height, 2 * width, _said(step, 'img_scale'))
    if step.get('prob', 1.0) < 1:
        yield sizes


def _affine(step, sizes):
    more_w, more_h = (2 * border for border in _pair(step.get('border', (0, 0))))
    low, high = ((h + more_h, w + more_w) for h, w in (sizes.low, sizes.high))
    yield _Sizes(tuple(max(1, side) for side in low), high, cause=sizes.cause)


def _center_crop(step, sizes):
    cause = _said(step, 'crop_size', 'ratios')
    if step.get('crop_size') is None:
        yield sizes
        return
    for factor in _pair(step.get('ratios') or (0.9, 1.0, 1.1)):
        width, height = (int(side * factor) for side in step['crop_size'])
        yield _fixed(height, width, cause)


def _expand(step, sizes):
    most = max(step.get('ratio_range', (1, 4)))
    yield _Sizes(sizes.low, tuple(side * most for side in sizes.high), sizes.ratio, _said(step, 'ratio_range'))


def _iou_crop(step, sizes):
    share = step.get('min_crop_size', 0.3)
    low = tuple(max(1, int(side * share)) for side in sizes.low)
    # A crop is at most twice as long as it is wide, or it is the whole image.
    ratio = min(0.5, sizes.ratio[0]), max(2.0, sizes.ratio[1])
    yield _Sizes(low, sizes.high, ratio, _said(step, 'min_crop_size'))


_RULES: dict[str, Callable] = {
    'Resize': _resize,
    'FixScaleResize': _resize,
    'RandomResize': _resize,
    'RandomChoiceResize': _resize,
    'ResizeShortestEdge': _shortest_edge,
    'RandomCrop': _crop,
    'RandomCenterCropPad': _center_crop,
    'Pad': _pad,
    'Mosaic': _mosaic,
    'CachedMosaic': _mosaic,
    'RandomAffine': _affine,
    'Expand': _expand,
    'MinIoURandomCrop': _iou_crop,
}


def _padded(size: Batch, config: Config, usual: bool = False) -> Batch:
    """What the data preprocessor makes of a batch beyond padding to a divisor, which it does to any size."""
    preprocessor = config.model.get('data_preprocessor') or {}
    for augment in (preprocessor.get('data_preprocessor') or preprocessor).get('batch_augments') or []:
        height, width, _ = size
        if name_of(augment) == 'BatchFixedSizePad':
            h, w = _pair(augment['size'])
            size = Batch(max(height, h), max(width, w), _said(augment, 'size'))
        elif name_of(augment) == 'BatchSyncRandomResize':  # the height is drawn, the width follows
            low, high = (side // (step := augment.get('size_divisor', 32)) for side in augment['random_size_range'])
            tall = (low + high) // 2 if usual else high
            size = Batch(step * tall, step * int(width / height * tall), _said(augment, 'random_size_range'))
        elif name_of(augment) == 'BatchResize':
            factor = min(min(augment['scale']) / min(height, width), max(augment['scale']) / max(height, width))
            size = Batch(round(height * factor), round(width * factor), _said(augment, 'scale'))
    return size
