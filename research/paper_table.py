"""The paper's table beside what trainings of it reached, and what is not equal between them.

    python research/paper_table.py research/experiments/coco.py
    python research/paper_table.py research/experiments/coco.py --log 'Mask R-CNN, ConvNeXt-T=/path/of/work_dir' \\
        --write README.md configs/sbp_convnext/README.md configs/sbp_convnext/metafile.yml

Trainings are looked for where training_study.py puts them; --log names any work directory of mmdet or mmpretrain in
their place. A training of another schedule, batch, start, data or evaluation is refused: it says nothing about the
paper's AP. A page has its tables between ``<!-- results: NAME -->``, or ``<!-- results: NAME short -->``, and
``<!-- end -->``, in ``metafile.yml`` between ``# results: NAME`` and ``# end``.
"""

import argparse
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiment import Experiment, configs_of, read_experiment
from mmengine.config import Config
from trainings import Training, look, read_log

from sbp_mmdet.plan.tables import Column, markdown_table, text_table
from sbp_mmdet.resume import AtomicBackend
from sbp_mmdet.settings import Settings
from sbp_mmdet.surgery import model_hook_class

__all__ = ['differences', 'fill', 'paper_table', 'read_trained']

DETAILS = ('box AP', 'box AP50', 'box AP75', 'box AP small', 'box AP medium', 'box AP large')
# Where a machine keeps its data.
_PLACES = {'data_root', 'data_prefix', 'backend_args', 'metainfo'}


def _protocol(config, gpus):
    """What has to be equal, by name: plain values that any config of mmdet can be asked for."""
    config = config.to_dict()
    hooks = config.get('custom_hooks') or []
    model, wrapper, loop = (config.get(key) or {} for key in ('model', 'optim_wrapper', 'train_cfg'))
    train, val = config.get('train_dataloader') or {}, config.get('val_dataloader') or {}
    backbone = model.get('backbone') or {}
    return {
        'schedule': dict(
            {key: loop.get(key) for key in ('max_epochs', 'max_iters')}, param_scheduler=config.get('param_scheduler')
        ),
        'optimizer': _without(wrapper, {'accumulative_counts', 'loss_scale'}),
        'images of a step': (train.get('batch_size') or 0) * gpus * wrapper.get('accumulative_counts', 1),
        'weights': dict(
            init_cfg=backbone.get('init_cfg'), load_from=None if config.get('resume') else config.get('load_from')
        ),
        'training data': _without(train.get('dataset') or {}, _PLACES),
        'evaluation': dict(
            _without(val.get('dataset') or {}, _PLACES),
            evaluator=config.get('val_evaluator'),
            test_cfg=model.get('test_cfg'),
        ),
        'SBP': _gradients([backbone.get('sbp_cfg'), *(_without(h, {'type'}) for h in hooks if _kind(h) == 'LeanHook')]),
        'backbone': dict(
            _without(backbone, {'sbp_cfg', 'init_cfg', 'with_cp'}), type=_kind(backbone).removeprefix('SBP')
        ),
        'model': _without(model, {'backbone', 'test_cfg'}),
        'custom_hooks': [hook for hook in hooks if not _is_exact(hook)],
    }


def _without(values, keys):
    return {key: value for key, value in values.items() if key not in keys}


def _kind(cfg):
    return str(cfg.get('type')).rpartition('.')[2]


def _is_exact(hook):
    """Whether a hook leaves the gradients as they are; those of LeanHook are told by themselves."""
    try:
        kind = model_hook_class(hook)
    except ValueError:  # a project's own, which is not imported here
        return False
    return kind is not None and (kind.exact or _kind(hook) == 'LeanHook')


def _gradients(settings):
    """Which gradients are sent, whatever computes them; None: the exact ones."""
    for cfg in filter(None, settings):
        found = Settings.parse(cfg)
        if found.preset.gradients != 'exact':
            keys = ('keep_ratio', 'sampler', 'blocks', 'downsample', 'attention')
            return dict(gradients=found.preset.gradients, **{key: getattr(found, key) for key in keys})
    return None


