"""One training step of one config of each family of mmdet, as it is and with ``LeanHook(preset='exact')``, on a CPU.

    python research/families.py --json docs/results/families.json

Small random images, the same weights, batch and random numbers for both. In fp64; in fp32, where rounding at the kinks
of ReLUs moves gradients by a percent, only where a detector knows no fp64. Each family runs in a process of its own.
Goes on where the results end; --again FAMILY runs some anew.
"""

import argparse
import copy
import json
import multiprocessing
import random
import resource
from pathlib import Path

import mmdet
import numpy as np
import torch
from case import compared
from mmengine.model import BaseModel
from torch import nn

from sbp_mmdet.apply import LeanHook
from sbp_mmdet.plan.batch import at_the_first_step
from sbp_mmdet.plan.detector import build_training, own_crops
from sbp_mmdet.plan.tables import describe_machine, write_json
from sbp_mmdet.plan.variants import load_config, plain

CONFIGS = Path(mmdet.__file__).parent / '.mim' / 'configs'
CASE = dict(batch=2, boxes=6, device='cpu')
SIZES = ((128, 160), (256, 256))  # the second where the first is too small for a detector
SECONDS = 400  # of CPU, for a family


def families() -> dict[str, Path]:
    """One config each: the first with a ResNet-50, or the first."""
    found = {}
    for folder in sorted(CONFIGS.iterdir()):
        files = [] if folder.name.startswith('_') else sorted(folder.glob('*.py'))
        if files:
            found[folder.name] = next((file for file in files if 'r50' in file.name), files[0])
    return found


def step(model: BaseModel, batch: dict) -> tuple[dict[str, float], dict]:
    """Losses and gradients by name."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model.zero_grad()
    total, losses = model.parse_losses(model(**model.data_preprocessor(copy.deepcopy(batch), True), mode='loss'))
    total.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: float(value.detach()) if isinstance(value, torch.Tensor) else value for name, value in losses.items()
    }, gradients


def settle(model: BaseModel, batch: dict) -> None:
    """Running statistics of the batch: with random weights maps would overflow in evaluation mode."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model(**model.data_preprocessor(copy.deepcopy(batch), True), mode='loss')
    for norm, training, momentum in before:
        norm.train(training).momentum = momentum


def _double(model, batch):
    model.double()
    preprocess = model.data_preprocessor.forward

    def forward(data, training=False):
        data = preprocess(data, training)
        data['inputs'] = data['inputs'].double()
        return data

    model.data_preprocessor.forward = forward


def compare(path: Path, double: bool, size: tuple[int, int]) -> dict:
    """What changes in a family's config, and how far losses and gradients are apart."""
    row = dict(config=path.name, fp64=double, size=size)
    try:
        with own_crops(), at_the_first_step():
            torch.manual_seed(0)
            model, _, batch = build_training(plain(load_config(str(path))), height=size[0], width=size[1], **CASE)
            if double:
                _double(model, batch)
            settle(model, batch)
            buffers = {name: value.clone() for name, value in model.named_buffers()}
            losses, gradients = step(model, batch)
    except Exception as error:
        return dict(row, untried=f'{type(error).__name__}: {" ".join(str(error).split())[:160]}')
    with own_crops(), at_the_first_step():
        moved = dict(model.named_buffers()).items()
        stock = {name: value.clone() for name, value in moved}
        for name, value in moved:
            value.copy_(buffers[name])
        hook = LeanHook(skip_dropped_images=False)  # which draws of its own
        said = hook.apply(model)
        found, lean = step(model, batch)
    row['said'] = said.splitlines()[0].partition(': ')[2]
    row['left'] = [line.partition(': ')[2] for line in said.splitlines() if line.startswith('left alone')]
    row['losses'] = losses
    row['loss_error'] = max(abs(found[name] - value) / max(abs(value), 1e-3) for name, value in losses.items())
    row['gradient_error'] = compared(gradients, lean)['error']
    row['same_parameters'] = gradients.keys() == lean.keys()
    row['buffer_error'] = max((_relative(value, stock[name]) for name, value in model.named_buffers()), default=0.0)
    return row


def _relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if a.is_floating_point() and a.numel() else 0.0


def _alone(out, path, *case):
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    torch.set_num_threads(1)
    try:
        out.send(compare(path, *case))
    except Exception as error:
        out.send(dict(config=path.name, failed=f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'))


def run(path: Path, *case) -> dict:
    """:func:`compare` in a process of its own."""
    context = multiprocessing.get_context('fork')
    there, here = context.Pipe(False)
    process = context.Process(target=_alone, args=(here, path, *case))
    process.start()
    here.close()
    try:
        return there.recv()
    except EOFError:
        return dict(config=path.name, untried=f'took more than {SECONDS} s, or all memory')
    finally:
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, required=True, help='results; those that are there are kept')
    parser.add_argument('--again', nargs='+', default=[], metavar='FAMILY', help='run these anew')
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())['rows'] if args.json.exists() else {}
    for family, path in families().items():
        if family in rows and family not in args.again:
            continue
        for case in ((True, SIZES[0]), (False, SIZES[0]), (False, SIZES[1])):
            rows[family] = run(path, *case)
            if 'loss_error' in rows[family]:
                break
        print(family, rows[family], flush=True)
        write_json(args.json, dict(machine=describe_machine(), case=CASE, rows=rows))


if __name__ == '__main__':
    main()
