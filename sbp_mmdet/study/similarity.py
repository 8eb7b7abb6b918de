"""How alike two checkpoints are: their weights, and what they find (paper, appendix, section "Model Similarity").

The paper trains a classifier with and without SBP from one start, takes the cosine of the weights, and the share of
validation images with the same prediction. A detector finds any number of objects in an image, so the second becomes
:func:`agreement`: the share of one model's objects that the other found as well.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from mmdet.structures.bbox import bbox_overlaps
from mmengine.structures import InstanceData
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..analysis.parts import part_of
from ..analysis.report import ORDER
from ..reporting import aligned, panels, save_picture

__all__ = ['agreement', 'annotations', 'cosines', 'detections', 'match', 'picture', 'relabel', 'table', 'updates']


def cosines(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict:
    """Cosine similarity of two sets of tensors, by layer, by part of the detector, and of all together.

    A layer is a weight with its bias; what belongs to neither, such as a layer scale, counts as a layer. Parts and the
    whole are long vectors made of their layers, so that large layers weigh more. Sums are made in float64.

    Args:
        a (dict[str, Tensor]): Tensor by parameter name.
        b (dict[str, Tensor]): The same. Names that only one of the two has, or with other shapes, are left out.

    Returns:
        dict: ``'whole'``, ``'parts'`` (by name of the part) and ``'layers'`` (by name of the layer). Each is a dict of
        ``cosine``, ``norm_ratio`` (norm in ``b`` / norm in ``a``) and ``weights`` (how many). A value is None where a
        norm of zero leaves it undefined.

    Raises:
        ValueError: If nothing can be compared.
    """
    layers, parts, whole = {}, {}, torch.zeros(4, dtype=torch.float64)
    for name, x in a.items():
        y = b.get(name)
        if y is None or y.shape != x.shape:
            continue
        x, y = x.detach().cpu().double().flatten(), y.detach().cpu().double().flatten()
        sums = torch.stack([x @ y, x @ x, y @ y, torch.tensor(float(x.numel()))])
        layer = re.sub(r'\.(weight|bias)$', '', name)
        for table, key in ((layers, layer), (parts, part_of(name))):
            table[key] = table.get(key, 0) + sums
        whole += sums
    if not layers:
        raise ValueError(
            'the two checkpoints have no weight of the same name and shape: these are different architectures'
        )
    known = [part for part in ORDER if part in parts]
    parts = {part: parts[part] for part in [*known, *(part for part in parts if part not in known)]}
    return dict(
        whole=_ratios(whole),
        parts={part: _ratios(sums) for part, sums in parts.items()},
        layers={layer: _ratios(sums) for layer, sums in layers.items()},
    )


def _ratios(sums):
    dot, a, b, count = sums.tolist()
    return dict(
        cosine=dot / (a * b) ** 0.5 if a and b else None, norm_ratio=(b / a) ** 0.5 if a else None, weights=int(count)
    )


def updates(weights: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, Tensor]:
    """What training added: two models from one start resemble each other by that start alone, their updates do not.

    Args:
        weights (dict[str, Tensor]): After training.
        start (dict[str, Tensor]): Before; may hold more, or less, as a pretrained backbone does.

    Returns:
        dict[str, Tensor]: Difference by name, float64, for the names and shapes that both have.
    """
    return {
        name: value.detach().cpu().double() - start[name].cpu().double()
        for name, value in weights.items()
        if name in start and start[name].shape == value.shape
    }


@torch.no_grad()
def detections(model: torch.nn.Module, loader: Iterable, threshold: float, tell: Callable | None = None) -> dict:
    """What a detector finds in the images of a data loader.

    Args:
        model (nn.Module): Detector, in eval mode.
        loader (Iterable): Batches as mmengine's data loader gives them.
        threshold (float): Lowest score.
        tell (Callable | None): Called with the number of images after each batch. Default: None.

    Returns:
        dict: ``img_id`` to InstanceData on the CPU with ``bboxes`` (x1, y1, x2, y2 in the pixels of the image as it is
        on the disk, (N, 4)), ``labels`` (N,) and ``scores`` (N,).
    """
    found = {}
    for batch in loader:
        samples = model.test_step(batch)
        for sample in samples:
            objects = sample.pred_instances[sample.pred_instances.scores >= threshold]
            # Without the masks: on COCO they would take more memory than there is.
            found[sample.img_id] = InstanceData(
                bboxes=objects.bboxes.cpu(), labels=objects.labels.cpu(), scores=objects.scores.cpu()
            )
        if tell:
            tell(len(samples))
    return found


def annotations(dataset: torch.utils.data.Dataset) -> dict | None:
    """The annotated objects of a data set, in the form of :func:`detections`, scores NaN.

    Args:
        dataset (Dataset): Of mmdet.

    Returns:
        dict | None: None if the data set has no annotations. Crowds are left out.
    """
    found = {}
    for i in range(len(dataset)):
        info = dataset.get_data_info(i)
        objects = [x for x in info.get('instances') or [] if not x.get('ignore_flag')]
        found[info['img_id']] = InstanceData(
            bboxes=torch.tensor([x['bbox'] for x in objects], dtype=torch.float32).reshape(-1, 4),
            labels=torch.tensor([x['bbox_label'] for x in objects], dtype=torch.long),
            scores=torch.full((len(objects),), torch.nan),
        )
    return found if any(map(len, found.values())) else None


def relabel(found: dict, classes: Iterable[str], common: list[str]) -> dict:
    """Counts labels in another list of classes; objects of other classes are left out.

    Args:
        found (dict): As :func:`detections` returns it.
        classes (Iterable[str]): What its labels mean.
        common (list[str]): What they are to mean.

    Returns:
        dict: New detections.
    """
    new = torch.tensor([common.index(name) if name in common else -1 for name in classes])
    result = {}
    for image, objects in found.items():
        labels = new[objects.labels]
        result[image] = objects[labels >= 0]
        result[image].labels = labels[labels >= 0]
    return result


def match(a: InstanceData, b: InstanceData, iou: float = 0.5) -> tuple[Tensor, Tensor]:
    """Pairs objects of one image one to one: of equal label and a large IoU; as many pairs as there can be, and
    among those the pairs with the largest sum of IoUs. So the roles of ``a`` and ``b`` can be swapped.

    Args:
        a (InstanceData): ``bboxes`` (N, 4) and ``labels`` (N,).
        b (InstanceData): The same, (M, 4) and (M,).
        iou (float): Smallest IoU. Default: 0.5.

    Returns:
        tuple[Tensor, Tensor]: Indices into ``a`` and into ``b``, int64, both (K,).
    """
    overlaps = bbox_overlaps(a.bboxes, b.bboxes).double()
    allowed = (overlaps >= iou) & (a.labels[:, None] == b.labels)
    # One pair more is worth more than any overlaps: the sum of the IoUs is at most the number of pairs.
    value = torch.where(allowed, min(allowed.shape) + 1 + overlaps, 0.0)
    rows, columns = (torch.as_tensor(index, dtype=torch.long) for index in linear_sum_assignment(-value.numpy()))
    real = allowed[rows, columns]
    return rows[real], columns[real]


def agreement(a: dict, b: dict, classes: list[str], iou: float = 0.5) -> dict:
    """How far two detectors find the same objects.

    Objects are paired image by image as :func:`match` does it. The paper's figure for classifiers, the share of images
    with the same prediction, is strictest here: ``same_images`` is the share of images in which every object of either
    model has a partner.

    Args:
        a (dict): As :func:`detections` returns it, labels counted in ``classes``.
        b (dict): The same, of the same images.
        classes (list[str]): Names of the labels.
        iou (float): Smallest IoU of a pair. Default: 0.5.

    Returns:
        dict: ``images``, ``same_images``, ``all`` and ``by_class`` (by name, where either model found any). The last
        two give ``a`` and ``b`` (numbers of objects), ``matched`` (pairs), ``a_in_b`` (share of ``a``'s objects that
        are matched), ``b_in_a``, ``agreement`` (mean of the two shares), ``score_difference`` (mean of the matched
        pairs' absolute differences) and ``score_shift`` (mean of ``b``'s minus ``a``'s). None: not defined.

    Raises:
        ValueError: If the images are not the same.
    """
    if a.keys() != b.keys():
        raise ValueError(f'the two models saw other images: {len(a.keys() ^ b.keys())} were seen by one of them only')
    counts = torch.zeros(len(classes), 3, dtype=torch.long)
    shifts, labels, same = [], [], 0
    for image, objects in a.items():
        others = b[image]
        rows, columns = match(objects, others, iou)
        same += len(rows) == len(objects) == len(others)
        shifts.append((others.scores[columns] - objects.scores[rows]).double())
        labels.append(objects.labels[rows])
        for i, found in enumerate((objects.labels, others.labels, labels[-1])):
            counts[:, i] += found.bincount(minlength=len(classes))
    shifts, labels = torch.cat(shifts), torch.cat(labels)
    by_class = {name: _shares(counts[i], shifts[labels == i]) for i, name in enumerate(classes) if counts[i, :2].any()}
    return dict(images=len(a), same_images=same / len(a), all=_shares(counts.sum(0), shifts), by_class=by_class)


def _shares(counts, shifts):
    a, b, matched = counts.tolist()
    shares = matched / a if a else None, matched / b if b else None
    scored = matched and not shifts.isnan().any()  # annotations have no scores
    return dict(
        a=a,
        b=b,
        matched=matched,
        a_in_b=shares[0],
        b_in_a=shares[1],
        agreement=None if None in shares else sum(shares) / 2,
        score_difference=shifts.abs().mean().item() if scored else None,
        score_shift=shifts.mean().item() if scored else None,
    )


def table(results: dict) -> str:
    """Text for a terminal.

    Args:
        results (dict): As ``compare_models.py --json`` writes them.

    Returns:
        str: Lines.
    """
    pairs, blocks = results['pairs'], []
    for kind in _kinds(pairs, ('weights', 'updates')):
        names = ['all', *_names(pairs, kind)]
        rows = [[pair['name'], *(_cell(_values(pair, kind).get(name)) for name in names)] for pair in pairs]
        blocks.append([[f'cosine of {kind}', *names], *rows])
    if _kinds(pairs, ('detections',)):
        rows = [['detections: A - B', 'A', 'B', 'A in B', 'B in A', 'agreement', 'same images', 'score difference']]
        for name, found in [(pair['name'], pair['detections']) for pair in pairs] + [*results['annotations'].items()]:
            one = found['all']
            shares = one['a_in_b'], one['b_in_a'], one['agreement'], found['same_images'], one['score_difference']
            rows.append([name, str(one['a']), str(one['b']), *map(_cell, shares)])
        blocks.append(rows)
    return '\n\n'.join(map(aligned, blocks))


def _kinds(pairs, kinds=('weights', 'updates', 'detections')):
    """What was compared for any pair."""
    return [kind for kind in kinds if any(pair[kind] for pair in pairs)]


def _values(pair, kind):
    """'all', then parts or classes, and the cosine or the agreement."""
    found = pair[kind]
    if not found:
        return {}
    if kind == 'detections':
        rows = {'all': found['all'], **found['by_class']}
        return {name: row['agreement'] for name, row in rows.items()}
    return {name: row['cosine'] for name, row in {'all': found['whole'], **found['parts']}.items()}


def _names(pairs, kind):
    return list(dict.fromkeys(name for pair in pairs for name in _values(pair, kind) if name != 'all'))


def _cell(value):
    return '' if value is None else f'{value:.3f}'


def picture(results: dict, path: Path, most: int = 12) -> None:
    """Draws cosines by part, with a dot for each layer, and the agreement by class; a colour for each pair of models.

    Args:
        results (dict): As ``compare_models.py --json`` writes them.
        path (Path): A PNG file.
        most (int): Classes that are drawn at most, those that were found most often. Default: 12.
    """
    import matplotlib

    pairs = results['pairs']
    kinds = _kinds(pairs)
    figure, grid = panels(len(kinds), figsize=(9, 2.5 * len(kinds) + 0.4 * len(pairs)))
    colours, width = matplotlib.colormaps['tab10'].colors, 0.8 / len(pairs)
    for axes, kind in zip(grid[:, 0], kinds, strict=True):
        names = _names(pairs, kind)
        if kind == 'detections':
            names.sort(key=lambda name: -sum(pair[kind]['by_class'].get(name, {}).get('a', 0) for pair in pairs))
            names = names[:most]
        names = ['all', *names]
        for i, pair in enumerate(pairs):
            values = _values(pair, kind)
            places = {name: place + (i - (len(pairs) - 1) / 2) * width for place, name in enumerate(names)}
            heights = [values.get(name) or 0 for name in names]
            axes.bar(places.values(), heights, 0.92 * width, color=colours[i % 10], label=pair['name'])
            for layer, row in (pair[kind] or {}).get('layers', {}).items():
                if row['cosine'] is not None:
                    axes.plot(places[part_of(layer)], row['cosine'], '.', color='black', ms=4, alpha=0.5, mew=0)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel('agreement' if kind == 'detections' else f'cosine of {kind}', fontsize=9)
        axes.axhline(0, color='black', lw=0.6)
        axes.set_ylim(top=1.03)
    save_picture(figure, path, legend=grid[0, 0].get_legend_handles_labels()[0], columns=1, dpi=110)
