"""What settings of sbp_cfg do to a whole training: the same config trained with several settings and seeds.

    python tools/analysis_tools/training_study.py CONFIG --work-dir work_dirs/study --seeds 0 1 2 \\
        --setting 'plain: none' --setting 'zero: keep_ratio=0.5' --setting 'nearest: keep_ratio=0.5 dropped=nearest'

Runs that finished stay in the work directory, so a study that was stopped goes on where it was, and a setting or seed
can be added. On one machine, without a launcher; --jobs runs several trainings side by side.
"""

import argparse
import concurrent.futures
import copy
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from mmengine.config import DictAction
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.benchmark import describe_machine
from sbp_mmdet.analysis.output import add_outputs, write_outputs
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.study.gradients import backbone_with
from sbp_mmdet.study.settings import parse_setting

__all__ = ['collect', 'draw', 'print_table', 'run_training']

TRAIN = Path(__file__).parents[1] / 'train.py'
METRICS = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}


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


def read_setting(text):
    """Label and ``sbp_cfg``; 'label: none' is the plain backbone."""
    label, _, rest = text.partition(':')
    return (label.strip(), None) if rest.strip() == 'none' else parse_setting(text)


def run_training(config, sbp_cfg, seed, folder, threads):
    """Trains once, unless the folder has the result of the same training.

    Args:
        config (Config): Of the detector.
        sbp_cfg (dict | None): The setting.
        seed (int): Of the training.
        folder (Path): Work directory of this training.
        threads (int): CPU threads.

    Returns:
        dict: ``ap`` by name, and the ``loss`` by iteration as logged.

    Raises:
        RuntimeError: If the training fails; names the log.
    """
    config = copy.deepcopy(config)
    config.randomness = dict(config.get('randomness') or {}, seed=seed)
    config.model.backbone.update(type='SBPConvNeXt', sbp_cfg=sbp_cfg)
    config.custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
    result, text = folder / 'result.json', config.pretty_text
    if result.exists() and (found := json.loads(result.read_text()))['config'] == text:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    config.dump(folder / 'config.py')
    with open(folder / 'log.txt', 'w') as log:
        command = [sys.executable, TRAIN, folder / 'config.py', '--work-dir', folder]
        env = dict(os.environ, OMP_NUM_THREADS=str(threads))
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env).returncode:
            raise RuntimeError(f'a training failed; {log.name} says why')
    scalars = max(folder.glob('*/vis_data/scalars.json'), key=lambda path: path.stat().st_mtime)
    found = dict(collect(scalars.read_text().splitlines()), config=text)
    whole = result.with_suffix('.part')
    whole.write_text(json.dumps(found))
    whole.replace(result)
    return found


def collect(lines):
    """The last AP and all losses of mmengine's log of scalars.

    Args:
        lines (list[str]): JSON, one entry each.

    Returns:
        dict: ``ap``: name to number; ``loss``: pairs of iteration and loss.
    """
    entries = [json.loads(line) for line in lines]
    ap = {name: e[key] for e in entries for name, key in METRICS.items() if key in e}
    return dict(ap=ap, loss=[[e['iter'], e['loss']] for e in entries if 'loss' in e])


def print_table(results):
    """Mean AP of each setting and its range over the seeds."""
    for name in METRICS:
        for label, runs in results.items():
            values = [run['ap'][name] for run in runs.values() if name in run['ap']]
            if values:
                cells = f'{statistics.fmean(values):.3f}  ({min(values):.3f} to {max(values):.3f}, {len(values)} seeds)'
                print(f'{name:<8} {label:<16} {cells}')


def draw(results, out):
    """Losses, mean over the seeds with their range, and the AP of each training."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    fig, (left, *right) = plt.subplots(1, 1 + len(METRICS), figsize=(12, 4), width_ratios=[2, *[1] * len(METRICS)])
    for i, (label, runs) in enumerate(results.items()):
        steps = [step for step, _ in next(iter(runs.values()))['loss']]
        columns = list(zip(*([loss for _, loss in run['loss']] for run in runs.values()), strict=True))
        left.plot(steps, [statistics.fmean(c) for c in columns], color=f'C{i}', label=label)
        left.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=f'C{i}', alpha=0.15)
        for axis, name in zip(right, METRICS, strict=True):
            values = [run['ap'][name] for run in runs.values() if name in run['ap']]
            axis.plot([i] * len(values), values, 'o', color=f'C{i}', alpha=0.7)
    left.set(xlabel='iteration', ylabel='training loss')
    left.legend()
    for axis, name in zip(right, METRICS, strict=True):
        axis.set(title=f'{name}, one point per seed', xticks=range(len(results)), xlim=(-0.5, len(results) - 0.5))
        axis.set_xticklabels(results, rotation=30)
        axis.grid(axis='y', alpha=0.3)
    fig.tight_layout()
    fig.savefig(out, dpi=80)


def main():
    parser, args = parse_args()
    try:
        config = load_config(args.config, args.cfg_options)
        settings = dict(map(read_setting, args.setting))
        if len(settings) < len(args.setting):
            raise ValueError(f'--setting: two have the same label of {list(settings)}')
        for sbp_cfg in settings.values():
            backbone_with(config, sbp_cfg)
        if args.jobs < 1 or len(set(args.seeds)) < len(args.seeds):
            raise ValueError(f'--jobs {args.jobs} must be 1 or more, and --seeds {args.seeds} must differ')
    except (ValueError, OSError) as error:
        parser.error(str(error))
    threads = int(os.environ.get('OMP_NUM_THREADS') or max((os.cpu_count() or 1) // args.jobs, 1))
    results = {label: {} for label in settings}
    bar = ProgressBar(len(settings) * len(args.seeds))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {}
        for seed in args.seeds:  # seed by seed: a study that is stopped has compared something
            for label, sbp_cfg in settings.items():
                folder = args.work_dir / f'{label}-{seed}'
                job = pool.submit(run_training, config, sbp_cfg, seed, folder, threads)
                jobs[job] = label, seed
        try:
            for job in concurrent.futures.as_completed(jobs):
                label, seed = jobs[job]
                results[label][seed] = {key: job.result()[key] for key in ('ap', 'loss')}
                bar.update()
        except RuntimeError as error:
            print(f'\n{label}, seed {seed}: {error}; trainings beside it go on to their end', file=sys.stderr)
            raise SystemExit(1) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # also where somebody interrupts: nothing new is started
    print()
    print_table(results)
    found = dict(machine=describe_machine(), settings=settings, results=results)
    write_outputs(args, found, lambda path: draw(results, path))


if __name__ == '__main__':
    main()
