"""Do gradients vanish under SBP? Their norms over a training (paper, appendix, section "Vanishing Gradients?").

The paper finds no vanishing where all layers drop the same positions, and predicts it where two successive layers keep
disjoint positions. :data:`DISJOINT` forces two such cases, which no ``sbp_cfg`` can make. The record of a family says
which of them work for its backbone.
"""

import copy
import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mmengine.config import Config
from torch import nn

from ..analysis.cuda_rules import full_fp32
from ..analysis.detector import build_detector
from ..families import family_of
from ..functional import sbp
from ..masks import Positions
from .gradients import backbone_with
from .kept import in_order
from .measures import parts_of
from .subject import build_model, exact_config

__all__ = ['DISJOINT', 'disjoint_blocks', 'disjoint_pointwise', 'norms_over_training']


def disjoint_blocks(backbone: nn.Module) -> None:
    """Every second SBP layer keeps the positions that the others drop.

    Args:
        backbone (nn.Module): With SBP, changed in place.

    Raises:
        ValueError: If its family has no such case, or dropped positions send gradients.
    """
    _check_family(backbone, 'disjoint blocks')
    if backbone.sbp.dropped != 'zero':
        raise ValueError(
            f'sbp_cfg: dropped={backbone.sbp.dropped!r}: disjoint masks are about positions that send nothing'
        )
    draw = backbone.draw

    def alternating(x):
        drawn = draw(x)
        positions = dict(drawn.positions)
        for key in in_order(positions)[1::2]:
            positions[key] = Positions(keep=positions[key].drop, drop=positions[key].keep)
        return drawn._replace(positions=positions)

    backbone.draw = alternating


def disjoint_pointwise(backbone: nn.Module) -> None:
    """Inside of each SBP block, norm and first pointwise layer keep the positions that the second one drops.

    This is the paper's extreme case: between these two layers there is no residual connection around them.

    Args:
        backbone (nn.Module): With SBP, changed in place.

    Raises:
        ValueError: If its family has no such case.
    """
    _check_family(backbone, 'disjoint pointwise layers')
    for stage in backbone.stages:
        for block in stage:
            block.mlp = functools.partial(_split_mlp, block, block.mlp)


def _check_family(backbone, case):
    """Elsewhere the change would go unnoticed: a curve of plain SBP under the name of an extreme case."""
    family = family_of(backbone)
    if family is None or case not in family.extremes:
        name, known = (family.name, [*family.extremes]) if family else (type(backbone).__name__, [])
        raise ValueError(f'{name} has no extreme case {case!r}; it has {known}; leave these cases out (--no-disjoint)')


def _split_mlp(block, whole, x, shortcut, keep=None, factor=None, conv=None):
    if keep is None:
        return whole(x, shortcut, keep, factor, conv)

    def first(t):
        return F.linear(block.norm.tokens(t), block.pointwise_conv1.weight.flatten(1), block.pointwise_conv1.bias)

    def second(t):
        t = F.linear(block.activate(t), block.pointwise_conv2.weight.flatten(1), block.pointwise_conv2.bias)
        return t if block.gamma is None else t * block.gamma

    hidden = sbp(first, x.flatten(2).transpose(1, 2), Positions(keep=keep.drop, drop=keep.keep))
    branch = sbp(second, hidden, keep).transpose(1, 2).view_as(shortcut)
    return shortcut + (branch if factor is None else branch * factor[:, None, None, None])


DISJOINT = types.MappingProxyType({'disjoint blocks': disjoint_blocks, 'disjoint pointwise layers': disjoint_pointwise})


@full_fp32()
def norms_over_training(
    config: Config,
    variants: dict[str, tuple[dict | None, Callable | None]],
    batches: list[dict],
    steps: int,
    seed: int = 0,
    on_progress: Callable[[], None] | None = None,
    *,
    checkpoint: str | None = None,
    backbone: str | None = None,
    device: str = 'cpu',
    lr: float | None = None,
    warmup: int = 0,
) -> dict[str, dict]:
    """Trains the same detector under each variant, on the same batches in the same order, in fp32.

    Args:
        config (Config): Config of a detector whose backbone SBP applies to; its optimizer and gradient clipping are
            used, its learning rate schedule is not.
        variants (dict): Label to ``sbp_cfg`` and a function that changes the backbone, such as one of ``DISJOINT``.
        batches (list[dict]): ``inputs`` and ``data_samples`` of each, gone through again and again.
        steps (int): Training steps.
        seed (int): Of the start, and of what is drawn: step i uses seed + i. Default: 0.
        on_progress (Callable | None): Called after each step. Default: None.
        checkpoint (str | None): To start from; None: the config's own start. Default: None.
        backbone (str | None): Weights of the backbone alone to start from. Default: None.
        device (str): Where it runs. Default: 'cpu'.
        lr (float | None): Learning rate; None: the config's. Default: None.
        warmup (int): Steps over which the learning rate grows linearly. Default: 0.

    Returns:
        dict: Label to ``loss``, a number for each step, and ``norms``: part (see :func:`.measures.parts_of`) to the L2
        norm of its gradient before clipping, for each step.

    Raises:
        ValueError: For a setting that cannot be applied, before anything is run.
    """
    for label, variant in variants.items():
        try:
            _check(config, *variant)
        except ValueError as error:
            raise ValueError(f'setting {label!r}: {error}') from error
    start = build_model(config, checkpoint, device, seed, backbone).state_dict()
    report = on_progress or (lambda: None)
    results = {}
    for label, (sbp_cfg, change) in variants.items():
        model, wrapper = build_detector(_with(config, sbp_cfg, lr), device)
        model.load_state_dict(start)
        if change:
            change(model.backbone)
        groups = wrapper.optimizer.param_groups
        rates = [group['lr'] for group in groups]
        rows = []
        for step in range(steps):
            for group, rate in zip(groups, rates, strict=True):
                group['lr'] = rate * min(1, (step + 1) / max(warmup, 1))
            torch.manual_seed(seed + step)
            data = model.data_preprocessor(copy.deepcopy(batches[step % len(batches)]), True)
            loss, _ = model.parse_losses(model(**data, mode='loss'))
            wrapper.backward(loss)
            rows.append((loss.item(), _norms(model)))
            wrapper.step()
            wrapper.zero_grad()
            report()
        parts = rows[0][1]
        results[label] = dict(
            loss=[loss for loss, _ in rows], norms={part: [norms[part] for _, norms in rows] for part in parts}
        )
    return results


def _check(config, sbp_cfg, change):
    """Raises a ValueError where a backbone without weights cannot be built, or not be changed."""
    backbone = backbone_with(config, sbp_cfg)
    if change:
        change(backbone)


def _with(config, sbp_cfg, lr):
    config = exact_config(config)
    config.model.backbone.sbp_cfg = copy.deepcopy(sbp_cfg)
    # Without mixed precision: its scaled gradients are not those of the loss.
    config.optim_wrapper.type = 'OptimWrapper'
    for key in ('dtype', 'loss_scale', 'use_fsdp'):
        config.optim_wrapper.pop(key, None)
    if lr is not None:
        config.optim_wrapper.optimizer.lr = lr
    return config


def _norms(model):
    squares, family = {}, family_of(model.backbone)
    for name, p in model.named_parameters():
        if p.requires_grad:
            square = p.grad.detach().double().square().sum().item() if p.grad is not None else 0.0
            for part in parts_of(name, family):
                squares[part] = squares.get(part, 0.0) + square
    return {part: square**0.5 for part, square in squares.items()}
