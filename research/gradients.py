"""Compares gradients of presets with exact ones on your model (paper, Figs. 3 and 5).

    python research/gradients.py CONFIG --checkpoint work_dirs/x/epoch_12.pth
    python research/gradients.py CONFIG --presets sbp sampled 'sbp,keep_ratio=0.25,sampler=random' --batches 20
    python research/gradients.py CONFIG --presets sampled --draws 8 --whole --json study.json

CONFIG is the config of any detector; batches come from its train dataloader. Lean layers do not change the forward
pass, so neck and heads run once for each batch, in the plain detector. Every preset of the backbone gets the same
weights, images, stochastic depth and gradient at the backbone's outputs. With --whole, each preset is applied to the
whole detector, which runs with the same seed and has to have the exact loss. Everything runs in fp32.
"""

import argparse
import copy
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from case import parse_name
from mmengine.config import DictAction
from mmengine.logging import MessageHub
from mmengine.utils import ProgressBar
from plain_detector import build_model, train_batches
from provenance import describe_machine, output_file, write_json
from torch import Tensor, nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.plan.cuda_rules import full_fp32
from sbp_mmdet.plan.device import check_device
from sbp_mmdet.plan.tables import Column, format_table
from sbp_mmdet.plan.variants import load_config
from sbp_mmdet.presets import PRESETS

__all__ = ['compare', 'exact_pass', 'run_study', 'study_table']

DEFAULT = ['int8', 'sampled', 'sbp']
MEASURES = {'cosine': 'cosine', 'relative_error': 'relative error', 'norm_ratio': 'norm ratio'}
# Rounding of a deep network in fp32, relative to the largest entry; another forward pass differs by far more.
_SAME_FORWARD = 1e-3
# The same of a loss, a mean over many entries; one other sampled RoI changed it by more than ten times that.
_SAME_LOSS = 1e-4
# The same of all gradients of the backbone, from the same gradients at its outputs.
_SAME_GRADIENTS = 1e-2


class ExactPass(NamedTuple):
    """Record of one batch in the plain detector.

    It holds gradients by name (fp32, on the CPU), inputs and outputs of the backbone, the gradients at its outputs
    (`None` where nothing uses them), the loss, and the seed of everything that was drawn.
    """

    gradients: dict[str, Tensor]
    images: Tensor
    outputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor | None, ...]
    loss: float
    seed: int


def _backward(model, batch, seed):
    """Run forward and backward pass, and return the loss. The gradients stay in the parameters.

    The seed is set again before the backbone, so that a backbone that runs alone draws the same numbers.
    """
    torch.manual_seed(seed)
    hook = model.backbone.register_forward_pre_hook(lambda module, args: torch.manual_seed(seed) and None)
    try:
        data = model.data_preprocessor(copy.deepcopy(batch), True)
        loss, _ = model.parse_losses(model(**data, mode='loss'))
    finally:
        hook.remove()
    loss.backward()
    return loss.item()


def _take_gradients(module, prefix=''):
    gradients = {}
    for name, p in module.named_parameters():
        if p.grad is not None:
            gradients[prefix + name] = p.grad.detach().float().cpu()
            p.grad = None
    return gradients


def exact_pass(model: nn.Module, batch: dict, seed: int) -> ExactPass:
    """Run one pass of the plain detector, and record what the backbone needs to run alone afterwards.

    Raises:
        ValueError: If the backbone does not run exactly once.
    """
    passes = []

    def capture(module, args, outputs):
        # Views: an output that others are made of (ViT's map) must not collect the gradients of these as well.
        outputs = tuple(output.view_as(output) for output in outputs)
        for output in outputs:
            if output.requires_grad:  # not of frozen stages
                output.retain_grad()
        passes.append((args[0].detach(), outputs))
        return outputs

    hook = model.backbone.register_forward_hook(capture)
    try:
        loss = _backward(model, batch, seed)
    finally:
        hook.remove()
    if len(passes) != 1:
        raise ValueError(f'the backbone ran {len(passes)} times in one training step; this study needs it to run once')
    images, outputs = passes[0]
    found = tuple(o.detach() for o in outputs), tuple(o.grad for o in outputs)
    return ExactPass(_take_gradients(model), images, *found, loss, seed)


def _copy_with_preset(module, preset, keys):
    """Return a copy of a model that has a preset and shares the parameters."""
    changed = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    if preset != 'none':
        # What skip_dropped_images leaves out is a draw of its own; its gradients are the same on average.
        draws = dict(skip_dropped_images=False) if PRESETS[preset].form else {}
        apply_lean(changed, preset=preset, verify=False, **dict(keys, **draws))
    return changed


