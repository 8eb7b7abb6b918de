"""Runs a training step of one config of each family of mmdet on a CPU, plain and with ``LeanHook(preset='exact')``,
and counts its presets beside checkpoints of blocks and of everything.

    python research/families.py --json docs/results/families.json
    python research/families.py --json docs/results/families.json --report   # runs nothing: the table

Both steps have the same small random images, weights and random numbers. They run in fp64, or in fp32 if a detector
does not support fp64; in fp32, rounding at the kinks of ReLUs changes gradients by one percent. Each family runs in a
process of its own. Existing results are kept; --again FAMILY repeats some. Counts of other variants than the current
ones are repeated too, comparisons of the two steps are not. Each count names its commit.
"""

import argparse
import copy
import importlib
import random
import time
from collections.abc import Sequence
from pathlib import Path

import mmdet
import numpy as np
import torch
from case import compare_gradients
from isolated import describe_error, read_rows, run_apart, sweep
from mmengine.config import Config
from mmengine.model import BaseModel
from provenance import commit
from tables import format_bytes, markdown_table
from torch import nn

from sbp_mmdet.hooks import LeanHook
from sbp_mmdet.plan.batch import at_the_first_step
from sbp_mmdet.plan.detector import build_detector, build_training, measure_detector
from sbp_mmdet.plan.inputs import count_crowded_boxes, find_training_inputs
from sbp_mmdet.plan.tables import Column
from sbp_mmdet.plan.variants import find_presets, load_config, make_plain, name_full_checkpointing, with_variant
from sbp_mmdet.presets import PRESETS

nms = importlib.import_module('mmcv.ops.nms')  # the package has a function of this name
CONFIGS = Path(mmdet.__file__).parent / '.mim' / 'configs'
CASE = dict(batch=2, boxes=6, device='cpu')
SIZES = ((128, 160), (256, 256))  # the second where the first is too small for a detector
SECONDS = 400  # of CPU, for a step of a family, or its answer
SINGLE = torch.float32
EVERYTHING = 'checkpoints of everything'  # blocks, transformer layers, neck and heads, and targets in chunks
VARIANTS = ('none', 'with_cp', EVERYTHING, 'exact', 'exact_min', 'int8')


def families() -> dict[str, Path]:
    """Return one config of each family: the first with a ResNet-50, or else the first."""
    configs = {}
    for folder in sorted(CONFIGS.iterdir()):
        files = [] if folder.name.startswith('_') else sorted(folder.glob('*.py'))
        if files:
            configs[folder.name] = next((file for file in files if 'r50' in file.name), files[0])
    return configs


def step(model: BaseModel, batch: dict) -> tuple[dict[str, float], dict]:
    """Return losses and gradients of one step, by name."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model.zero_grad()
    total, losses = model.parse_losses(model(**model.data_preprocessor(copy.deepcopy(batch), True), mode='loss'))
    total.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: float(value.detach()) if isinstance(value, torch.Tensor) else value for name, value in losses.items()
    }, gradients


def settle(model: BaseModel, batch: dict) -> None:
    """Initialise the statistics of batch norms from one batch, because random weights overflow in evaluation mode
    otherwise."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model(**model.data_preprocessor(copy.deepcopy(batch), True), mode='loss')
    for norm, training, momentum in before:
        norm.train(training).momentum = momentum


def _double(model, batch):
    """Convert a detector and its inputs to fp64."""
    model.double()
    samples = batch['data_samples']
    if isinstance(samples, dict):  # mmyolo's
        samples['bboxes_labels'], samples = samples['bboxes_labels'].double(), []
    for sample in samples:
        for instances in (sample.gt_instances, sample.ignored_instances):
            instances.bboxes = type(instances.bboxes)(instances.bboxes.tensor.double())
    preprocess, apply = model.data_preprocessor.forward, nms.NMSop.apply

    def forward(data, training=False):
        data = preprocess(data, training)
        data['inputs'] = data['inputs'].double()
        return data

    def in_single(boxes, scores, *args):  # mmcv's knows no fp64; it gives indices alone
        return apply(boxes.to(SINGLE), scores.to(SINGLE), *args)

    model.data_preprocessor.forward, nms.NMSop.apply = forward, in_single


