"""Gradients next to the exact ones, in numbers: over the whole network, its parts and its layers."""

import statistics

import torch
from torch import Tensor

from ..analysis.parts import part_of, place_of
from ..families import Family

__all__ = ['HEADS', 'MEASURES', 'SUMS', 'compare', 'parts_of', 'summary']

MEASURES = ('cosine', 'relative_error', 'norm_ratio')
HEADS = ('mask heads', 'box heads', 'RPN', 'neck')  # as gradients pass them, names of part_of
SUMS = ('network', 'backbone', 'mean layer', *(f'stage {i}' for i in range(1, 5)), *HEADS)  # every other is a layer


def parts_of(name: str, family: Family | None = None) -> list[str]:
    """The parts that a parameter counts for.

    Args:
        name (str): Of the parameter, in a detector.
        family (Family | None): Of the backbone; None: the first one whose names fit. Default: None.

    Returns:
        list[str]: 'network'; for the backbone also 'backbone', its stage where it has one ('stage 1' to 'stage 4', the
        layer that leads into a stage included) and its layer, without 'backbone.': 'stages.0.2.pointwise_conv1';
        outside of it the one of ``HEADS``, if any.
    """
    if not name.startswith('backbone.'):
        return ['network', *({part_of(name)} & set(HEADS))]
    name = name.removeprefix('backbone.')
    _, stage = place_of(name, family)
    stages = [f'stage {stage}'] if stage else []
    return ['network', 'backbone', *stages, name.removesuffix('.weight').removesuffix('.bias')]


def compare(
    exact: dict[str, Tensor], estimate: dict[str, Tensor], family: Family | None = None
) -> dict[str, dict[str, float | None]]:
    """Compares gradients, over the network, the backbone, each stage and layer of it, neck and heads.

    Args:
        exact (dict[str, Tensor]): Gradients e.
        estimate (dict[str, Tensor]): Gradients s; parameters that it lacks have gradient 0.
        family (Family | None): Of the backbone, see :func:`parts_of`. Default: None.

    Returns:
        dict: Part to ``cosine`` <e, s> / (|e| |s|), ``relative_error`` |s - e| / |e| and ``norm_ratio`` |s| / |e|.
        Parts are those of :func:`parts_of`, and 'mean layer': the mean over the backbone's layers, where each counts
        the same whatever the size of its gradient. A number that would need a division by 0 is None.

    Raises:
        ValueError: If ``estimate`` has parameters that ``exact`` lacks.
    """
    if unknown := sorted(set(estimate) - set(exact)):
        raise ValueError(f'no exact gradient for {unknown[:3]}')
    sums = {}
    for name, e in exact.items():
        s = estimate.get(name)
        numbers = _sums(e, torch.zeros_like(e) if s is None else s)
        for part in parts_of(name, family):
            sums[part] = sums.get(part, 0) + numbers
    found = {part: _measures(*numbers.tolist()) for part, numbers in sums.items()}
    layers = [numbers for part, numbers in found.items() if part not in SUMS]
    if layers:
        found['mean layer'] = {m: _mean([numbers[m] for numbers in layers]) for m in MEASURES}
    return found


def _sums(e, s):
    """<e, s>, <e, e>, <s, s>, <s - e, s - e>."""
    same = s is e  # neck and heads: most of the parameters of a small detector
    e = e.double().flatten()
    square = e @ e
    if same:
        return torch.stack([square, square, square, torch.zeros_like(square)])
    s = s.double().flatten()
    difference = s - e
    return torch.stack([e @ s, square, s @ s, difference @ difference])


def _mean(values):
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _measures(product, exact, estimated, difference):
    norms = (exact * estimated) ** 0.5
    return dict(
        cosine=max(-1.0, min(1.0, product / norms)) if norms else None,
        relative_error=(difference / exact) ** 0.5 if exact else None,
        norm_ratio=(estimated / exact) ** 0.5 if exact else None,
    )


def summary(results: list[dict]) -> dict[str, dict[str, dict]]:
    """Mean and spread over batches.

    Args:
        results (list[dict]): Of :func:`compare`, one for each batch.

    Returns:
        dict: Part to measure to ``mean``, ``std`` (of a sample) and ``values``, one for each batch. Numbers that are
        None are left out of mean and spread; a mean of nothing, and the spread of less than two, are None.
    """
    parts = {part: None for result in results for part in result}
    return {part: {m: _spread([r[part][m] for r in results if part in r]) for m in MEASURES} for part in parts}


def _spread(values):
    known = [v for v in values if v is not None]
    std = statistics.stdev(known) if len(known) > 1 else None
    return dict(mean=_mean(values), std=std, values=values)
