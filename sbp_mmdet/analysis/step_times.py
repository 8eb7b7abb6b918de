"""How long whole training steps of a detector take, variant against variant in one run; and what they cost else."""

import contextlib
import copy
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from .cuda_rules import full_fp32
from .detector import build_training, check_case, own_crops, timed_step
from .device import if_it_fits, noting
from .memory import held_bytes
from .rivals import RIVALS, draws_of_plain_code, first_line, missing, relative_error
from .variants import applicable, with_variant

__all__ = ['in_turn', 'measure_steps', 'summary', 'timed_variants']


@dataclasses.dataclass
class _Case:
    """A variant, ready to train; ``crop`` is how masks are cropped in it."""

    row: dict
    model: nn.Module
    wrapper: OptimWrapper
    crop: Callable

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


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
    if torch.device(device).type == 'cpu':
        for variant in good:
            if with_variant(config, preset_of(variant)).optim_wrapper.optimizer.type == 'AdamW8bit':
                bad[variant] = 'AdamW8bit: on a CPU its bytes are counted by a stand-in that updates nothing; no times'
    return [variant for variant in good if variant not in bad], bad


def measure_steps(
    config: Config,
    variants: Sequence[str],
    *,
    rounds: int = 5,
    costs: bool = False,
    done: Callable[[], None] = lambda: None,
    **case,
) -> list[dict]:
    """Times training steps on the same random batch, the variants in turn within each round.

    On CUDA with mixed precision as the config has it; on a CPU in fp32. Each variant's first step is not counted: it
    makes the optimizer's states, and compiles what is compiled. Compiled code draws as plain code does.

    Args:
        config (Config): Config of a detector.
        variants (Sequence[str]): From :func:`timed_variants`, the baseline first.
        rounds (int): Timed rounds. Default: 5.
        costs (bool): Also what is held, and how far gradients are from the baseline's: ``held_bytes``, ``peak_bytes``
            and ``drawn_error``, see :func:`_add_costs`. Default: False.
        done (Callable): Called after each step.
        **case: ``batch``, ``height``, ``width``, ``boxes`` and ``device``, see :func:`.detector.measure_detector`.

    Returns:
        list[dict]: For each variant what :func:`summary` says; where it cannot run ``variant`` and ``reason``. What
        :func:`.device.noting` notes, if there is anything; of compiled rivals ``graphs`` and ``compile_s`` (the first
        step without the time of the others).

    Raises:
        ValueError: For a number that is too small, a device that is not there, or a baseline that does not run.
    """
    check_case(rounds=rounds, least_rounds=1, **{key: case[key] for key in ('batch', 'boxes', 'device')})
    rows = [_row(variant, case['device']) for variant in variants]
    cases, data = _build(config, _running(rows), case)
    with draws_of_plain_code([case.row['variant'] for case in cases]):
        _time(cases, data, rounds, done)
        if costs:
            _add_costs(cases, data)
    return rows


def _time(cases, data, rounds, done):
    """Fills the rows; takes the cases that do not run out of the list."""

    def step(case, i):
        # Samples and what DropPath drops are those of the round in all variants, and so are masks; what 'skip' leaves
        # out is a draw of its own.
        torch.manual_seed(i)
        with own_crops(case.crop):
            seconds = timed_step(case.model, case.wrapper, data)
        done()
        return seconds

    def noted_step(case, i):
        with noting(case.row, case.wrapper, case.device):
            return step(case, i)

    baseline, firsts = cases[0].row, [_first_step(case, step) for case in cases]
    if 'reason' in baseline:
        raise ValueError(
            f'{baseline["variant"]}, which all others are compared with, {baseline["reason"]}; name another one first'
        )
    cases[:] = [case for case in cases if 'reason' not in case.row]
    found = summary([case.row['variant'] for case in cases], in_turn(cases, noted_step, rounds))
    for case, row, first in zip(cases, found, filter(None, firsts), strict=True):
        case.row.update(row)
        if graphs := getattr(case.model.backbone.forward, 'graphs', None):
            case.row.update(graphs=len(graphs), compile_s=max(first - row['step_s'], 0.0))


def _row(variant, device):
    """The row of a variant, with the reason if it cannot run here."""
    rival, reason = RIVALS.get(variant), None
    if rival:
        reason = missing(variant, device)
        if not reason and rival.on_host and torch.device(device).type == 'cpu':
            reason = 'on a CPU nothing moves to the host'
    return dict(variant=variant, **(dict(reason=reason) if reason else {}))


def _running(rows):
    return [row for row in rows if 'reason' not in row]


def _first_step(case, step):
    """Its seconds; None, and the reason in the row, if it does not run."""
    return _tried(case, lambda: dict(seconds=step(case, 0))).get('seconds')


def _tried(case, measure):
    """What was measured; nothing, and the reason in the row, if a rival fails or memory does not suffice."""
    try:
        found = if_it_fits(measure)
        if found.pop('fits'):
            return found
        case.row['reason'] = 'does not fit into the GPU'
    except Exception as error:
        if case.row['variant'] not in RIVALS:
            raise
        case.row['reason'] = first_line(error)  # whatever a compiler may raise
    case.wrapper.zero_grad()
    return {}


def _add_costs(cases, data):
    """What the allocator says that is held when the forward pass ends (``held_bytes``), and at most until the backward
    pass ends (``peak_bytes``, the gradients included), on top of weights and optimizer states; and in fp32 the error of
    the backbone's gradients, relative to the first case's (``drawn_error``). Stochastic depth is on, with the same
    random numbers for all; a case that draws images by itself has no error."""
    exact = []

    def costs(case):
        with own_crops(case.crop):
            held, peak = held_bytes(lambda: _loss(case, data, case.wrapper.optim_context(case.model)), case.device)
            case.wrapper.zero_grad()
            torch.manual_seed(0)
            with full_fp32():  # the backward pass too
                _loss(case, data, contextlib.nullcontext()).backward()
        found = {n: p.grad.clone() for n, p in case.model.backbone.named_parameters() if p.grad is not None}
        case.wrapper.zero_grad()
        exact[:] = exact or [found]
        error = None if 'skip' in case.row['variant'].split('+') else relative_error([found], exact)
        return dict(held_bytes=held, peak_bytes=peak, drawn_error=error)

    for i, case in enumerate(cases):
        if i == 0 or exact:  # without the first there is nothing to compare with
            case.row.update(_tried(case, lambda: costs(case)))  # noqa: B023


def _loss(case, data, context) -> Tensor:
    with context:
        batch = case.model.data_preprocessor(copy.deepcopy(data), True)
        return case.model.parse_losses(case.model(**batch, mode='loss'))[0]


def _build(config, rows, case):
    # Variants with the same optimizer share weights and optimizer states: there is one set of them in memory, and no
    # model is built and warmed up again for each round. Their learning rate is 0, which costs the optimizer the same
    # arithmetic and leaves the weights as they are: all steps of all variants begin at the same weights.
    first, cases = {}, []
    for row in rows:
        variant = row['variant']
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
        cases.append(_Case(row, model, wrapper, crop))
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
        list[dict]: For each variant ``variant`` (its name), ``step_s`` (median), ``ratio`` (median), ``ratio_min`` and
        ``ratio_max``.
    """
    rows = []
    for variant, seconds in zip(variants, zip(*times, strict=True), strict=True):
        ratios = [own / first for own, (first, *_) in zip(seconds, times, strict=True)]
        row = dict(variant=variant, step_s=statistics.median(seconds), ratio=statistics.median(ratios))
        rows.append(dict(row, ratio_min=min(ratios), ratio_max=max(ratios)))
    return rows