def differences(found, wanted, name: str = '') -> Iterator[str]:
    """In words, where two nested values differ: 'schedule.max_epochs is 12, not 36'. Of a path only the last component
    counts."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted} - {'_scope_'}, key=str):
            yield from differences(found.get(key), wanted.get(key), f'{name}.{key}' if name else key)
    elif isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)) and len(found) == len(wanted):
        for i, pair in enumerate(zip(found, wanted, strict=True)):
            yield from differences(*pair, f'{name}[{i}]')
    elif _last(found) != _last(wanted):
        yield f'{name} is {_short(found)}, not {_short(wanted)}'


def _last(value):
    return value.rsplit('/', 1)[-1] if isinstance(value, str) else value


def _short(value):
    text = repr(_last(value))
    return text if len(text) < 60 else f'{text[:57]}...'


def _trained(folder):
    """Config of a training, and on how many GPUs it ran."""
    configs = sorted(Path(folder).glob('*/vis_data/config.py'))
    logs = sorted(Path(folder).glob('*/*.log'))
    if not configs or not logs:
        raise ValueError(
            f'{folder} has no TIME/vis_data/config.py with TIME/TIME.log: give the --work-dir of a training'
        )
    ranks = [int(n) for n in re.findall(r'^\s*GPU number: (\d+)', logs[-1].read_text(), re.MULTILINE)]
    return Config.fromfile(configs[-1], import_custom_modules=False), ranks[-1] if ranks else 1


def read_trained(experiment: Experiment, folders: Mapping[str, Sequence[Path]]) -> tuple[dict, list[str]]:
    """Reads work directories for a table.

    Args:
        experiment (Experiment): With the paper's values.
        folders (Mapping): Label to work directories, one for each seed; a folder that is missing has not started.

    Returns:
        tuple[dict, list[str]]: Label to values in percent, 'memory' (GiB), 'step_s' and 'seeds', of trainings that
        ended; and notes on what has not ended.

    Raises:
        ValueError: For a label that is unknown, and for a training without AP or that is not a fair comparison.
    """
    measured, notes, wrong = {}, [], []
    for label, places in folders.items():
        wanted = configs_of(experiment, [label])[label] if places else None
        runs = []
        for folder in places:
            if not any(Path(folder).glob('*/vis_data/scalars.json')):
                notes.append(f'{label}: {folder} has not started')
                continue
            config, gpus = _trained(folder)
            unequal = differences(_protocol(config, gpus), _protocol(wanted, experiment.gpus or 1))
            wrong += [f'{label}, {folder}: {text}' for text in unequal]
            run = look(Training(label, 0, config, Path(folder)))
            if run and run['finished']:
                runs.append(run)
            else:
                point = run['curve'][-1]['evaluated'] if run and run['curve'] else 0
                notes.append(f'{label}: {folder} has not ended, its last evaluation is the one of {point}')
        if runs:
            measured[label] = _mean(runs)
    if wrong:
        raise ValueError('not a fair comparison:\n  ' + '\n  '.join(wrong))
    return measured, notes


def _mean(runs):
    values = {name: statistics.fmean(100 * run['ap'][name] for run in runs) for name in runs[0]['ap']}
    for name, unit in (('memory', 1024), ('step_s', 1)):
        if all(run[name] is not None for run in runs):
            values[name] = statistics.fmean(run[name] for run in runs) / unit
    return dict(values, seeds=len(runs))


def _paper(experiment, label):
    return dict(zip(experiment.heads, experiment.paper.get(label, ()), strict=False))


def paper_table(experiment: Experiment, measured: Mapping, folder: Path | None = None, short: bool = False) -> str:
    """The paper's lines, what was measured, the difference. What was not measured stays empty.

    Args:
        experiment (Experiment): With the paper's values.
        measured (Mapping): Of :func:`read_trained`.
        folder (Path | None): Of the page, for links to the configs; None: for a terminal. Default: None.
        short (bool): A line for each label with memory and the first AP of boxes and masks. Default: False, all.
    """
    if short:
        return markdown_table(*_short_table(experiment, measured, folder))
    details = (*DETAILS, *(name.replace('box', 'mask') for name in DETAILS))
    names = ['memory', *(details if 'box AP' in experiment.heads else experiment.heads[1:])]
    columns = [Column('', lambda row: row['label']), Column('', lambda row: row['source'])]
    for name in names:
        head = 'memory, GB' if name == 'memory' else name
        columns.append(Column(head, lambda row, name=name: _number(row['values'].get(name), name)))
    columns.append(Column('seconds a step', lambda row: _number(row['values'].get('step_s'), 'top-1')))
    records = []
    for label in experiment.labels:
        paper, here = _paper(experiment, label), measured.get(label, {})
        both = {name: f'{here[name] - paper[name]:+.{_digits(name)}f}' for name in paper if name in here}
        for head, values in (('paper', paper), ('here', here), ('difference', both)):
            if values or head == 'here':
                records.append(dict(label=label if head == 'paper' else '', source=head, values=values))
    return (text_table if folder is None else markdown_table)(columns, records)


def _short_table(experiment, measured, folder):
    records = [
        dict(label=_link(experiment, label, folder), paper=_paper(experiment, label), here=measured.get(label, {}))
        for label in experiment.labels
    ]
    columns = [Column('config', lambda row: row['label'])]
    for name in (name for name in ('memory', 'box AP', 'mask AP', 'top-1') if name in experiment.heads):
        head = 'memory, GB' if name == 'memory' else name
        columns.append(Column(f'{head}: paper', lambda row, name=name: _number(row['paper'].get(name), name)))
        columns.append(Column('here', lambda row, name=name: _number(row['here'].get(name), name)))
    return columns, records


def _digits(name):
    return 2 if name == 'top-1' else 1  # as many as the paper gives


def _number(value, name):
    return value if isinstance(value, str) or value is None else f'{value:.{_digits(name)}f}'


def _link(experiment, label, folder):
    config = experiment.configs.get(label)
    return f'[{label}]({os.path.relpath(experiment.folder / config, folder)})' if config else label


def _metafile(experiment, measured, folder):
    """The models of an OpenMIM ``metafile.yml``: measured values, or the paper's where nothing was measured."""
    models = []
    for label in experiment.labels:
        values = measured.get(label) or _paper(experiment, label)
        config = Path(experiment.configs[label])
        epochs = configs_of(experiment, [label])[label].train_cfg.max_epochs
        lines = [f'  - Name: {config.stem}', '    In Collection: SBP ConvNeXt']
        lines += [f'    Config: {os.path.relpath(experiment.folder / config, folder / "../..")}', '    Metadata:']
        lines += [f'      Training Memory (GB): {values["memory"]:.1f}'] if 'memory' in values else []
        source = 'this repository' if label in measured else 'paper'
        lines += [f'      Epochs: {epochs}', f'      Source of Results: {source}', '    Results:']
        for task, name in (('Object Detection', 'box AP'), ('Instance Segmentation', 'mask AP')):
            if name in values:
                lines += [f'      - Task: {task}', '        Dataset: COCO', '        Metrics:']
                lines.append(f'          {name}: {values[name]:.1f}')
        models.append('\n'.join(lines))
    return '\n\n'.join(models)


