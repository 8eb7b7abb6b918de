"""Says, without a GPU, with which settings a config trains within a GPU's memory, and which of them is the fastest.

    python tools/plan_memory.py CONFIG --budget 8GiB
    python tools/plan_memory.py CONFIG --budget 11GiB --batch 2 --size 800x1333 --boxes 60 --gpus 8

The bytes of a training step are counted tensor by tensor (see benchmark_memory.py). On top come a margin of 10 % (what
the allocator rounds up and cannot use, what kernels use inside themselves) and 0.6 GB for CUDA's context. Neither the
margin nor the order of speeds was compared with a GPU yet. 'skip' leaves out what stochastic depth drops; its need is
that of a step in which nothing is dropped.
"""

import argparse

from mmengine.config import DictAction

from sbp_mmdet.analysis.detector import measure_detector
from sbp_mmdet.analysis.planner import (
    CONTEXT,
    GRADIENTS,
    MARGIN,
    candidates,
    cfg_options,
    choose,
    parse_bytes,
    parse_size,
    snippet,
    worst_case,
)
from sbp_mmdet.analysis.variants import is_convnext, load_config, with_setting
from sbp_mmdet.reporting import format_bytes

KINDS = {
    'paper': "the paper's gradients (SBP)",
    'nearest': "gradients near the exact ones (dropped positions send theirs by their neighbours' activations)",
    'int8': 'gradients exact to about a hundredth (what is stored is rounded to int8)',
    'exact': 'exact gradients',
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--budget', required=True, help='memory of the GPU: 8GiB, 7.5GB')
    parser.add_argument('--batch', type=int, default=2, help='images on the GPU (default: 2)')
    parser.add_argument('--size', default='800x1333', help='the largest image of the pipeline (default: 800x1333)')
    parser.add_argument('--boxes', type=int, default=60, help='boxes in an image; COCO has up to 93 (default: 60)')
    parser.add_argument('--gpus', type=int, default=1, help='above 1: with the buckets of distributed training')
    parser.add_argument('--exact', action='store_true', help='only settings with exact gradients')
    parser.add_argument('--adamw8bit', action='store_true', help='consider 8-bit optimizer states as well')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        budget, (height, width) = parse_bytes(args.budget), parse_size(args.size)
        for name in ('batch', 'boxes', 'gpus'):
            if getattr(args, name) < 1:
                raise ValueError(f'--{name} {getattr(args, name)} must be 1 or more')
        config = load_config(args.config, args.cfg_options)
        if not config.model.get('backbone'):
            raise ValueError(f'{args.config}: the model has no backbone')
    except ValueError as error:
        parser.error(str(error))

    def measure(setting):
        return measure_detector(
            with_setting(config, worst_case(setting)),
            batch=args.batch,
            height=height,
            width=width,
            boxes=args.boxes,
        )

    def tell(setting, need, fits):
        print(f'  {setting:<60} {format_bytes(need):>8}  {"fits" if fits else "too much"}', flush=True)

    print(
        f'{args.batch} images of {height} x {width}, {args.boxes} boxes each, {format_bytes(budget)}; '
        f'with {MARGIN:.0%} margin and {format_bytes(CONTEXT)} for CUDA:'
    )
    if not is_convnext(config):
        print(f'The backbone is {config.model.backbone.type}, not a ConvNeXt: SBP does not apply, what is exact does.')
    found = False
    for kind in ['exact'] if args.exact or not is_convnext(config) else GRADIENTS:
        settings = candidates(config, kind, eight_bit=args.adamw8bit)
        print(f'\nWith {KINDS[kind]}:')
        setting = choose(settings, budget, measure, ddp=args.gpus > 1, tell=tell)
        if setting is None:
            print(f'Nothing fits into {format_bytes(budget)}.')
            continue
        found = True
        print(f'\nThe fastest that fits: {setting}\n\n{snippet(config, setting)}')
        if options := cfg_options(config, setting):
            print(f'\nor: {options}')
    if not found:
        advice = 'smaller images, a smaller batch' + ('' if args.adamw8bit else ', --adamw8bit')
        raise SystemExit(f'\nNo setting fits into {args.budget}. What is left: {advice}, a smaller model.')


if __name__ == '__main__':
    main()
