"""How near the gradients of SBP are to the exact ones (paper, Figs. 3 and 5, appendix "Gradient Keep-ratios and Keep
Masks on ConvNeXt-Base"), for detectors.

SBP changes the backward pass of the backbone and nothing else. So neck and heads run once for each batch, without SBP,
and every setting gets the same images, stochastic depth, proposals, sampled RoIs and gradient at the backbone's
outputs. What differs between two settings is the setting. All in fp32.
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import Tensor, nn

from ..analysis.cuda_rules import autocast
from ..analysis.variants import check_convnext
from .subject import build_model

__all__ = [
    'MEASURES',
    'SUMS',
    'ExactPass',
    'backbone_with',
    'compare',
    'estimate',
    'exact_pass',
    'gradient_errors',
    'parts_of',
    'study',
    'summary',
]

MEASURES = ('cosine', 'relative_error', 'norm_ratio')
SUMS = ('network', 'backbone', 'mean layer', *(f'stage {i}' for i in range(1, 5)))  # every other part is a layer

# Rounding of a deep network in fp32, relative to the largest entry; another forward pass differs by far more.
_SAME_FORWARD = 1e-3


class ExactPass(NamedTuple):
    """What one batch gave without SBP.

    Attributes:
        gradients (dict[str, Tensor]): Of every parameter that got one, fp32, on the CPU.
        images (Tensor): What the backbone got, shape (N, 3, H, W).
        outputs (tuple[Tensor, ...]): What it gave.
        output_gradients (tuple[Tensor | None, ...]): Of the loss; None where nothing uses the output.
        loss (float): The loss.
        seed (int): Of stochastic depth and masks.
    """

    gradients: dict[str, Tensor]
    images: Tensor
    outputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor | None, ...]
    loss: float
    seed: int


def _backward(model, data, seed):
    """The loss; gradients are left in the parameters. Seeded once more where the backbone begins, so that a backbone
    that runs alone draws the same."""
    hook = model.backbone.register_forward_pre_hook(lambda module, args: torch.manual_seed(seed) and None)
    try:
        loss, _ = model.parse_losses(model(**data, mode='loss'))
    finally:
        hook.remove()
    loss.backward()
    return loss.item()


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
        for output in outputs:
            output.retain_grad()
        passes.append((args[0].detach(), outputs))

    hook = model.backbone.register_forward_hook(capture)
    torch.manual_seed(seed)
    try:
        loss = _backward(model, model.data_preprocessor(copy.deepcopy(batch), True), seed)
    finally:
        hook.remove()
    if len(passes) != 1:
        raise ValueError(f'the backbone ran {len(passes)} times in one training step; this study needs it to run once')
    images, outputs = passes[0]
    output_gradients = tuple(output.grad for output in outputs)
    return ExactPass(_take_gradients(model), images, tuple(o.detach() for o in outputs), output_gradients, loss, seed)


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
        ValueError: For a setting that cannot be honoured, or a backbone that is no ConvNeXt.
    """
    check_convnext(config)
    cfg = copy.deepcopy(config.model.backbone.to_dict())
    cfg.update(type='SBPConvNeXt', sbp_cfg=copy.deepcopy(sbp_cfg), with_cp=False, init_cfg=None)
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


def parts_of(name: str) -> list[str]:
    """The parts that a parameter counts for.

    Args:
        name (str): Of the parameter, in a detector.

    Returns:
        list[str]: 'network'; for the backbone also 'backbone', its stage ('stage 1' to 'stage 4', the layer that leads
        into a stage included) and its layer, without 'backbone.': 'stages.0.2.pointwise_conv1'.
    """
    if not name.startswith('backbone.'):
        return ['network']
    name = name.removeprefix('backbone.')
    kind, *rest = name.split('.')
    stage = int(rest[0] if kind in ('stages', 'downsample_layers') else kind.removeprefix('norm'))
    return ['network', 'backbone', f'stage {stage + 1}', name.removesuffix('.weight').removesuffix('.bias')]


def compare(exact: dict[str, Tensor], estimate: dict[str, Tensor]) -> dict[str, dict[str, float | None]]:
    """Compares gradients, over the network, the backbone, each stage and each layer.

    Args:
        exact (dict[str, Tensor]): Gradients e.
        estimate (dict[str, Tensor]): Gradients s; parameters that it lacks have gradient 0.

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
        for part in parts_of(name):
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
    """Compares settings of ``sbp_cfg`` with exact gradients: same weights, same batches.

    Args:
        config (Config): Config of a detector with a ConvNeXt.
        settings (dict[str, dict]): Label to ``sbp_cfg``.
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
        ValueError: For a setting that cannot be honoured, before anything is run.
    """
    for label, sbp_cfg in settings.items():
        try:
            backbone_with(config, sbp_cfg)
        except ValueError as error:
            raise ValueError(f'setting {label!r}: {error}') from error
    model = build_model(config, seed=seed) if model is None else model
    report = on_progress or (lambda: None)
    results = {label: [] for label in settings}
    for i, batch in enumerate(batches):
        exact = exact_pass(model, batch, seed + i)
        report()
        if on_exact:
            on_exact(exact)
        for label, sbp_cfg in settings.items():
            found = estimate(backbone_with(config, sbp_cfg, model.backbone), exact)
            results[label].append(compare(exact.gradients, found))
            report()
    return {label: summary(found) for label, found in results.items()}


def gradient_errors(
    cases: dict[str, tuple[nn.Module, Callable[[Tensor], object]]],
    shape: tuple[int, int, int, int],
    *,
    device: str,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, dict]]:
    """How near the gradients of each case are to those of the first, all parameters together.

    Weights are random; the input, and the gradient that comes in, are smooth, so that neighbours are alike as in
    photos.

    Args:
        cases (dict): Of :func:`sbp_mmdet.analysis.benchmark.build_case`, the baseline first.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where it runs.
        dtype (torch.dtype | None): Autocast; None: off.

    Yields:
        tuple[str, dict]: Name of the case; ``cosine``, ``relative_error`` and ``norm_ratio``.
    """
    x = _smooth(shape).to(device)
    exact = None
    for name, (module, run) in cases.items():
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
