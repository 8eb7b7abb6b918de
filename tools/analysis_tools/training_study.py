"""What settings of sbp_cfg do to a whole training: the same config trained with several settings and seeds.

    python tools/analysis_tools/training_study.py CONFIG --work-dir work_dirs/study --seeds 0 1 2 \\
        --setting 'plain: none' --setting 'zero: keep_ratio=0.5' --setting 'nearest: keep_ratio=0.5 dropped=nearest'

Runs that finished stay in the work directory, so a study that was stopped goes on where it was, and a setting or seed
can be added. On one machine, without a launcher; --jobs runs several trainings side by side.
"""

import argparse
import os
import sys
from pathlib import Path

from mmengine.config import DictAction
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs
from sbp_mmdet.study.trainings import ap_picture, ap_table, plan, read_setting, run_all

TRAIN = Path(__file__).parents[1] / 'train.py'


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--work-dir', type=Path, required=True, help='a folder for each training is made in here')
    parser.add_argument(
        '--setting',
        action='append',
        required=True,
        help="'label: keep_ratio=0.25 sampler=random', or 'label: none' for no SBP; may repeat",
    )
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='(default: 0 1 2)')
    parser.add_argument('--jobs', type=int, default=1, help='trainings at a time (default: 1)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    add_outputs(parser)
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        if args.jobs < 1:
            raise ValueError(f'--jobs {args.jobs} must be 1 or more')
        settings = dict(map(read_setting, args.setting))
        if len(settings) < len(args.setting):
            raise ValueError(f'--setting: two have the same label of {list(settings)}')
        trainings = plan(load_config(args.config, args.cfg_options), settings, args.seeds, args.work_dir)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    threads = None if 'OMP_NUM_THREADS' in os.environ else max((os.cpu_count() or 1) // args.jobs, 1)
    bar = ProgressBar(len(trainings))
    try:
        results = run_all(trainings, [sys.executable, TRAIN], args.jobs, threads, bar.update)
    except RuntimeError as error:
        sys.exit(f'\n{error}')
    print('\n' + ap_table(results))
    found = dict(machine=describe_machine(), settings=settings, results=results)
    write_outputs(args, found, lambda path: ap_picture(results, path))


if __name__ == '__main__':
    main()
