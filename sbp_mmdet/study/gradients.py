"""How near the gradients of SBP are to the exact ones (paper, Figs. 3 and 5, appendix "Gradient Keep-ratios and Keep
Masks on ConvNeXt-Base"), for detectors.

SBP does not change the forward pass. So neck and heads run once for each batch, without SBP, and every setting of the
backbone gets the same images, stochastic depth, proposals, sampled RoIs and gradient at the backbone's outputs. What
differs between two settings is the setting. All in fp32.

A setting may name pieces outside of the backbone too. Then the whole detector runs, seeded the same, and its loss has
to be the exact pass'.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmdet.registry import HOOKS, MODELS
from mmengine.config import Config
from torch import Tensor, nn

from ..analysis.cuda_rules import autocast, full_fp32
from ..analysis.detector import own_crops
from ..analysis.variants import PIECES, piece_change
from ..draws import objects
from ..families import Unit, require
from ..object_masks import object_boxes
from .measures import compare, summary
from .subject import build_model

__all__ = [
    'HEAD_PIECES',
    'ExactPass',
    'backbone_with',
    'estimate',
    'estimate_detector',
    'exact_pass',
    'gradient_errors',
    'study',
]

# The others are about the backbone, which keys of sbp_cfg describe here, or leave gradients alone.
HEAD_PIECES = {p: text for p, text in PIECES.items() if p == 'targets' or p.startswith(('cp-', 'sbp-'))}

# Rounding of a deep network in fp32, relative to the largest entry; another forward pass differs by far more.
_SAME_FORWARD = 1e-3
# The same of a loss, a mean over many entries; one other sampled RoI changed it by more than ten times that.
_SAME_LOSS = 1e-4
# The same of all gradients of the backbone, from the same gradients at its outputs.
_SAME_GRADIENTS = 1e-2


class ExactPass(NamedTuple):
    """What one batch gave without SBP.

    Attributes:
        gradients (dict[str, Tensor]): Of every parameter that got one, fp32, on the CPU.
        images (Tensor): What the backbone got, shape (N, 3, H, W).
        outputs (tuple[Tensor, ...]): What it gave.
        output_gradients (tuple[Tensor | None, ...]): Of the loss; None where nothing uses the output.
        loss (float): The loss.
        seed (int): Of stochastic depth and masks.
        boxes (Sequence[Tensor]): Of each image's objects, for ``sampler='objects'``. Default: none.
    """

    gradients: dict[str, Tensor]
    images: Tensor
    outputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor | None, ...]
    loss: float
    seed: int
    boxes: Sequence[Tensor] = ()


def _backward(model, batch, seed):
    """Loss and boxes; gradients stay in the parameters. Seeded once more where the backbone begins, so that a backbone
    that runs alone draws the same."""
    torch.manual_seed(seed)
    hook = model.backbone.register_forward_pre_hook(lambda module, args: torch.manual_seed(seed) and None)
    try:
        data = model.data_preprocessor(copy.deepcopy(batch), True)
        boxes = object_boxes(data['data_samples'])
        with objects(boxes):
            loss, _ = model.parse_losses(model(**data, mode='loss'))
    finally:
        hook.remove()
    loss.backward()
    return loss.item(), boxes


def _take_gradients(module):
    found = {}
    for name, p in module.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.detach().float().cpu()
            p.grad = None
    return found


def exact_pass(model: nn.Module, batch: dict, seed: int) -> ExactPass:
    """One pass without SBP, and what is needed to run the backbone alone afterwards.

    Args:
        model (nn.Module): Of :func:`.subject.build_model`.
        batch (dict): ``inputs`` and ``data_samples``; not changed.
        seed (int): Of stochastic depth, sampling and, later, masks.

    Returns:
        ExactPass: Gradients, images, outputs and their gradients.

    Raises:
        ValueError: If the backbone does not run exactly once.
    """
    passes = []

    def capture(module, args, outputs):
        # Views: an output that others are made of (ViT's map) must not collect the gradients of these as well.
        outputs = tuple(output.view_as(output) for output in outputs)
        for output in outputs:
            output.retain_grad()
        passes.append((args[0].detach(), outputs))
        return outputs

    hook = model.backbone.register_forward_hook(capture)
    try:
        loss, boxes = _backward(model, batch, seed)
    finally:
        hook.remove()
    if len(passes) != 1:
        raise ValueError(f'the backbone ran {len(passes)} times in one training step; this study needs it to run once')
    images, outputs = passes[0]
    output_gradients = tuple(output.grad for output in outputs)
    outputs = tuple(o.detach() for o in outputs)
    return ExactPass(_take_gradients(model), images, outputs, output_gradients, loss, seed, boxes)


def backbone_with(config: Config, sbp_cfg: dict | None, weights: nn.Module | None = None) -> nn.Module:
    """The config's backbone under a setting, in training mode.

    Args:
        config (Config): Config of a detector.
        sbp_cfg (dict | None): The setting.
        weights (nn.Module | None): A backbone whose weights it shares, not copies; None: it has none (it lies on
            PyTorch's 'meta' device), which is enough to check the setting. Default: None.

    Returns:
        nn.Module: The backbone.

    Raises:
        ValueError: For a setting that cannot be applied, or a backbone that SBP does not apply to.
    """
    family = require(config.model.get('backbone'))
    cfg = copy.deepcopy(config.model.backbone.to_dict())
    cfg.update(type=family.backbone, sbp_cfg=copy.deepcopy(sbp_cfg), with_cp=False, init_cfg=None)
    with torch.device('meta'):
        backbone = MODELS.build(cfg)
    if weights is not None:
        backbone.load_state_dict(weights.state_dict(), assign=True)
    return backbone.train()


def estimate(backbone: nn.Module, exact: ExactPass) -> dict[str, Tensor]:
    """Gradients of a backbone for the images, and the gradient at its outputs, of an exact pass.

    Args:
        backbone (nn.Module): Of :func:`backbone_with`; a new one draws the masks of ``exact.seed``, one that ran
            before draws others.
        exact (ExactPass): Of the same weights.

    Returns:
        dict[str, Tensor]: fp32, on the CPU, names as in the detector; those of neck and heads are the exact ones.

    Raises:
        ValueError: If the outputs are not those of the exact pass, so that another gradient would belong to them.
    """
    torch.manual_seed(exact.seed)
    with objects(exact.boxes):
        outputs = backbone(exact.images)
    for got, expected in zip(outputs, exact.outputs, strict=True):
        error = ((got.detach() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        if not error < _SAME_FORWARD:
            raise ValueError(
                f'the forward pass differs from the one without SBP by {error:.1e} of the largest value; '
                'the gradients cannot be compared'
            )
    used = [(o, g) for o, g in zip(outputs, exact.output_gradients, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in used], [g for _, g in used])
    others = {name: g for name, g in exact.gradients.items() if not name.startswith('backbone.')}
    return {**{f'backbone.{name}': g for name, g in _take_gradients(backbone).items()}, **others}


def estimate_detector(
    config: Config, setting: dict, model: nn.Module, exact: ExactPass, batch: dict
) -> dict[str, Tensor]:
    """Gradients of a whole detector under a setting that changes more than its backbone.

    Args:
        config (Config): Its config.
        setting (dict): See :func:`study`.
        model (nn.Module): Of :func:`.subject.build_model`; not changed, its weights are used.
        exact (ExactPass): Of it; masks and all else are drawn from ``exact.seed``.
        batch (dict): Of the exact pass.

    Returns:
        dict[str, Tensor]: fp32, on the CPU, names as in the detector.

    Raises:
        ValueError: If the loss differs from that of the exact pass. Then proposals or sampled RoIs differ.
    """
    sbp_cfg, pieces = _split(setting)
    backbone = backbone_with(config, sbp_cfg, model.backbone)
    # A copy, for the pieces change it in place; of the same weights.
    shared = {id(model.backbone): backbone, **{id(p): p for p in model.parameters()}}
    detector = copy.deepcopy(model, shared)
    with own_crops():
        for hook in _hooks(config, pieces):
            HOOKS.build(hook).apply(detector)
        loss, _ = _backward(detector, batch, exact.seed)
    found = _take_gradients(detector)
    if not abs(loss - exact.loss) < _SAME_LOSS * abs(exact.loss):
        raise ValueError(
            f'the loss is {loss:.6g}, and {exact.loss:.6g} without SBP: proposals or sampled RoIs are others; '
            'the gradients cannot be compared'
        )
    return found


def _check_alone(config, model, exact, family):
    """The control of all settings: without SBP, the backbone alone has to give the exact gradients."""
    found = estimate(backbone_with(config, None, model.backbone), exact)
    error = compare(exact.gradients, found, family)['backbone']['relative_error']
    if error is not None and not error < _SAME_GRADIENTS:
        raise ValueError(
            f'without SBP the gradients of the backbone alone differ from those of the detector by {error:.1e}: the '
            'detector uses its outputs in a way that this study does not know'
        )


def _split(setting):
    """``sbp_cfg`` and pieces. Pieces alone leave the backbone without SBP."""
    sbp_cfg = dict(setting)
    pieces = sbp_cfg.pop('pieces', [])
    return None if pieces and not sbp_cfg else sbp_cfg, pieces


def _hooks(config, pieces):
    for piece in pieces:
        if piece not in HEAD_PIECES:
            raise ValueError(
                f'piece {piece!r} is none of neck and heads; choose from {list(HEAD_PIECES)}, or give a key of sbp_cfg'
            )
    return piece_change(config, pieces)['custom_hooks']


@full_fp32()
def study(
    config: Config,
    settings: dict[str, dict],
    batches: Iterable[dict],
    seed: int = 0,
    on_progress: Callable[[], None] | None = None,
    *,
    model: nn.Module | None = None,
    on_exact: Callable[[ExactPass], None] | None = None,
) -> dict[str, dict]:
    """Compares settings with exact gradients: same weights, same batches.

    Args:
        config (Config): Config of a detector whose backbone SBP applies to.
        settings (dict[str, dict]): Label to ``sbp_cfg``; ``pieces`` in it names those of ``HEAD_PIECES`` to use
            as well. With pieces alone the backbone runs without SBP.
        batches (Iterable[dict]): ``inputs`` and ``data_samples`` of each, see :func:`.subject.train_batches`.
        seed (int): Batch number i is run with seed + i, under every setting. Default: 0.
        on_progress (Callable | None): Called after each pass: once for each batch, and once for each batch and
            setting. Default: None.
        model (nn.Module | None): Of :func:`.subject.build_model`, with the weights to study; None: it is built, with
            ``load_from`` of the config. Default: None.
        on_exact (Callable | None): Called with each batch's exact pass. Default: None.

    Returns:
        dict: Label to what :func:`summary` returns.

    Raises:
        ValueError: For a setting that cannot be applied, before anything is run; or if the control fails: without SBP
            the backbone alone has to give the detector's gradients.
    """
    for label, setting in settings.items():
        try:
            sbp_cfg, pieces = _split(setting)
            if sbp_cfg and sbp_cfg.get('skip_dropped_images'):
                raise ValueError(
                    'skip_dropped_images draws a stochastic depth of its own, so there is nothing to compare with; '
                    'its gradients are exact: leave it out'
                )
            backbone_with(config, sbp_cfg)
            _hooks(config, pieces)
        except ValueError as error:
            raise ValueError(f'setting {label!r}: {error}') from error
    model = build_model(config, seed=seed) if model is None else model
    family = require(config.model.get('backbone'))
    report = on_progress or (lambda: None)
    results = {label: [] for label in settings}
    for i, batch in enumerate(batches):
        exact = exact_pass(model, batch, seed + i)
        if i == 0:
            _check_alone(config, model, exact, family)
        report()
        if on_exact:
            on_exact(exact)
        for label, setting in settings.items():
            sbp_cfg, pieces = _split(setting)
            if pieces:
                found = estimate_detector(config, setting, model, exact, batch)
            else:
                found = estimate(backbone_with(config, sbp_cfg, model.backbone), exact)
            results[label].append(compare(exact.gradients, found, family))
            report()
    return {label: summary(found) for label, found in results.items()}


def gradient_errors(
    units: dict[str, Unit],
    shape: tuple[int, int, int, int],
    *,
    device: str,
    dtype: torch.dtype | None,
    layout: torch.memory_format = torch.contiguous_format,
) -> Iterator[tuple[str, dict]]:
    """How near the gradients of each unit are to those of the first, all parameters together.

    Weights are random; the input, and the gradient that comes in, are smooth, so that neighbours are alike as in
    photos.

    Args:
        units (dict[str, Unit]): Of :func:`sbp_mmdet.analysis.benchmark.build_unit`, the baseline first.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where it runs.
        dtype (torch.dtype | None): Autocast; None: off.
        layout (torch.memory_format): Of the input. Default: ``torch.contiguous_format``.

    Yields:
        tuple[str, dict]: Name of the unit; ``cosine``, ``relative_error`` and ``norm_ratio``.
    """
    x = _smooth(shape).to(device, memory_format=layout)
    exact = None
    for name, (module, run, _) in units.items():
        with autocast(device, dtype):
            out = run(x)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [_smooth(o.shape).to(o) for o in outs])
        found = {n: p.grad.float() for n, p in module.named_parameters() if p.grad is not None}
        module.zero_grad()
        exact = exact or found
        yield name, compare(exact, found)['network']


def _smooth(shape):
    """Noise with a period of some eight positions."""
    n, c, height, width = shape
    coarse = torch.randn(n, c, height // 8 + 2, width // 8 + 2, generator=torch.Generator().manual_seed(1))
    return F.interpolate(coarse, (height, width), mode='bicubic')