def _compute_in_double():
    """Make constants, casts and assignments in a detector's code use fp64, for the rest of this process."""
    torch.float32 = torch.float = torch.float64
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    put = torch.Tensor.__setitem__

    def put_in_own_dtype(self, key, value):
        cast = isinstance(value, torch.Tensor) and value.is_floating_point() and self.is_floating_point()
        put(self, key, value.to(self.dtype) if cast else value)

    torch.Tensor.__setitem__ = put_in_own_dtype


def compare(config: Config, double: bool, size: tuple[int, int]) -> dict:
    """Compare losses and gradients of a config's detector with and without ``LeanHook``.

    Args:
        config (Config): Config of a detector.
        double (bool): Whether to compare in fp64.
        size (tuple[int, int]): Height and width of the images.

    Returns:
        dict: What was changed, and how far apart losses, gradients and buffers are. With the key ``untried`` if the
        detector itself cannot train a step here.
    """
    row = dict(fp64=double, size=size)
    try:
        with at_the_first_step():
            torch.manual_seed(0)
            if double:
                _compute_in_double()
            model, _, batch = build_training(make_plain(config), height=size[0], width=size[1], **CASE)
            if double:
                _double(model, batch)
            settle(model, batch)
            buffers = {name: value.clone() for name, value in model.named_buffers()}
            losses, gradients = step(model, batch)
    except Exception as error:
        return dict(row, untried=describe_error(error))
    with at_the_first_step():
        moved = dict(model.named_buffers()).items()
        stock = {name: value.clone() for name, value in moved}
        for name, value in moved:
            value.copy_(buffers[name])
        hook = LeanHook(skip_dropped_images=False)  # which draws of its own
        said = hook.apply(model)
        found, lean = step(model, batch)
    row['said'] = said.splitlines()[0].partition(': ')[2]
    row['left'] = [line.partition(': ')[2] for line in said.splitlines() if line.startswith('unchanged')]
    row['losses'] = losses
    row['loss_error'] = max(abs(found[name] - value) / max(abs(value), 1e-3) for name, value in losses.items())
    row['gradient_error'] = compare_gradients(gradients, lean)['error']
    row['same_parameters'] = gradients.keys() == lean.keys()
    row['buffer_error'] = max((_relative(value, stock[name]) for name, value in model.named_buffers()), default=0.0)
    return row


def _relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if a.is_floating_point() and a.numel() else 0.0


def count(
    config: Config,
    variants: Sequence[str] = VARIANTS,
    size: tuple[int, int] | None = None,
    images: int | None = None,
) -> dict:
    """Count the memory of a step of the recipe's largest batch.

    Args:
        config (Config): Config of a detector.
        variants (Sequence[str]): Presets, and ``EVERYTHING``. Default: ``VARIANTS``.
        size (tuple[int, int] | None): Height and width of the images. If ``None``, those of the recipe. Default: None.
        images (int | None): Most images of the batch. If ``None``, those of the recipe. Default: None.

    Returns:
        dict: The batch; ``peaks`` and ``stored`` bytes, and ``seconds``, by variant.
    """
    config, peaks, stored, seconds = make_plain(config), {}, {}, {}
    inputs = find_training_inputs(config, size=size)
    inputs = inputs._replace(batch=min(inputs.batch, images or inputs.batch))
    apply = find_presets(build_detector(config, 'cpu')[0])
    batch_shape = dict(
        batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=count_crowded_boxes(inputs.batch)
    )
    for variant in variants:
        blocks = apply['with_cp'] is None
        run = name_full_checkpointing(config, blocks) if variant == EVERYTHING else variant
        if apply.get(run.split('+')[0], '') is None:
            start = time.process_time()
            # A step may drop no image of a batch, see the planner.
            keys = dict(skip_dropped_images=False) if PRESETS[run.split('+')[0]].form else {}
            row = measure_detector(with_variant(config, run, **keys), **batch_shape)
            peaks[variant], stored[variant] = row['peak'], sum(row['saved'].values())
            seconds[variant] = round(time.process_time() - start, 1)
    return dict(batch_shape, peaks=peaks, stored=stored, seconds=seconds, variants=[*variants], commit=commit())


