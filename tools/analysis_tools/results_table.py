"""The paper's table beside what trainings of it reached, and what is not equal between them.

    python tools/analysis_tools/results_table.py experiments/coco.py
    python tools/analysis_tools/results_table.py experiments/coco.py --log 'Mask R-CNN, ConvNeXt-T=/path/of/work_dir' \\
        --write README.md configs/sbp_convnext/README.md configs/sbp_convnext/metafile.yml

Trainings are looked for where training_study.py puts them; --log names any work directory of mmdet or mmpretrain in
their place. A training of another schedule, batch, start, data or evaluation is refused: it says nothing about the
paper's AP. Nothing is trained.
"""

import argparse
from pathlib import Path

from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs
from sbp_mmdet.resume import AtomicBackend
from sbp_mmdet.study.experiments import read_experiment
from sbp_mmdet.study.paper_table import fill, paper_text, read_trained
from sbp_mmdet.study.trainings import read_log


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('experiment', help='with the values of the paper')
    parser.add_argument('--work-dir', type=Path, help='of all trainings (default: work_dirs/NAME of the experiment)')
    parser.add_argument('--log', action='append', default=[], metavar='LABEL=FOLDER', help='may repeat')
    parser.add_argument('--write', nargs='+', type=Path, default=[], help='pages to write the tables into')
    add_outputs(parser, plot=False)
    return parser, parser.parse_args()


def folders(experiment, work_dir, logs):
    """Label to work directories."""
    found = {}
    for label in experiment.labels:
        places = [work_dir / f'{label}-{seed}' for seed in experiment.seeds]
        found[label] = [place for place in places if place.is_dir()]
    given = {}
    for text in logs:
        label, equals, folder = text.partition('=')
        if not equals or not Path(folder).is_dir():
            raise ValueError(f'--log {text!r} must be LABEL=FOLDER, with a folder that exists')
        if not (read_log(Path(folder)) or {}).get('curve'):
            raise ValueError(
                f'--log {text!r}: its TIME/vis_data/scalars.json has no AP or top-1; was it evaluated in training?'
            )
        given.setdefault(label, []).append(Path(folder))
    return found | given


def main():
    parser, args = parse_args()
    try:
        experiment = read_experiment(args.experiment)
        if not experiment.paper:
            raise ValueError(f'{args.experiment} has no values of a paper; training_study.py --no-run shows its table')
        work_dir = args.work_dir or Path('work_dirs', experiment.name)
        measured, notes = read_trained(experiment, folders(experiment, work_dir, args.log))
        for page, (text, n) in {page: fill(page, experiment, measured) for page in args.write}.items():
            AtomicBackend().put_text(text, page)
            print(f'{page}: {n} tables')
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print('\n'.join([paper_text(experiment, measured), *notes]))
    write_outputs(args, dict(machine=describe_machine(), experiment=experiment.name, measured=measured))


if __name__ == '__main__':
    main()
