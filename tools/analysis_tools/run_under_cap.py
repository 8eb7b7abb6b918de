"""Real training steps while torch may have no more of the GPU than a cap: ok, or out of memory. Needs a GPU.

    python tools/analysis_tools/run_under_cap.py CONFIG --cap 8GiB --variants none with_cp recompute exact-block

The claims of this package, 60 boxes, 800 x 1333, batch 2, fp16:

    B=configs/sbp_convnext/cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py
    T=configs/sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py
    LEAN=block+targets+cp-heads+cp-rpn+cp-neck
    python tools/analysis_tools/run_under_cap.py $B --cap 8GiB --variants none recompute $LEAN --json cap_b_8.json
    python tools/analysis_tools/run_under_cap.py $B --cap 6GiB --variants none recompute $LEAN --json cap_b_6.json
    python tools/analysis_tools/run_under_cap.py $T --cap 4GiB --variants none recompute $LEAN --json cap_t_4.json
"""

import argparse
from pathlib import Path

import torch
from mmengine.config import DictAction
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.cap import cuda_cap, run_under_cap
from sbp_mmdet.analysis.detector import check_case
from sbp_mmdet.analysis.inputs import add_inputs, inputs_of
from sbp_mmdet.analysis.planner import parse_bytes, parse_size
from sbp_mmdet.analysis.variants import applicable, load_config
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, format_bytes, write_outputs


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--cap', required=True, help='what torch may have: 8GiB')
    parser.add_argument(
        '--variants', '--presets', '--modes', nargs='+', default=['none', 'recompute'], metavar='VARIANT',
        help='preset or preset+piece+piece (default: none recompute)',
    )  # fmt: skip
    add_inputs(parser)
    parser.add_argument('--boxes', type=int, default=60, help='boxes in each image (default: 60)')
    parser.add_argument('--rounds', type=int, default=5, help='timed steps (default: 5)')
    parser.add_argument('--device', default='cuda', help='default: cuda')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    add_outputs(parser, plot=False)
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        cap, size = parse_bytes(args.cap), parse_size(args.size) if args.size else None
        config = load_config(args.config, args.cfg_options)
        inputs = inputs_of(config, args.batch, size)
        variants, refused = applicable(config, args.variants)
        if not (args.device.startswith('cuda') and torch.cuda.is_available()):
            raise ValueError(
                f'--device {args.device}: a cap needs a GPU that torch sees; tools/plan_memory.py predicts without one'
            )
        check_case(batch=inputs.batch, boxes=args.boxes, rounds=args.rounds, device=args.device)
        if not variants:
            raise ValueError(f'--variants: none applies: {"; ".join(refused.values())}')
        with cuda_cap(cap, args.device):
            pass  # that the GPU has as much is known now, and not after a variant was built
    except ValueError as error:
        parser.error(str(error))
    for variant, reason in refused.items():
        print(f'does not apply: {variant} ({reason})')
    case = dict(batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=args.boxes, rounds=args.rounds)
    bar = ProgressBar(len(variants))
    rows = run_under_cap(config, variants, cap, device=args.device, done=bar.update, **case)
    print(f'\n{Path(args.config).stem} under {args.cap}:')
    for row in rows:
        result = 'out of memory'
        if row['fits']:
            result = f'ok, peak {format_bytes(row["peak"])}, reserved {format_bytes(row["reserved"])}'
            result += f', {row["step_s"] * 1e3:.0f} ms a step' if row['step_s'] else ''
            result += f', {row["retries"]} allocator retries' if row.get('retries') else ''
        print(f'  {row["variant"]:<44} {result}')
    results = dict(machine=describe_machine(args.device), case=dict(case, config=args.config, cap=cap), rows=rows)
    write_outputs(args, results, indent=1)


if __name__ == '__main__':
    main()
