"""What settings of sbp_cfg do to whole trainings: an experiment, or a config with settings given here.

    python tools/analysis_tools/training_study.py experiments/nuclei.py
    python tools/analysis_tools/training_study.py experiments/coco.py --slurm PARTITION --jobs 2
    python tools/analysis_tools/training_study.py CONFIG --seeds 0 1 2 --work-dir work_dirs/study \\
        --setting 'plain: none' --setting 'zero: keep_ratio=0.5' --setting 'nearest: keep_ratio=0.5 dropped=nearest'

Runs that finished stay in the work directory, and one that was killed goes on from its last checkpoint, so a study that
was stopped goes on where it was, and a setting or seed can be added. --no-run trains nothing and reports what is there,
of trainings that still run as well.
"""

import argparse
import os
import sys
from pathlib import Path

from mmengine.config import DictAction
from mmengine.utils import ProgressBar

from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, compact, write_outputs
from sbp_mmdet.study.accuracy import accuracy_picture, accuracy_text, describe
from sbp_mmdet.study.experiments import Experiment, read_experiment
from sbp_mmdet.study.trainings import Launcher, look, plan, read_setting, run_all

TOOLS = Path(__file__).parents[1]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('file', help='an experiment; with --setting a config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--work-dir', type=Path, help='of all trainings (default: work_dirs/NAME of the experiment)')
    parser.add_argument(
        '--setting',
        action='append',
        default=[],
        help="'label: keep_ratio=0.25 sampler=random', or 'label: none' for no SBP; may repeat; makes FILE a config",
    )
    parser.add_argument('--labels', nargs='+', default=[], help='these settings only (default: all)')
    parser.add_argument('--seeds', type=int, nargs='+', help="(default: the experiment's; with --setting 0 1 2)")
    parser.add_argument('--jobs', type=int, default=1, help='trainings at a time (default: 1)')
    parser.add_argument('--gpus', type=int, help="of each training, through torchrun (default: the experiment's)")
    parser.add_argument('--slurm', metavar='PARTITION', default='', help='each training is a job of Slurm')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of all configs')
    parser.add_argument('--no-run', action='store_true', help='train nothing, report what the work directory holds')
    parser.add_argument('--commit', help='with --no-run: the code that trained where a folder does not name it')
    add_outputs(parser)
    return parser, parser.parse_args()


def read(args):
    """The experiment that the command line means."""
    options = args.cfg_options or {}
    if not args.setting:
        experiment = read_experiment(args.file)
        fields = dict(vars(experiment), options={**experiment.options, **options})
        return Experiment(**dict(fields, gpus=experiment.gpus if args.gpus is None else args.gpus))
    settings = dict(map(read_setting, args.setting))
    if len(settings) < len(args.setting):
        raise ValueError(f'--setting: two have the same label of {list(settings)}')
    seeds = args.seeds or [0, 1, 2]
    return Experiment(Path(args.file).stem, args.file, settings, options=options, seeds=seeds, gpus=args.gpus or 0)


def threads_of(launcher, jobs):
    """CPU threads of a training; None where the user or the launcher says it."""
    if 'OMP_NUM_THREADS' in os.environ or launcher.gpus or launcher.partition:
        return None
    return max((os.cpu_count() or 1) // jobs, 1)


def look_at(trainings, commit):
    """What the folders hold."""
    results = {training.label: {} for training in trainings}
    for training in trainings:
        if (found := look(training, commit)) is not None:
            results[training.label][training.seed] = found
    return results


def report(args, experiment, results):
    results = {label: {seed: runs[seed] for seed in sorted(runs)} for label, runs in results.items() if runs}
    found = dict(machine=describe_machine(), experiment=describe(experiment), results=results)
    print('\n' + accuracy_text(found))
    write_outputs(args, compact(found), lambda path: accuracy_picture(found, path))


def main():
    parser, args = parse_args()
    try:
        if args.jobs < 1 or (args.gpus or 0) < 0:
            raise ValueError(f'--jobs {args.jobs} must be 1 or more, --gpus {args.gpus} 0 or more')
        if args.commit and not args.no_run:
            raise ValueError('--commit is for --no-run: what is trained now names its own')
        experiment = read(args)
        if args.jobs > 1 and experiment.gpus and not args.slurm and not args.no_run:
            raise ValueError(
                f'--jobs {args.jobs} with {experiment.gpus} GPUs each: all would train on the same ones; leave --jobs '
                'out, or give --slurm'
            )
        work_dir = args.work_dir or Path('work_dirs', experiment.name)
        trainings = plan(experiment, work_dir, args.labels, args.seeds)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        if args.no_run:
            results = look_at(trainings, args.commit)
            if not any(results.values()):
                sys.exit(f'no log yet in {work_dir}')
        else:
            launcher = Launcher(TOOLS, experiment.gpus, args.slurm)
            bar = ProgressBar(len(trainings))
            results = run_all(trainings, launcher, args.jobs, threads_of(launcher, args.jobs), bar.update)
        report(args, experiment, results)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f'\n{error}')


if __name__ == '__main__':
    main()
