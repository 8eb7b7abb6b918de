"""Runs the trainings of an experiment, several seeds each, and says what they reached.

    python research/training_study.py research/experiments/nuclei.py
    python research/training_study.py research/experiments/coco.py --slurm PARTITION --jobs 2

Runs that finished stay in the work directory, and one that was killed goes on from its last checkpoint, so a study that
was stopped goes on where it was, and a setting or seed can be added. --no-run trains nothing and reports what is there,
of trainings that still run as well.
"""

import argparse
import os
import sys
from pathlib import Path

from accuracy import accuracy_picture, accuracy_table, describe
from experiment import Experiment, read_experiment
from mmengine.config import DictAction
from mmengine.utils import ProgressBar
from trainings import Launcher, look, plan, run_all

from sbp_mmdet.plan.tables import describe_machine, output_file, write_json

TOOLS = Path(__file__).parents[1] / 'tools'


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('experiment', help='its file')
    parser.add_argument('--work-dir', type=Path, help='of all trainings (default: work_dirs/NAME of the experiment)')
    parser.add_argument('--labels', nargs='+', default=[], help='these settings only (default: all)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[], help="(default: the experiment's)")
    parser.add_argument('--jobs', type=int, default=1, help='trainings at a time (default: 1)')
    parser.add_argument('--gpus', type=int, help="of each training, through torchrun (default: the experiment's)")
    parser.add_argument('--slurm', metavar='PARTITION', default='', help='each training is a job of Slurm')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, help='overrides of all configs')
    parser.add_argument('--no-run', action='store_true', help='train nothing, report what the work directory holds')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    parser.add_argument('--plot', type=output_file, help='write a picture (PNG) here')
    return parser, parser.parse_args()


def read(args):
    """The experiment, as the command line changes it."""
    fields = dict(vars(read_experiment(args.experiment)))
    fields['options'] = {**fields['options'], **args.cfg_options}
    fields['gpus'] = fields['gpus'] if args.gpus is None else args.gpus
    if args.jobs < 1 or fields['gpus'] < 0:
        raise ValueError(f'--jobs {args.jobs} must be 1 or more, --gpus {args.gpus} 0 or more')
    if args.jobs > 1 and fields['gpus'] and not args.slurm and not args.no_run:
        raise ValueError(
            f'--jobs {args.jobs} with {fields["gpus"]} GPUs each: all would train on the same ones; leave --jobs out, '
            'or give --slurm'
        )
    return Experiment(**fields)


def threads_of(launcher, jobs):
    """CPU threads of a training; None where the user or the launcher says it."""
    if 'OMP_NUM_THREADS' in os.environ or launcher.gpus or launcher.partition:
        return None
    return max((os.cpu_count() or 1) // jobs, 1)


def report(args, experiment, results):
    results = {label: {seed: runs[seed] for seed in sorted(runs)} for label, runs in results.items() if runs}
    found = dict(machine=describe_machine(), experiment=describe(experiment), results=results)
    print('\n' + accuracy_table(found))
    if args.json:
        write_json(args.json, found, indent=None)
    if args.plot:
        accuracy_picture(found, args.plot)


def main():
    parser, args = parse_args()
    try:
        experiment = read(args)
        work_dir = args.work_dir or Path('work_dirs', experiment.name)
        trainings = plan(experiment, work_dir, args.labels, args.seeds)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        if args.no_run:
            results = {training.label: {} for training in trainings}
            for training in trainings:
                if (found := look(training)) is not None:
                    results[training.label][training.seed] = found
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