def fill(path: Path, experiment: Experiment, measured: Mapping) -> tuple[str, int]:
    """The text of a page with its tables made anew, and how many there are.

    Args:
        path (Path): Markdown, or YAML.
        experiment (Experiment): The experiment.
        measured (Mapping): Of :func:`read_trained`.

    Raises:
        ValueError: If the page has no marker for it.
    """
    text, folder = path.read_text(), path.parent
    if path.suffix == '.yml':
        block = re.compile(rf'(# results: {experiment.name}\n).*?(  # end\n)', re.DOTALL)
        text, n = block.subn(lambda match: f'{match[1]}{_metafile(experiment, measured, folder)}\n{match[2]}', text)
    else:
        block = re.compile(rf'(<!-- results: {experiment.name}( short)? -->\n).*?(<!-- end -->)', re.DOTALL)

        def made(match):
            return f'{match[1]}{paper_table(experiment, measured, folder, bool(match[2]))}\n{match[3]}'

        text, n = block.subn(made, text)
    if not n:
        raise ValueError(f'{path} has no marker for results of {experiment.name!r}, such as <!-- results: NAME -->')
    return text, n


def folders_of(experiment, work_dir, logs):
    """Label to work directories."""
    found = {}
    for label in experiment.labels:
        places = [work_dir / f'{label}-{seed}' for seed in experiment.seeds]
        found[label] = [place for place in places if place.is_dir()]
    given = {}
    for text in logs:
        label, equals, folder = text.partition('=')
        if not equals or label not in found or not (read_log(Path(folder)) or {}).get('curve'):
            raise ValueError(f'--log {text!r} must be LABEL=FOLDER, of {[*found]}, of a training that was evaluated')
        given.setdefault(label, []).append(Path(folder))
    return found | given


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('experiment', help='with the values of the paper')
    parser.add_argument('--work-dir', type=Path, help='of all trainings (default: work_dirs/NAME of the experiment)')
    parser.add_argument('--log', action='append', default=[], metavar='LABEL=FOLDER', help='may repeat')
    parser.add_argument('--write', nargs='+', type=Path, default=[], help='pages to write the tables into')
    args = parser.parse_args()
    try:
        experiment = read_experiment(args.experiment)
        work_dir = args.work_dir or Path('work_dirs', experiment.name)
        measured, notes = read_trained(experiment, folders_of(experiment, work_dir, args.log))
        for page, (text, n) in {page: fill(page, experiment, measured) for page in args.write}.items():
            AtomicBackend().put_text(text, page)
            print(f'{page}: {n} tables')
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print('\n'.join([paper_table(experiment, measured), *notes]))


if __name__ == '__main__':
    main()
