"""How long whole training steps of a detector take, variant against variant in one run."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from torch import nn

from .detector import build_training, check_case, own_crops, timed_step
from .device import is_out_of_memory
from .rivals import RIVALS, missing
from .variants import applicable, with_variant

__all__ = ['in_turn', 'measure_steps', 'summary', 'timed_variants']


class _Case(NamedTuple):
    """A variant, ready to train; ``crop`` is how masks are cropped in it."""

    model: nn.Module
    wrapper: OptimWrapper
    crop: Callable


def preset_of(variant: str) -> str:
    """A variant as :func:`.variants.with_variant` takes it: of a rival the preset that it runs on."""
    return RIVALS[variant].preset if variant in RIVALS else variant


def timed_variants(config: Config, variants: Sequence[str], device: str) -> tuple[list[str], dict[str, str]]:
    """Sorts variants as :func:`.variants.applicable` does, and refuses what has no time of its own.

    Args:
        config (Config): Config of a detector.
        variants (Sequence[str]): Variants and keys of ``rivals.RIVALS``.
        device (str): Where they run.

    Returns:
        tuple: Those whose steps can be timed, and the reason for each of the others.

    Raises:
        ValueError: For an unknown preset or piece, or a config whose optimizer does not step each time.
    """
    counts = config.optim_wrapper.get('accumulative_counts', 1)
    if counts != 1:
        raise ValueError(
            f'optim_wrapper.accumulative_counts={counts}: some steps would be timed without that of the optimizer; '
            'give --cfg-options optim_wrapper.accumulative_counts=1'
        )
    good, bad = applicable(config, [preset_of(variant) for variant in variants])
    bad = {variant: bad[preset_of(variant)] for variant in variants if preset_of(variant) in bad}
    good = [variant for variant in variants if variant not in bad]
    for variant in good:
        if variant in RIVALS and (reason := missing(variant, device)):
            bad[variant] = reason
    if torch.device(device).type == 'cpu':
        for variant in good:
            if with_variant(config, preset_of(variant)).optim_wrapper.optimizer.type == 'AdamW8bit':
                bad[variant] = 'AdamW8bit: on a CPU its bytes are counted by a stand-in that updates nothing; no times'
    return [variant for variant in good if variant not in bad], bad


def measure_steps(
    config: Config, variants: Sequence[str], *, rounds: int = 5, done: Callable[[], None] = lambda: None, **case
) -> list[dict]:
    """Times training steps on the same random batch, the variants in turn within each round.

    On CUDA with mixed precision as the config has it; on a CPU in fp32. Each variant's first step is not counted: it
    makes the optimizer's states.

    Args:
        config (Config): Config of a detector.
        variants (Sequence[str]): From :func:`timed_variants`, the baseline first.
        rounds (int): Timed rounds. Default: 5.
        done (Callable): Called after each step.
        **case: ``batch``, ``height``, ``width``, ``boxes`` and ``device``, see :func:`.detector.measure_detector`.

    Returns:
        list[dict]: See :func:`summary`; a variant that does not fit into the GPU has no row.

    Raises:
        ValueError: For a number that is too small, a device that is not there, or a baseline that does not fit.
    """
    check_case(rounds=rounds, least_rounds=1, **{key: case[key] for key in ('batch', 'boxes', 'device')})
    cases, data = _build(config, variants, case)

    def step(case, i):
        # Samples and what DropPath drops are those of the round in all variants, and so are masks; what 'skip' leaves
        # out is a draw of its own.
        torch.manual_seed(i)
        with own_crops(case.crop):
            seconds = timed_step(case.model, case.wrapper, data)
        done()
        return seconds

    fits = [_fits(step, case) for case in cases]
    if not fits[0]:
        raise ValueError(f'{variants[0]}, which all others are compared with, does not fit into the GPU; name another')
    fitting = list(itertools.compress(variants, fits))
    return summary(fitting, in_turn(list(itertools.compress(cases, fits)), step, rounds))


def _fits(step, case):
    try:
        step(case, 0)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        case.wrapper.zero_grad()
        torch.cuda.empty_cache()
        return False
    return True


def _build(config, variants, case):
    # Variants with the same optimizer share weights and optimizer states: there is one set of them in memory, and no
    # model is built and warmed up again for each round. Their learning rate is 0, which costs the optimizer the same
    # arithmetic and leaves the weights as they are: all steps of all variants begin at the same weights.
    first, cases = {}, []
    for variant in variants:
        changed = with_variant(config, preset_of(variant))
        with own_crops():
            torch.manual_seed(0)
            model, wrapper, data = build_training(changed, **case)
            crop = BitmapMasks.crop_and_resize
        owner, wrapper = first.setdefault(str(changed.optim_wrapper), (model, wrapper))
        if owner is not model:
            model.load_state_dict(owner.state_dict(keep_vars=True), assign=True)
        for group in wrapper.optimizer.param_groups:
            group['lr'] = 0.0
        if variant in RIVALS:
            model.backbone.forward = RIVALS[variant].wrap(model.backbone.forward)
        cases.append(_Case(model, wrapper, crop))
    return cases, data


def in_turn(cases: Sequence, step: Callable[[object, int], float], rounds: int) -> list[list[float]]:
    """Runs all cases in each round, so that a drift of the machine hits all.

    Args:
        cases (Sequence): What ``step`` is called with.
        step (Callable): Runs a case in a round, counted from 1, and gives its seconds.
        rounds (int): Rounds.

    Returns:
        list[list[float]]: For each round the seconds of each case.
    """
    return [[step(case, i) for case in cases] for i in range(1, rounds + 1)]


def summary(variants: Sequence[str], times: list[list[float]]) -> list[dict]:
    """Ratios to the first variant, round by round.

    Args:
        variants (Sequence[str]): Names.
        times (list[list[float]]): For each round the seconds of each variant.

    Returns:
        list[dict]: For each variant ``setting`` (its name), ``step_s`` (median), ``ratio`` (median), ``ratio_min`` and
        ``ratio_max``.
    """
    rows = []
    for variant, seconds in zip(variants, zip(*times, strict=True), strict=True):
        ratios = [own / first for own, (first, *_) in zip(seconds, times, strict=True)]
        row = dict(setting=variant, step_s=statistics.median(seconds), ratio=statistics.median(ratios))
        rows.append(dict(row, ratio_min=min(ratios), ratio_max=max(ratios)))
    return rows
