"""What a training step of a whole detector keeps in memory, part by part, in every variant, relative to the first.

    python tools/analysis_tools/benchmark_memory.py configs/sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py
    python tools/analysis_tools/benchmark_memory.py mmdet::retinanet/retinanet_r50_fpn_1x_coco.py --variants none
    python tools/analysis_tools/benchmark_memory.py CONFIG --variants none recompute block+targets+cp-heads --boxes 90

Forward pass, backward pass and optimizer step as the config has them, mixed precision included, on random images with
random boxes. On CUDA the allocator's statistics and times; without CUDA the bytes of all tensors, made as CUDA's rules
would have them (what a kernel uses inside itself, and fragmentation, are not in it). A variant is a preset
of the backbone, with pieces joined by '+'. With 'skip' the bytes are those of one step as drawn; others may drop less.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.detector import check_case, measure_detector
from sbp_mmdet.analysis.device import if_it_fits
from sbp_mmdet.analysis.inputs import add_inputs, inputs_of
from sbp_mmdet.analysis.planner import parse_size
from sbp_mmdet.analysis.report import picture, table
from sbp_mmdet.analysis.variants import PIECES, applicable, load_config, with_variant
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs
from sbp_mmdet.settings import PRESETS


def case_parser(description: str) -> argparse.ArgumentParser:
    """Arguments of what is measured: a config, variants of it, and a batch."""
    pieces = '\n'.join(f'  {name}: {text}' for name, text in PIECES.items())
    parser = argparse.ArgumentParser(
        description=description, epilog=f'pieces:\n{pieces}', formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument(
        '--variants', '--presets', '--modes', nargs='+', default=list(PRESETS), metavar='VARIANT',
        help=f'preset or preset+piece+piece; first is the baseline (default: {[*PRESETS]})',
    )  # fmt: skip
    add_inputs(parser)
    parser.add_argument('--boxes', type=int, default=60, help='ground-truth boxes in each image (default: 60)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    add_outputs(parser)
    return parser


def read_case(
    parser: argparse.ArgumentParser, args: argparse.Namespace, choose: Callable = applicable, least_rounds: int = 0
) -> tuple[Config, list[str], dict, str]:
    """What the arguments stand for; ends with a message where they are wrong, before anything is measured.

    Args:
        parser (ArgumentParser): From :func:`case_parser`, with ``--rounds``.
        args (Namespace): What it parsed.
        choose (Callable): Sorts variants as ``applicable`` does. Default: ``applicable``.
        least_rounds (int): Fewer rounds are refused. Default: 0.

    Returns:
        tuple: Config, variants that apply, the case (``batch``, ``height``, ``width``, ``boxes``, ``device``), title.
    """
    try:
        size = parse_size(args.size) if args.size else None
        config = load_config(args.config, args.cfg_options)
        inputs = inputs_of(config, args.batch, size)
        case = dict(batch=inputs.batch, boxes=args.boxes, device=args.device)
        check_case(**case, rounds=args.rounds, least_rounds=least_rounds)
        variants, refused = choose(config, args.variants)
    except ValueError as error:
        parser.error(str(error))
    for variant, reason in refused.items():
        print(f'does not apply: {variant} ({reason})')
    if not variants:
        parser.error('none of the variants applies')
    title = f'{Path(args.config).stem}\n'
    title += f'{inputs.batch} x 3 x {inputs.height} x {inputs.width}, {args.boxes} boxes an image, {args.device}'
    print(title)
    return config, variants, dict(case, height=inputs.height, width=inputs.width), title


def main():
    parser = case_parser(__doc__)
    parser.add_argument('--rounds', type=int, default=5, help='timed steps, on CUDA (default: 5)')
    parser.add_argument('--compute', action='store_true', help='on a CPU, carry out all arithmetic: slow, same bytes')
    parser.add_argument(
        '--untrained-proposals', action='store_true', help="the untrained RPN's own, not those of a trained one"
    )
    args = parser.parse_args()
    config, variants, case, title = read_case(parser, args)
    options = dict(compute=args.compute, trained_proposals=not args.untrained_proposals)
    rows = []
    bar = ProgressBar(len(variants))
    for variant in variants:
        changed = with_variant(config, variant)
        row = if_it_fits(lambda: measure_detector(changed, rounds=args.rounds, **case, **options))  # noqa: B023
        rows.append(dict(variant=variant, **row))
        bar.update()
    print('\n' + table(rows))
    options['compute'] |= args.device != 'cpu'
    case = dict(config=Path(args.config).stem, **case, **options)
    results = dict(machine=describe_machine(args.device), case=case, rows=rows)
    write_outputs(args, results, lambda path: picture(rows, title, path), indent=1)


if __name__ == '__main__':
    main()
