"""Says, without a GPU, with which presets and pieces a config trains within a GPU's memory, and which are the fastest.

    python tools/plan_memory.py CONFIG --budget 8GiB
    python tools/plan_memory.py CONFIG --budget 11GiB --batch 2 --size 800x1333 --boxes 60 --gpus 8
    python tools/plan_memory.py CONFIG --budget 8GiB --measured steps.json

The bytes of a training step are counted tensor by tensor (see benchmark_memory.py). On top come a margin of 10 % (what
the allocator rounds up and cannot use, what kernels use inside themselves) and 0.6 GB for CUDA's context. Neither the
margin nor the order of speeds was compared with a GPU yet. `--measured` orders by times that benchmark_steps.py wrote
with --json (or benchmark_memory.py on a GPU), as far as they go: of a variant that is not among them its preset and
pieces are added up, and guesses fill the rest. 'skip' leaves out what stochastic depth drops; its need is that of a
step in which nothing is dropped.
"""

import argparse
import json
import traceback
from pathlib import Path

from mmengine.config import DictAction
from sbp_mmdet.families import family_of
from sbp_mmdet.reporting import format_bytes

from sbp_mmdet.analysis.detector import MOST_IMAGES, measure_detector
from sbp_mmdet.analysis.inputs import add_inputs, inputs_of
from sbp_mmdet.analysis.planner import (
    CONTEXT,
    MARGIN,
    candidates,
    cfg_options,
    choose,
    measured_times,
    parse_bytes,
    parse_size,
    snippet,
    worst_case,
)
from sbp_mmdet.analysis.variants import load_config, with_variant, without_hook
from sbp_mmdet.settings import GRADIENTS


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--budget', required=True, help='memory of the GPU: 8GiB, 7.5GB')
    add_inputs(parser)
    parser.add_argument('--boxes', type=int, default=60, help='boxes in an image; COCO has up to 93 (default: 60)')
    parser.add_argument('--gpus', type=int, default=1, help='above 1: with the buckets of distributed training')
    parser.add_argument('--exact', action='store_true', help='only variants with exact gradients')
    parser.add_argument('--adamw8bit', action='store_true', help='consider 8-bit optimizer states as well')
    parser.add_argument('--measured', type=Path, metavar='FILE', help='JSON of benchmark_steps.py: order by its times')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    return parser, parser.parse_args()


def reason(error: Exception) -> str:
    """What went wrong, and where, in a line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if 'torch' not in Path(f.filename).parts]
    text = ' '.join(str(error).split())[:200]
    where = f'{Path(frames[-1].filename).name}, line {frames[-1].lineno}'
    return f'{type(error).__name__}{text and ": "}{text} ({where})'


def read_times(path: Path) -> dict[str, float]:
    """The times in a file, see :func:`measured_times`; says what they are of. Raises a ValueError if there are none."""
    try:
        results = json.loads(path.read_text())
        times = measured_times(results)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f'--measured {path}: {error}') from error
    machine, case = results.get('machine', {}), results.get('case', {})
    print(f'Order by times of {case.get("config")} on {machine.get("device")} ({machine.get("date")}).')
    return times


def main():
    parser, args = parse_args()
    try:
        budget, size = parse_bytes(args.budget), parse_size(args.size) if args.size else None
        for name in ('batch', 'boxes', 'gpus'):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(f'--{name} {getattr(args, name)} must be 1 or more')
        config = load_config(args.config, args.cfg_options)
        if not config.model.get('backbone'):
            raise ValueError(f'{args.config}: the model has no backbone')
        plain = without_hook(config)
        inputs = inputs_of(config, args.batch, size)
        measured = read_times(args.measured) if args.measured else None
    except ValueError as error:
        parser.error(str(error))

    def measure(variant):
        return measure_detector(
            with_variant(plain, worst_case(variant)),
            batch=inputs.batch,
            height=inputs.height,
            width=inputs.width,
            boxes=args.boxes,
        )

    def tell(variant, need, fits):
        print(f'  {variant:<60} {format_bytes(need):>8}  {"fits" if fits else "too much"}', flush=True)

    extended = f'; more than {MOST_IMAGES} images: told from 1 and 2' if inputs.batch > MOST_IMAGES else ''
    print(
        f'{inputs.batch} images of {inputs.height} x {inputs.width}, {args.boxes} boxes each, {format_bytes(budget)}; '
        f'with {MARGIN:.0%} margin and {format_bytes(CONTEXT)} for CUDA ({inputs.source}{extended}):'
    )
    applies = family_of(config.model.backbone) is not None
    if not applies:
        print(f'SBP does not apply to the backbone, {config.model.backbone.type}; what is exact does.')
    found = False
    for kind in GRADIENTS if applies and not args.exact else ['exact']:
        variants = candidates(plain, kind, eight_bit=args.adamw8bit, measured=measured)
        if not variants:
            continue
        print(f'\nWith {GRADIENTS[kind]}:')
        try:
            variant = choose(variants, budget, measure, ddp=args.gpus > 1, tell=tell)
        except Exception as error:  # whatever a model's own code raises where it cannot do with our batch or device
            raise SystemExit(f'\n{args.config}: no training step of it runs here: {reason(error)}') from error
        if variant is None:
            print(f'Nothing fits into {format_bytes(budget)}.')
            continue
        found = True
        print(f'\nThe fastest that fits: {variant}\n\n{snippet(config, variant)}')
        if options := cfg_options(config, variant):
            print(f'\nor: {options}')
    if not found:
        advice = 'smaller images, a smaller batch' + ('' if args.adamw8bit else ', --adamw8bit')
        raise SystemExit(f'\nNo variant fits into {args.budget}. What is left: {advice}, a smaller model.')


if __name__ == '__main__':
    main()
