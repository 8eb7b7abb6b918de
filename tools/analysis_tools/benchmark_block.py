"""Bytes and times of a family's blocks, or of the whole backbone, under every preset, relative to the plain one.

    python tools/analysis_tools/benchmark_block.py --arch base --stage 1 --unit mlp
    python tools/analysis_tools/benchmark_block.py --arch tiny base --unit backbone --amp bf16 --rounds 0

"saved" is what the forward pass stores for the backward pass: parameters and images excluded, the input of a block
included where the block keeps it; "peak" is the most that tensors of one forward and backward pass hold at a time,
weight gradients included. Times are medians of ratios to the first preset, taken in turn in one run. What a preset does
not mean anything for is left out: there is no convolution to run again in a channel MLP alone.
"""

import argparse

import torch
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.benchmark import build_unit, keep_freed_memory, measure
from sbp_mmdet.analysis.device import use_device
from sbp_mmdet.families import FAMILIES, presets_of
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs
from sbp_mmdet.settings import PRESETS, UNITS, preset_named
from sbp_mmdet.study.gradients import gradient_errors

AMP = {'off': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    first = next(iter(FAMILIES))
    parser.add_argument('--family', choices=FAMILIES, default=first, help=f'of backbones (default: {first})')
    parser.add_argument('--arch', nargs='+', help="architectures (default: the family's)")
    parser.add_argument('--unit', '--part', choices=UNITS, default='block', help='what is measured (default: block)')
    parser.add_argument('--stage', nargs='+', type=int, help='stages, from 1 (default: all)')
    parser.add_argument(
        '--presets', '--modes', nargs='+', choices=PRESETS, metavar='PRESET',
        help=f'first is the baseline (default: those of {[*PRESETS]} that apply)',
    )  # fmt: skip
    parser.add_argument('--size', nargs=2, type=int, default=[800, 1344], metavar=('H', 'W'), help='image, in pixels')
    parser.add_argument('--batch', type=int, default=2, help='images (default: 2)')
    parser.add_argument('--amp', choices=AMP, help='autocast (default: fp16 on CUDA, off on CPU)')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='of presets that drop something (default: 0.5)')
    parser.add_argument('--sampler', default='grid', help='grid or random (default: grid)')
    parser.add_argument('--rounds', type=int, default=7, help='timed rounds; 0: bytes only (default: 7)')
    parser.add_argument(
        '--gradients',
        action='store_true',
        help='also compare the gradients with those of the first preset: random weights, smooth random input. '
        'For those of your model see gradient_study.py',
    )
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    add_outputs(parser, plot=False)
    return parser.parse_args()


def main():
    args = parse_args()
    args.device = str(use_device(args.device))
    keep_freed_memory(args.device)
    amp = args.amp or ('fp16' if torch.device(args.device).type == 'cuda' else 'off')
    family = FAMILIES[args.family]
    presets = args.presets or [preset.name for preset in presets_of(family)]
    presets = [name for name in presets if args.unit in preset_named(name).units]
    rows = []
    for arch in args.arch or family.archs:
        for stage in [0] if args.unit == 'backbone' else args.stage or range(1, family.stages + 1):
            shape = (args.batch, 3, *args.size)
            if args.unit != 'backbone':
                shape = family.stage_shape(arch, stage - 1, args.batch, *args.size)
            label = arch if args.unit == 'backbone' else f'{arch} stage {stage}'
            print(f'\n{args.unit} of {label}, {" x ".join(map(str, shape))}, amp {amp}, {args.device}')
            options = dict(keep_ratio=args.keep_ratio, sampler=args.sampler)
            results = run(args, family, arch, presets, stage, shape, AMP[amp], options)
            print()
            print_table(results)
            case = dict(family=family.name, part=args.unit, arch=arch, stage=stage or None, shape=shape, amp=amp)
            rows += [
                dict(case, mode=name, **preset_named(name).arguments(**options), **row) for name, row in results.items()
            ]
    print()
    write_outputs(args, dict(machine=describe_machine(args.device), rows=rows), indent=1)


def run(args, family, arch, presets, stage, shape, dtype, options):
    """Measurements of a unit by preset."""
    units = {
        name: build_unit(family, args.unit, arch, name, stage - 1, shape, args.device, **options) for name in presets
    }
    bar = ProgressBar(len(units) * (args.rounds + 2 if args.rounds else 1) + len(units) * args.gradients)
    results = {}
    for name, row in measure(units, shape, device=args.device, dtype=dtype, rounds=args.rounds):
        if name == 'progress':
            bar.update()
        else:
            results[name] = row
    if args.gradients:
        for name, row in gradient_errors(units, shape, device=args.device, dtype=dtype):
            results[name].update(row)
            bar.update()
    return results


def print_table(results):
    base = next(iter(results.values()))
    header = f'{"preset":<12}' + f'{"saved MB":>10}{"ratio":>7}{"peak MB":>10}{"ratio":>7}'
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
