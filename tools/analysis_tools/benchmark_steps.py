"""How long a training step of a whole detector takes in every variant, relative to the first.

    python tools/analysis_tools/benchmark_steps.py CONFIG --variants none with_cp recompute --size 320x533 --boxes 20

Forward pass, backward pass and optimizer step on random images with random boxes; on CUDA with mixed precision as the
config has it, on a CPU in fp32. The variants take turns: a step is compared with the first variant's step of the same
round. A variant is a preset of the backbone, with pieces joined by '+'. One that is named twice shows the noise; 'skip'
leaves out other images in each round, so give it many. Proposals are those of a trained RPN, so that the heads get as
many positive samples as in training.

`--rivals` adds what others offer, applied to the backbone; what they compile is compiled in the step that is not
counted. It also adds for every variant what is held when the forward pass ends and at most until the backward pass ends
(on top of weights and optimizer states, by the allocator), and the error of the backbone's gradients in fp32 while
stochastic depth drops images. One that cannot run is a row that says why.
"""

import functools
from pathlib import Path

from benchmark_memory import case_parser, read_case
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.benchmark import keep_freed_memory
from sbp_mmdet.analysis.report import against_time, steps_picture, steps_table
from sbp_mmdet.analysis.rivals import RIVALS
from sbp_mmdet.analysis.step_times import measure_steps, timed_variants
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import write_outputs


def main():
    parser = case_parser(__doc__)
    parser.add_argument('--rounds', type=int, default=5, help='timed steps of each variant (default: 5)')
    parser.add_argument(
        '--rivals', nargs='*', choices=RIVALS, metavar='RIVAL', help=f'also these (without a name: all of {[*RIVALS]})'
    )
    args = parser.parse_args()
    rivals = [] if args.rivals is None else args.rivals or [*RIVALS]
    args.variants += rivals
    choose = functools.partial(timed_variants, device=args.device)
    config, variants, case, title = read_case(parser, args, choose, least_rounds=1)
    keep_freed_memory(args.device)
    bar = ProgressBar(len(variants) * (1 + args.rounds))
    try:
        rows = measure_steps(
            config, variants, rounds=args.rounds, costs=args.rivals is not None, done=bar.update, **case
        )
    except ValueError as error:
        parser.error(str(error))
    print('\n' + steps_table(rows))
    case = dict(config=Path(args.config).stem, rounds=args.rounds, trained_proposals=True, **case)
    results = dict(machine=describe_machine(args.device), case=case, rows=rows)

    def draw(path):
        if args.rivals is None:
            steps_picture(rows, title, path)
        else:
            against_time(rows, rivals, title, path)

    write_outputs(args, results, draw, indent=1)


if __name__ == '__main__':
    main()