def _loaded(compute, path, *args):
    return compute(load_config(str(path)), *args)


def run(path: Path, before: dict) -> dict:
    """Compute what an earlier run did not: the planner's counts and the comparison, each in a process of its own."""
    plan = before['plan'] if is_counted(before) else run_apart(_loaded, count, path, seconds=SECONDS)
    if 'loss_error' in before or 'untried' in before:
        return dict(before, plan=plan)
    for case in ((True, SIZES[0]), (False, SIZES[0]), (False, SIZES[1])):
        row = dict(config=path.name, **run_apart(_loaded, compare, path, *case, seconds=SECONDS))
        if 'loss_error' in row:
            break
    return dict(row, plan=plan)


def is_counted(row: dict) -> bool:
    """Return whether a row has counts of the current variants, or the reason why it has none."""
    plan = row.get('plan', {})
    return 'error' in plan or plan.get('variants') == [*VARIANTS]


def report(rows: dict[str, dict]) -> str:
    """Format the number of families that can be planned and that train alike, and the table of all families."""
    plans = [row['plan'] for row in rows.values() if 'peaks' in row.get('plan', {})]
    counted = [name for name in VARIANTS if any(name in found['peaks'] for found in plans)]
    slowest = max((seconds for found in plans for seconds in found['seconds'].values()), default=0)
    said = f'{len(plans)} of {len(rows)} families get an answer; the slowest count took {slowest:.0f} s of one core.'

    def peak(variant, form):
        def cell(row):
            peaks = row.get('plan', {}).get('peaks', {})
            return form(peaks[variant], peaks['none']) if variant in peaks else None

        return cell

    def share(n, base):
        return f'{n / base:.2f}'

    columns = [
        Column('family', lambda row: row['family']),
        Column('config', lambda row: row['config'].removesuffix('.py')),
        Column('loss, error', lambda row: f'{row["loss_error"]:.0e}' if 'loss_error' in row else None),
        Column('gradients, error', lambda row: f'{row["gradient_error"]:.0e}' if 'gradient_error' in row else None),
        Column('plain peak', peak('none', lambda n, _: format_bytes(n))),
        *(Column(f'with {name if name == EVERYTHING else f"`{name}`"}', peak(name, share)) for name in counted[1:]),
        Column('', lambda row: (row.get('untried') or row.get('error') or row.get('plan', {}).get('error') or '')[:90]),
    ]
    return f'{said}\n\n{markdown_table(columns, [dict(row, family=family) for family, row in sorted(rows.items())])}'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, required=True, help='file of results; existing ones are kept')
    parser.add_argument('--again', nargs='+', default=[], metavar='FAMILY', help='repeat these')
    parser.add_argument('--only', nargs='+', default=[], metavar='FAMILY', help='run these, in this order')
    parser.add_argument('--report', action='store_true', help='run nothing, print the table')
    args = parser.parse_args()
    rows, paths = read_rows(args.json), families()
    if not args.report:
        before = {family: row for family, row in rows.items() if family not in args.again}
        chosen = [family for family in args.only or paths if not is_counted(before.get(family, {}))]
        rows = sweep(args.json, chosen, lambda family: run(paths[family], before.get(family, {})), case=CASE)
    print(report(rows))


if __name__ == '__main__':
    main()
