"""Bytes and times of a family's blocks, or of the whole backbone, under every preset, relative to the plain one.

    python tools/analysis_tools/benchmark_block.py --arch base --stage 1 --unit mlp
    python tools/analysis_tools/benchmark_block.py --arch tiny base --unit backbone --amp bf16 --rounds 0
    python tools/analysis_tools/benchmark_block.py --arch tiny --stage 1 --rivals

"saved" is what the forward pass stores for the backward pass: parameters and images excluded, the input of a block
included where the block keeps it; "peak" is the most that tensors of one forward and backward pass hold at a time,
weight gradients included. Times are medians of ratios to the first preset, taken in turn in one run. What a preset does
not mean anything for is left out: there is no convolution to run again in a channel MLP alone.

`--rivals` adds what others offer: selective checkpointing, torch.compile with and without a memory budget, and
save_on_cpu (whole-block checkpointing is the preset with_cp). Then all bytes come from the allocator. "gradient error"
is taken while stochastic depth drops images, of presets and rivals (for a backbone with an image of a third of the
size, and compiled as far as the choice of what is stored, without kernels); "graphs" how many are compiled over images
of five sizes.
"""

import argparse

import torch
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.benchmark import build_unit, keep_freed_memory, measure
from sbp_mmdet.analysis.detector import check_case
from sbp_mmdet.analysis.device import use_device
from sbp_mmdet.analysis.report import against_time
from sbp_mmdet.analysis.rivals import RIVALS, drawn_errors, graphs_over_sizes, prepare
from sbp_mmdet.families import FAMILIES, presets_of
from sbp_mmdet.masks import SAMPLERS, parse_keep_ratio
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import Column, add_outputs, text_table, write_outputs
from sbp_mmdet.settings import PRESETS, UNITS, preset_named
from sbp_mmdet.study.gradients import gradient_errors

AMP = {'off': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def parse_args():
    meanings = '\n'.join(f'  {found.name:<14}{found.meaning}' for found in (*PRESETS.values(), *RIVALS.values()))
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f'presets and rivals:\n{meanings}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    first = next(iter(FAMILIES))
    parser.add_argument('--family', choices=FAMILIES, default=first, help=f'of backbones (default: {first})')
    parser.add_argument('--arch', nargs='+', help="architectures (default: the family's)")
    parser.add_argument('--unit', '--part', choices=UNITS, default='block', help='what is measured (default: block)')
    parser.add_argument('--stage', nargs='+', type=int, help='stages, from 1 (default: all)')
    parser.add_argument(
        '--presets', '--modes', nargs='+', choices=PRESETS, metavar='PRESET',
        help=f'first is the baseline (default: those of {[*PRESETS]} that apply)',
    )  # fmt: skip
    parser.add_argument(
        '--rivals', nargs='*', choices=RIVALS, metavar='RIVAL', help=f'also these (without a name: all of {[*RIVALS]})'
    )
    parser.add_argument('--size', nargs=2, type=int, default=[800, 1344], metavar=('H', 'W'), help='image, in pixels')
    parser.add_argument('--batch', type=int, default=2, help='images (default: 2)')
    parser.add_argument('--amp', choices=AMP, help='autocast (default: fp16 on CUDA, off on CPU)')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='of presets that drop something (default: 0.5)')
    parser.add_argument('--sampler', choices=SAMPLERS, default='grid', help='default: grid')
    parser.add_argument('--rounds', type=int, default=7, help='timed rounds; 0: bytes only (default: 7)')
    parser.add_argument(
        '--gradients',
        action='store_true',
        help='also compare the gradients with those of the first preset: random weights, smooth random input. '
        'For those of your model see gradient_study.py',
    )
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--channels-last', action='store_true', help='input and weights as (N, H, W, C) in memory')
    add_outputs(parser)
    return parser, parser.parse_args()


def read_presets(args, family):
    """Those that are measured. Raises a ValueError for all that cannot be, before anything is."""
    check_case(batch=args.batch, boxes=0, rounds=args.rounds, device=args.device)
    parse_keep_ratio(args.keep_ratio)
    if args.plot and not args.rounds:
        raise ValueError('--plot draws times, and --rounds 0 measures none; give --rounds 1 or more')
    if args.stage and args.unit == 'backbone':
        raise ValueError(f'--stage {args.stage} means nothing for --unit backbone; leave it out')
    last = family.stages if args.unit == 'backbone' else max(args.stage or [family.stages])
    for stage in args.stage or ():
        if not 1 <= stage <= family.stages:
            raise ValueError(f'--stage {stage}: {family.name} has the stages 1 to {family.stages}')
    for arch in args.arch or family.archs:
        if min(family.stage_shape(arch, last - 1, args.batch, *args.size)) < 1:
            raise ValueError(f'--size {args.size}: nothing is left of it in stage {last} of {arch}; give a larger one')
    known = [preset.name for preset in presets_of(family)]
    if unknown := [name for name in args.presets or () if name not in known]:
        raise ValueError(f'--presets {unknown}: {family.name} has none of them; choose from {known}')
    found = [name for name in args.presets or known if args.unit in preset_named(name).units]
    if not found:
        raise ValueError(f'--presets {args.presets}: none means anything for --unit {args.unit}; add another')
    return found


