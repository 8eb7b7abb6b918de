"""Bytes and times of ConvNeXt blocks, or of the whole backbone, in every mode, relative to the plain one.

    python tools/analysis_tools/benchmark_block.py --arch base --stage 1 --part mlp
    python tools/analysis_tools/benchmark_block.py --arch tiny base --part backbone --amp bf16 --rounds 0

"saved" is what the forward pass stores for the backward pass: parameters and images excluded, the input of a block
included where the block keeps it; "peak" is the most that tensors of one forward and backward pass hold at a time,
weight gradients included. Times are medians of ratios to the first mode, taken in turn in one run.
"""

import argparse

import torch
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis import MODES, backbone_options
from sbp_mmdet.analysis.benchmark import (
    PARTS,
    build_case,
    keep_freed_memory,
    measure,
    stage_shape,
)
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs
from sbp_mmdet.study.gradients import gradient_errors

AMP = {'off': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', nargs='+', default=['tiny', 'base'], help='architectures (default: tiny base)')
    parser.add_argument('--part', choices=PARTS, default='block', help='what is measured (default: block)')
    parser.add_argument('--stage', nargs='+', type=int, default=[1, 2, 3, 4], help='stages, from 1 (default: all)')
    parser.add_argument('--modes', nargs='+', default=list(MODES), help=f'first is the baseline (default: {[*MODES]})')
    parser.add_argument('--size', nargs=2, type=int, default=[800, 1344], metavar=('H', 'W'), help='image, in pixels')
    parser.add_argument('--batch', type=int, default=2, help='images (default: 2)')
    parser.add_argument('--amp', choices=AMP, help='autocast (default: fp16 on CUDA, off on CPU)')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='of the SBP modes (default: 0.5)')
    parser.add_argument('--sampler', default='grid', help='grid or random (default: grid)')
    parser.add_argument('--rounds', type=int, default=7, help='timed rounds; 0: bytes only (default: 7)')
    parser.add_argument(
        '--gradients',
        action='store_true',
        help='also compare the gradients with those of the first mode: random weights, smooth random input. '
        'For those of your model see gradient_study.py',
    )
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    add_outputs(parser, plot=False)
    return parser.parse_args()


def main():
    args = parse_args()
    keep_freed_memory()
    amp = args.amp or ('fp16' if torch.device(args.device).type == 'cuda' else 'off')
    modes = args.modes
    if args.part == 'mlp':  # recomputing the block's convolution makes no sense without one
        modes = [mode for mode in modes if 'block' not in mode]
    rows = []
    for arch in args.arch:
        for stage in [0] if args.part == 'backbone' else args.stage:
            shape = (args.batch, 3, *args.size)
            if args.part != 'backbone':
                shape = stage_shape(arch, stage - 1, args.batch, *args.size)
            label = arch if args.part == 'backbone' else f'{arch} stage {stage}'
            print(f'\n{args.part} of {label}, {" x ".join(map(str, shape))}, amp {amp}, {args.device}')
            options = dict(keep_ratio=args.keep_ratio, sampler=args.sampler)
            cases = {m: build_case(args.part, arch, m, stage - 1, shape, args.device, **options) for m in modes}
            bar = ProgressBar(len(modes) * (args.rounds + 2 if args.rounds else 1) + len(modes) * args.gradients)
            results = {}
            for name, row in measure(cases, shape, device=args.device, dtype=AMP[amp], rounds=args.rounds):
                if name == 'progress':
                    bar.update()
                else:
                    results[name] = row
            if args.gradients:
                for name, row in gradient_errors(cases, shape, device=args.device, dtype=AMP[amp]):
                    results[name].update(row)
                    bar.update()
            print()
            print_table(results)
            rows += [
                dict(part=args.part, arch=arch, stage=stage or None, shape=shape, amp=amp, mode=name)
                | dict(backbone_options(name, **options), **row)
                for name, row in results.items()
            ]
    print()
    write_outputs(args, dict(machine=describe_machine(args.device), rows=rows), indent=1)


def print_table(results):
    base = next(iter(results.values()))
    header = f'{"mode":<12}' + f'{"saved MB":>10}{"ratio":>7}{"peak MB":>10}{"ratio":>7}'
    header += f'{"forward":>9}{"backward":>9}{"total":>7}' if 'total_ratio' in base else ''
    print(header + (f'{"cosine":>9}{"error":>8}' if 'cosine' in base else ''))
    for name, row in results.items():
        cells = f'{name:<12}'
        for key in ('saved_bytes', 'peak_bytes'):
            cells += f'{row[key] / 1e6:>10.1f}{row[key] / base[key]:>7.3f}'
        if 'total_ratio' in row:
            cells += f'{row["forward_ratio"]:>9.2f}{row["backward_ratio"]:>9.2f}{row["total_ratio"]:>7.2f}'
        if 'cosine' in row:
            cells += f'{row["cosine"]:>9.4f}{row["relative_error"]:>8.4f}'
        print(cells)


if __name__ == '__main__':
    main()
