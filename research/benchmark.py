"""Measures stored bytes, times and gradient errors of presets, for a module of a detector or for whole steps.

    python research/benchmark.py CONFIG --presets none with_cp exact sbp --size 800x1344 --amp bf16
    python research/benchmark.py CONFIG --module backbone.stages.0.0 --rivals compile save-on-cpu
    python research/benchmark.py CONFIG --step --size 320x533 --boxes 20

CONFIG is the config of any detector; its own preset is ignored. The module's input is taken from a forward pass of the
plain detector, so this works for every family. "stored" is the memory that the forward pass saves for the backward
pass, without parameters and images. "peak" is the most that tensors of one forward and backward pass hold at a time. If
there are rivals, both come from the allocator. Gradients (all parameters together, fp32, smooth images, stochastic
depth on, the same random numbers for all) are compared with those of the first preset. Presets take turns: a time is
compared with that of the first preset in the same round. Name a preset twice to see the noise.

--step measures training steps of the whole detector: forward pass, backward pass and optimizer. On CUDA, it uses the
config's mixed precision and reports peaks, and --cap limits torch's memory. On a CPU, it uses fp32 and reports times
only (for bytes, use sbp-mmdet plan). Presets may then have the planner's pieces: exact+targets+cp-heads.
"""

import argparse
import contextlib
import ctypes
import functools
from pathlib import Path

import torch
from case import parse_name
from mmengine.config import DictAction
from module_runs import AMP, measure_module
from provenance import describe_machine, output_file, write_json
from rivals import RIVALS
from step_runs import measure_steps
from tables import append_line, benchmark_table

from sbp_mmdet.plan.device import check_device, use_device
from sbp_mmdet.plan.variants import load_config, make_plain
from sbp_mmdet.presets import PRESETS

DEFAULT = ['none', 'with_cp', 'exact', 'int8', 'sampled', 'sbp']


def _keep_freed_memory() -> None:
    """Keep freed memory in this process, as CUDA's allocator does.

    By default glibc returns large blocks to the system, which fills them with zeros when they are requested again: a
    module would pay time for each byte that it stores.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads


def parse_args():
    meanings = '\n'.join(f'  {found.name:<24}{found.meaning}' for found in (*PRESETS.values(), *RIVALS.values()))
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f'presets and rivals:\n{meanings}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--module', default='backbone', help='name of a submodule of the detector (default: backbone)')
    parser.add_argument('--step', action='store_true', help='measure whole training steps instead of a module')
    parser.add_argument(
        '--presets', nargs='+', default=DEFAULT, metavar='PRESET',
        help=f"first is the baseline; with keys: 'sbp,keep_ratio=0.25' (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument(
        '--rivals', nargs='*', choices=RIVALS, metavar='RIVAL', help='also measure these alternatives (default: all)'
    )
    parser.add_argument('--size', default='800x1344', help='size of the images, HxW (default: 800x1344)')
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: 1)')
    parser.add_argument('--boxes', type=int, default=20, help='boxes in each image, with --step (default: 20)')
    parser.add_argument('--amp', choices=AMP, help='precision of a module (default: fp16 on CUDA, off on a CPU)')
    parser.add_argument(
        '--rounds', type=int, default=9, help='number of timed rounds; 0 measures no times (default: 9)'
    )
    parser.add_argument('--cap', type=float, metavar='GIB', help='with --step: memory limit of torch on the GPU')
    parser.add_argument('--channels-last', action='store_true', help='input and weights as (N, H, W, C) in memory')
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    parser.add_argument('--lines', type=output_file, help='append each row to this file as soon as it is measured')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    names = args.presets + ([] if args.rivals is None else args.rivals or [*RIVALS])
    cuda = torch.device(args.device).type == 'cuda'
    try:
        height, width = map(int, args.size.split('x'))
        if min(height, width, args.batch) < 1 or args.rounds < 0:
            raise ValueError(
                f'--size {args.size} and --batch {args.batch} must be 1 or more, --rounds {args.rounds} 0 or more'
            )
        if args.cap and not (cuda and args.step):
            raise ValueError(f'--cap {args.cap} needs --step and a GPU; sbp-mmdet plan predicts without one')
        for name in names:
            parse_name(name)
        args.device = str(use_device(args.device))
        if not cuda:
            _keep_freed_memory()
        case = dict(batch=args.batch, height=height, width=width, boxes=args.boxes, device=args.device)
        config = make_plain(load_config(args.config, args.cfg_options))
        note = functools.partial(append_line, args.lines) if args.lines else lambda row: None
        note(dict(machine=describe_machine(args.device)))
        if args.step:
            own = dict(module='training step', cap=args.cap)
            rows = measure_steps(
                config, names, rounds=args.rounds, cap=args.cap and int(args.cap * 2**30), note=note, **case
            )
        else:
            own = dict(module=args.module, amp=args.amp or ('fp16' if cuda else 'off'))
            own['channels_last'] = args.channels_last
            rows = measure_module(config, names, rounds=args.rounds, note=note, **own, **case)
    except ValueError as error:
        parser.error(str(error))
    print(f'\n{Path(args.config).stem}, {own["module"]}, {args.batch} x {args.size}, {args.device}')
    print(benchmark_table(rows))
    case = dict(config=Path(args.config).stem, rounds=args.rounds, **own, **case)
    if args.json:
        write_json(args.json, dict(machine=describe_machine(args.device), case=case, rows=rows))
        print(f'written to {args.json}')


if __name__ == '__main__':
    main()