def main():
    parser, args = parse_args()
    family = FAMILIES[args.family]
    try:
        presets = read_presets(args, family)
    except ValueError as error:
        parser.error(str(error))
    args.device = str(use_device(args.device))
    keep_freed_memory(args.device)
    amp = args.amp or ('fp16' if torch.device(args.device).type == 'cuda' else 'off')
    args.rivals = [] if args.rivals is None else args.rivals or [*RIVALS]
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
            case = dict(family=family.name, unit=args.unit, arch=arch, stage=stage or None, shape=shape, amp=amp)
            case['channels_last'] = args.channels_last
            for name, row in results.items():
                preset = RIVALS[name].preset if name in RIVALS else name
                rows.append(dict(case, preset=name, **preset_named(preset).arguments(**options), **row))
    print()
    first = [row for row in rows if all(row[key] == rows[0][key] for key in ('arch', 'stage'))]
    title = f'{args.unit} of {first[0]["family"]} {first[0]["arch"]}, amp {amp}, {args.device}'
    results = dict(machine=describe_machine(args.device), rows=rows)
    write_outputs(args, results, lambda path: against_time(first, args.rivals, title, path), indent=1)


def run(args, family, arch, presets, stage, shape, dtype, options):
    """Measurements of a unit by preset and rival."""

    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    case = dict(device=args.device, dtype=dtype, layout=layout)

    def build(name):
        unit = build_unit(family, args.unit, arch, name, stage - 1, shape, args.device, **options)
        if args.channels_last:
            unit.module.to(memory_format=layout)
        return unit

    units = {name: build(name) for name in presets}
    rivals, records = prepare(args.rivals, build, shape, **case)
    bar = ProgressBar(
        (len(units) + len(rivals)) * (args.rounds + 2 if args.rounds else 1) + len(units) * args.gradients
    )
    by_allocator = [*units, *rivals] if args.rivals else []
    results = {}
    for name, row in measure({**units, **rivals}, shape, rounds=args.rounds, by_allocator=by_allocator, **case):
        if name == 'progress':
            bar.update()
        else:
            results[name] = row
    if args.gradients:
        for name, row in gradient_errors(units, shape, **case):
            results[name].update(row)
            bar.update()
    for name, record in records.items():
        results.setdefault(name, {}).update(record)
    if args.rivals:
        add_what_rivals_cost(args, results, [*units, *rivals], build, shape, layout)
    return results


def add_what_rivals_cost(args, results, names, build, shape, layout):
    """Errors under stochastic depth, graphs over sizes, and bytes on the host."""
    whole = args.unit == 'backbone'
    small = (*shape[:2], *(max(side // 3, 64) for side in shape[2:])) if whole else shape
    backend = 'aot_eager_decomp_partition' if whole else 'inductor'
    case = dict(device=args.device, layout=layout)
    errors = drawn_errors(names, build, small, **case, backend=backend, draws=1 if whole else 4)
    compiled = [name for name in names if name in RIVALS and RIVALS[name].compiled]
    if compiled:  # as many with each budget
        first, step = (128, 32) if whole else (16, 4)
        shapes = [(*shape[:2], first + step * i, first + step * (2 * i + 1)) for i in range(5)]
        graphs = graphs_over_sizes(build, shapes, args.device)
    for name in names:
        row = results[name]
        row['drawn_error'] = errors[name]
        if name in compiled:
            row['graphs_of_5_sizes'] = graphs
        elif name in RIVALS and RIVALS[name].on_host and torch.device(args.device).type == 'cpu':
            # On a CPU nothing moves, so nothing of this is known but what would move.
            row.update(saved_bytes=0, host_bytes=row['saved_bytes'], peak_bytes=None)
            for key in ('forward_s', 'backward_s', 'forward_ratio', 'backward_ratio', 'total_ratio'):
                row.pop(key, None)


def columns_of(results):
    """The table's columns; a cell that a record has nothing for stays empty."""
    base = next(iter(results.values()))

    def number(key, form):
        return lambda row: None if row.get(key) is None else form.format(row[key])

    def relative(key, form, of):
        return lambda row: None if row.get(key) is None else form.format(row[key] / of)

    found = [Column('preset', lambda row: row['name'])]
    for head, key in (('saved MB', 'saved_bytes'), ('peak MB', 'peak_bytes')):
        found += [Column(head, relative(key, '{:.1f}', 1e6)), Column('ratio', relative(key, '{:.3f}', base[key]))]
    rest = dict(forward_ratio='forward', backward_ratio='backward', total_ratio='total')
    rest = {key: (head, '{:.2f}') for key, head in rest.items()}
    rest |= dict(
        cosine=('cosine', '{:.4f}'), relative_error=('error', '{:.4f}'), drawn_error=('gradient error', '{:.1e}')
    )
    rest |= dict(graphs_of_5_sizes=('graphs', '{}'), compile_s=('compile s', '{:.1f}'), reason=('', '{}'))
    used = {key for row in results.values() for key in row}
    return found + [Column(head, number(key, form)) for key, (head, form) in rest.items() if key in used]


def print_table(results):
    print(text_table(columns_of(results), [dict(row, name=name) for name, row in results.items()]))


if __name__ == '__main__':
    main()
