"""Runs the trainings of an experiment with several seeds each, and reports their results.

    python research/training_study.py research/experiments/nuclei.py
    python research/training_study.py research/experiments/coco.py --slurm PARTITION --jobs 2
    python research/training_study.py research/experiments/coco.py --no-run --write configs/sbp_convnext/README.md

Finished runs stay in the work directory, and a killed run continues from its last checkpoint. So you can stop and
continue a study, and add settings or seeds. --no-run trains nothing and reports existing results, also of runs that are
not finished. If the experiment has the paper's values, they are part of the table, which --write puts into pages
between <!-- results: NAME --> and <!-- end -->.
"""

import argparse
import os
import sys
from pathlib import Path

from accuracy import accuracy_table, describe
from experiment import Experiment, read_experiment
from mmengine.config import DictAction
from mmengine.utils import ProgressBar
from paper_table import fill, means, paper_table
from provenance import describe_machine, output_file, write_json
from trainings import Launcher, look, plan, run_all

from sbp_mmdet.resume import AtomicBackend

TOOLS = Path(__file__).parents[1] / 'tools'


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('experiment', help='file of the experiment')
    parser.add_argument(
        '--work-dir', type=Path, help='folder of all training runs (default: work_dirs/NAME of the experiment)'
    )
    parser.add_argument('--labels', nargs='+', default=[], help='run only these settings (default: all)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[], help="seeds to run (default: the experiment's)")
    parser.add_argument('--jobs', type=int, default=1, help='number of simultaneous training runs (default: 1)')
    parser.add_argument('--gpus', type=int, help="GPUs of each training run, with torchrun (default: the experiment's)")
    parser.add_argument('--slurm', metavar='PARTITION', default='', help='run each training as a Slurm job')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, help='overrides of all configs')
    parser.add_argument('--no-run', action='store_true', help='train nothing, report the results in the work directory')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    parser.add_argument('--write', nargs='+', type=Path, default=[], help="pages with the paper's table")
    return parser, parser.parse_args()


def read(args):
    """Return the experiment with the changes of the command line."""
    fields = dict(vars(read_experiment(args.experiment)))
    fields['options'] = {**fields['options'], **args.cfg_options}
    fields['gpus'] = fields['gpus'] if args.gpus is None else args.gpus
    if args.jobs < 1 or fields['gpus'] < 0:
        raise ValueError(f'--jobs {args.jobs} must be 1 or more, --gpus {args.gpus} 0 or more')
    if args.jobs > 1 and fields['gpus'] and not (args.slurm or args.no_run):
        raise ValueError(f'--jobs {args.jobs}: all would train on the same GPUs; leave it out, or give --slurm')
    return Experiment(**fields)


def results_of(args, experiment, trainings):
    """Return the results by label and seed."""
    if args.no_run:
        results = {training.label: {} for training in trainings}
        for training in trainings:
            if (found := look(training)) is not None:
                results[training.label][training.seed] = found
        if not any(results.values()):
            raise ValueError(f'no log yet in {trainings[0].folder.parent}')
        return results
    launcher = Launcher(TOOLS, experiment.gpus, args.slurm)
    # Without a launcher trainings share the cores, unless the user says how many threads each has.
    alone = 'OMP_NUM_THREADS' in os.environ or experiment.gpus or args.slurm
    threads = None if alone else max((os.cpu_count() or 1) // args.jobs, 1)
    return run_all(trainings, launcher, args.jobs, threads, ProgressBar(len(trainings)).update)


def report(args, experiment, results):
    """Print the tables, and write the files of the command line."""
    results = {label: {seed: runs[seed] for seed in sorted(runs)} for label, runs in results.items() if runs}
    content = dict(machine=describe_machine(), experiment=describe(experiment), results=results)
    print('\n' + accuracy_table(content))
    if experiment.paper:
        print('\n' + paper_table(experiment, means(results)))
    for page in args.write:
        AtomicBackend().put_text(fill(page, experiment, means(results)), page)
    if args.json:
        write_json(args.json, content, indent=None)


def main():
    parser, args = parse_args()
    try:
        experiment = read(args)
        work_dir = args.work_dir or Path('work_dirs', experiment.name)
        trainings = plan(experiment, work_dir, args.labels, args.seeds)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        report(args, experiment, results_of(args, experiment, trainings))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f'\n{error}')


if __name__ == '__main__':
    main()
