"""Counts of a config's variants: the rows of the planner's table, with the progress on stderr."""

import sys

from mmengine.config import Config

from ..presets import PRESETS
from .detector import build_detector, measure_detector
from .planner import OWN, Row, most_counts, plan
from .variants import find_presets, make_plain, own_gradients, with_variant, without_dropped_images

__all__ = ['count_step', 'count_variants', 'end_progress', 'list_presets']


def count_variants(config: Config, budget: int, batch_shape: dict, **options) -> list[Row]:
    """Return the planner's table of a config.

    Args:
        config (Config): Config of a detector.
        budget (int): Memory of the GPU, in bytes.
        batch_shape (dict): ``batch``, ``height``, ``width`` and ``boxes`` of the largest batch, and ``usual`` if it is
            known, see :func:`.detector.measure_detector`.
        **options: Further arguments of :func:`.planner.plan`.

    Returns:
        list[Row]: A row for each variant that was counted, see :func:`.planner.plan`.
    """
    base = make_plain(config)
    presets, looked = list_presets(base), []

    def measure(variant):
        looked.append(variant)
        bar = '#' * len(looked) + '.' * (most_counts(presets) - len(looked))
        return count_step(config if variant == OWN else base, variant, batch_shape, f'[{bar}] {variant}')

    return plan(base, budget, measure, presets, own=own_gradients(config), **options)


def list_presets(base: Config) -> list[str]:
    """Return the names of the presets that apply to the model of a plain config."""
    reasons = find_presets(build_detector(base, 'cpu')[0])
    return [name for name, reason in reasons.items() if reason is None]


def count_step(base: Config, variant: str, batch_shape: dict, progress: str) -> dict:
    """Count a training step of a variant.

    Args:
        base (Config): A plain config, see :func:`.variants.plain`; for the variant 'as it is' any config.
        variant (str): The variant.
        batch_shape (dict): Arguments of :func:`.detector.measure_detector`.
        progress (str): Line for stderr.

    Returns:
        dict: Result of :func:`.detector.measure_detector`.
    """
    if sys.stderr.isatty():
        print(f'\r{progress:<80}', end='', file=sys.stderr, flush=True)
    else:
        name = progress.split('] ')[-1]
        print(f'counts {"plain training" if name == "none" else name}', file=sys.stderr, flush=True)
    # Stochastic depth drops images at random; the count is of a step that drops none.
    if variant == OWN:
        return measure_detector(without_dropped_images(base), **batch_shape)
    worst = dict(skip_dropped_images=False) if PRESETS[variant.split('+')[0]].form else {}
    return measure_detector(with_variant(base, variant, **worst), **batch_shape)


def end_progress() -> None:
    """Clear the line of the progress on a terminal."""
    if sys.stderr.isatty():
        print('\r' + ' ' * 82 + '\r', end='', file=sys.stderr, flush=True)
