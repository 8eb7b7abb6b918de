"""How long whole training steps of a detector take, setting against setting in one run."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from torch import nn

from .detector import build_training, check_case, own_crops, timed_step
from .variants import applicable, with_setting

__all__ = ['in_turn', 'measure_steps', 'summary', 'timed_settings']


class _Case(NamedTuple):
    """A setting, ready to train; ``crop`` is how masks are cropped in it."""

    model: nn.Module
    wrapper: OptimWrapper
    crop: Callable


def timed_settings(config: Config, settings: Sequence[str], device: str) -> tuple[list[str], dict[str, str]]:
    """Sorts settings as :func:`.variants.applicable` does, and refuses what has no time of its own.

    Args:
        config (Config): Config of a detector.
        settings (Sequence[str]): Settings.
        device (str): Where they run.

    Returns:
        tuple: Those whose steps can be timed, and the reason for each of the others.

    Raises:
        ValueError: For an unknown mode or piece, or a config whose optimizer does not step each time.
    """
    counts = config.optim_wrapper.get('accumulative_counts', 1)
    if counts != 1:
        raise ValueError(
            f'optim_wrapper.accumulative_counts={counts}: some steps would be timed without that of the optimizer; '
            'give --cfg-options optim_wrapper.accumulative_counts=1'
        )
    good, bad = applicable(config, settings)
    if torch.device(device).type == 'cpu':
        for setting in good:
            if with_setting(config, setting).optim_wrapper.optimizer.type == 'AdamW8bit':
                bad[setting] = 'AdamW8bit: on a CPU its bytes are counted by a stand-in that updates nothing; no times'
    return [setting for setting in good if setting not in bad], bad


def measure_steps(
    config: Config, settings: Sequence[str], *, rounds: int = 5, done: Callable[[], None] = lambda: None, **case
) -> list[dict]:
    """Times training steps on the same random batch, the settings in turn within each round.

    On CUDA with mixed precision as the config has it; on a CPU in fp32.

    Args:
        config (Config): Config of a detector.
        settings (Sequence[str]): From :func:`timed_settings`, the baseline first.
        rounds (int): Timed rounds, after one that is not counted. Default: 5.
        done (Callable): Called after each step.
        **case: ``batch``, ``height``, ``width``, ``boxes`` and ``device``, see :func:`.detector.measure_detector`.

    Returns:
        list[dict]: See :func:`summary`.

    Raises:
        ValueError: For a number that is too small, or a device that is not there.
    """
    check_case(rounds=rounds, least_rounds=1, **{key: case[key] for key in ('batch', 'boxes', 'device')})
    cases, data = _build(config, settings, case)

    def step(case, i):
        torch.manual_seed(i)  # masks, samples and dropped paths are those of the round, whatever the setting
        with own_crops(case.crop):
            return timed_step(case.model, case.wrapper, data)

    return summary(settings, in_turn(cases, step, rounds, done))


def _build(config, settings, case):
    # Settings with the same optimizer share weights and optimizer states: there is one set of them in memory, and no
    # model is built and warmed up again for each round. Their learning rate is 0, which costs the optimizer the same
    # arithmetic and leaves the weights as they are: all steps of all settings begin at the same weights.
    first, cases = {}, []
    for setting in settings:
        changed = with_setting(config, setting)
        with own_crops():
            torch.manual_seed(0)
            model, wrapper, data = build_training(changed, **case)
            crop = BitmapMasks.crop_and_resize
        owner, wrapper = first.setdefault(str(changed.optim_wrapper), (model, wrapper))
        if owner is not model:
            model.load_state_dict(owner.state_dict(keep_vars=True), assign=True)
        for group in wrapper.optimizer.param_groups:
            group['lr'] = 0.0
        cases.append(_Case(model, wrapper, crop))
    return cases, data


def in_turn(
    cases: Sequence, step: Callable[[object, int], float], rounds: int, done: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """Runs all cases in each round, so that a drift of the machine hits all.

    Args:
        cases (Sequence): What ``step`` is called with.
        step (Callable): Runs a case in a round, counted from 0, and gives its seconds.
        rounds (int): Rounds, after one that is not counted: the first step of a model makes optimizer states.
        done (Callable): Called after each step.

    Returns:
        list[list[float]]: For each round the seconds of each case.
    """
    times = []
    for i in range(rounds + 1):
        times.append([])
        for case in cases:
            times[-1].append(step(case, i))
            done()
    return times[1:]


def summary(settings: Sequence[str], times: list[list[float]]) -> list[dict]:
    """Ratios to the first setting, round by round.

    Args:
        settings (Sequence[str]): Names.
        times (list[list[float]]): For each round the seconds of each setting.

    Returns:
        list[dict]: For each setting ``setting``, ``step_s`` (median), ``ratio`` (median), ``ratio_min`` and
        ``ratio_max``.
    """
    rows = []
    for setting, seconds in zip(settings, zip(*times, strict=True), strict=True):
        ratios = [own / first for own, (first, *_) in zip(seconds, times, strict=True)]
        row = dict(setting=setting, step_s=statistics.median(seconds), ratio=statistics.median(ratios))
        rows.append(dict(row, ratio_min=min(ratios), ratio_max=max(ratios)))
    return rows