def _mean_gradient(draws, run):
    """Return the mean gradient over several runs, each with draws of its own."""
    hub, found = MessageHub.get_current_instance(), {}
    for draw in range(draws):
        hub.update_info('iter', draw)
        for name, gradient in run().items():
            found[name] = found.get(name, 0) + gradient / draws
    return found


def _of_backbone(model, exact, preset, keys):
    """Return gradients of the backbone alone with a preset, for the inputs and output gradients of an exact pass."""
    backbone = _copy_with_preset(model.backbone, preset, keys)
    torch.manual_seed(exact.seed)
    outputs = backbone(exact.images)
    for got, expected in zip(outputs, exact.outputs, strict=True):
        error = ((got.detach() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        if not error < _SAME_FORWARD:
            raise ValueError(
                f'the forward pass differs from the plain one by {error:.1e} of the largest value; there is nothing to '
                'compare'
            )
    used = [(o, g) for o, g in zip(outputs, exact.output_gradients, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in used], [g for _, g in used])
    others = {name: g for name, g in exact.gradients.items() if not name.startswith('backbone.')}
    return _take_gradients(backbone, 'backbone.') | others


def _of_detector(model, exact, preset, keys, batch):
    detector = _copy_with_preset(model, preset, keys)
    loss = _backward(detector, batch, exact.seed)
    gradients = _take_gradients(detector)
    if not abs(loss - exact.loss) < _SAME_LOSS * abs(exact.loss):
        raise ValueError(
            f'the loss is {loss:.6g}, and {exact.loss:.6g} in the plain detector: proposals or sampled RoIs are other '
            'ones; there is nothing to compare'
        )
    return gradients


def _stages_of(backbone):
    """Map names of blocks to stages, counted from 1, for any family that has an adapter."""
    backbone = copy.deepcopy(backbone)
    apply_lean(backbone, preset='exact', verify=False)
    places = ((name, m._lean.layer) for name, m in backbone.named_modules() if isinstance(m, LeanModule))
    return {f'backbone.{name}.': layer[0] + 1 for name, layer in places if layer and isinstance(layer[0], int)}


def compare(exact: Mapping, estimated: Mapping, stages: Mapping = {}) -> dict[str, dict[str, float | None]]:  # noqa: B006
    """Compare estimated gradients s with exact gradients e. A parameter without a gradient in s has the gradient 0.

    Returns:
        dict: For 'network', its children such as 'backbone', and 'stage 1' etc., the measures ``cosine``
        <e, s> / (|e| |s|), ``relative_error`` |s - e| / |e| and ``norm_ratio`` |s| / |e|, or ``None`` for a division by
        0. 'mean layer' is the mean over the backbone's parameters, in which each counts the same.
    """
    sums, layers = {}, []
    for name, e in exact.items():
        e, s = e.double(), estimated.get(name, torch.zeros_like(e)).double()
        numbers = torch.stack([(e * s).sum(), (e * e).sum(), (s * s).sum(), (s - e).square().sum()])
        parts = ['network', name.split('.')[0]]
        parts += [f'stage {stage}' for prefix, stage in stages.items() if name.startswith(prefix)]
        for part in parts:
            sums[part] = sums.get(part, 0) + numbers
        if name.startswith('backbone.'):
            layers.append(_measures(*numbers.tolist()))
    rows = {part: _measures(*numbers.tolist()) for part, numbers in sums.items()}
    rows['mean layer'] = {m: _mean([row[m] for row in layers]) for m in MEASURES}
    return rows


def _mean(values):
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _measures(product, exact, estimated, difference):
    norms = math.sqrt(exact * estimated)
    return dict(
        cosine=max(-1.0, min(1.0, product / norms)) if norms else None,
        relative_error=math.sqrt(difference / exact) if exact else None,
        norm_ratio=math.sqrt(estimated / exact) if exact else None,
    )


@full_fp32()
def run_study(
    model: nn.Module, settings: Mapping, batches: Iterable[dict], seed=0, whole=False, done=lambda: None, draws=1
) -> dict:
    """Compare presets with exact gradients. With several ``draws``, their mean gradient is compared.

    Returns:
        dict: By label, part and measure: ``mean``, ``std`` and ``values``, one for each batch.

    Raises:
        ValueError: If a setting cannot be applied, or if the control fails: the plain backbone alone has to give the
            detector's gradients.
    """
    target = model if whole else model.backbone
    for label, (preset, keys) in settings.items():
        try:
            _copy_with_preset(target, preset, keys)
        except ValueError as error:
            raise ValueError(f'{label!r}: {error}') from error
    stages, results = _stages_of(model.backbone), {label: [] for label in settings}
    for i, batch in enumerate(batches):
        exact = exact_pass(model, batch, seed + i)
        if i == 0 and not whole:
            error = compare(exact.gradients, _of_backbone(model, exact, 'none', {}))['backbone']['relative_error']
            if not error < _SAME_GRADIENTS:
                raise ValueError(
                    f'the gradients of the plain backbone alone differ from those of the detector by {error:.1e}: it '
                    'uses its outputs in a way that this study does not know; give --whole'
                )
        done()
        for label, setting in settings.items():
            run, more = (_of_detector, [batch]) if whole else (_of_backbone, [])
            found = _mean_gradient(draws, lambda: run(model, exact, *setting, *more))  # noqa: B023
            results[label].append(compare(exact.gradients, found, stages))
            done()
    return {label: _summary(rows) for label, rows in results.items()}


def _summary(rows):
    def spread(values):
        known = [v for v in values if v is not None]
        std = statistics.stdev(known) if len(known) > 1 else None
        return dict(mean=_mean(values), std=std, values=values)

    return {part: {m: spread([row[part][m] for row in rows]) for m in MEASURES} for part in rows[0]}


def study_table(found: dict) -> str:
    """Format mean and standard deviation over batches of each setting of a file that ``--json`` wrote.

    Columns are cosines of parts, then the backbone's other measures.
    """
    results = found['results']
    first = next(iter(results.values()))
    stages = sorted(part for part in first if part.startswith('stage '))
    shown = [('cosine', part) for part in ('network', 'backbone', *stages, 'mean layer')]
    shown += [(measure, 'backbone') for measure in ('relative_error', 'norm_ratio')]
    columns = [Column('setting', lambda label: label)]
    for measure, part in shown:
        head = part if measure == 'cosine' else f'{MEASURES[measure]}, {part}'
        head = f'cosine: {head}' if len(columns) == 1 else head
        columns.append(Column(head, lambda label, m=measure, p=part: _cell(results[label].get(p, {}).get(m))))
    return format_table(columns, results)


def _cell(value):
    if not value or value['mean'] is None:
        return '-'
    return f'{value["mean"]:.3f}' + ('' if value['std'] is None else f' ± {value["std"]:.3f}')


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--checkpoint', help="weights, of a detector or of its backbone (default: the config's start)")
    parser.add_argument(
        '--presets', nargs='+', default=DEFAULT, help="with keys: 'sbp,keep_ratio=0.25' (default: %(default)s)"
    )
    parser.add_argument('--whole', action='store_true', help='apply them to the whole detector, not to its backbone')
    parser.add_argument('--batches', type=int, default=8, help='number of batches of the train dataloader (default: 8)')
    parser.add_argument(
        '--draws', type=int, default=1, help='number of draws of which the mean gradient is compared (default: 1)'
    )
    parser.add_argument(
        '--seed', type=int, default=0, help='seed of batches, masks and everything else that is drawn (default: 0)'
    )
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        if min(args.batches, args.draws) < 1:
            raise ValueError(f'--batches {args.batches} and --draws {args.draws} must be 1 or more')
        config = load_config(args.config, args.cfg_options)
        settings = {name: parse_name(name) for name in args.presets}
        model = build_model(config, args.checkpoint, args.device, args.seed)
        batches = list(train_batches(config, args.batches, args.seed))
        bar = ProgressBar(len(batches) * (1 + len(settings)))
        results = run_study(model, settings, batches, args.seed, args.whole, bar.update, args.draws)
    except ValueError as error:
        parser.error(str(error))
    case = dict(config=Path(args.config).stem, checkpoint=args.checkpoint and Path(args.checkpoint).name)
    case |= dict(
        seed=args.seed, draws=args.draws, batches=len(batches), images=len(batches[0]['inputs']), whole=args.whole
    )
    found = dict(machine=describe_machine(args.device), case=case, settings=settings, results=results)
    print(f'\n\n{study_table(found)}\nmean ± standard deviation over {len(batches)} batches')
    if args.json:
        write_json(args.json, found)


if __name__ == '__main__':
    main()
