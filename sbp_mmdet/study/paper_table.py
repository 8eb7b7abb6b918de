"""The paper's tables beside what trainings reached: is the comparison fair, how large is the difference."""

import dataclasses
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config

from ..analysis.variants import without_hook
from ..families import family_of
from ..reporting import Column, markdown_table, text_table
from ..surgery import model_hook_class
from .experiments import Experiment, configs_of
from .trainings import Training, look

__all__ = ['differences', 'fill', 'metafile', 'paper_markdown', 'paper_text', 'read_trained']

DETAILS = ('box AP', 'box AP50', 'box AP75', 'box AP small', 'box AP medium', 'box AP large')
# Ways to compute the same gradients; which SBP it is stands in the other keys of sbp_cfg.
_SAME = {'implementation', 'recompute', 'skip_dropped_images', 'compile'}
# Where a machine keeps its data.
_PLACES = {'data_root', 'data_prefix', 'backend_args', 'metainfo'}


def _protocol(config, gpus):
    """What has to be equal, by name: plain values that any config of mmdet can be asked for."""
    hooks = [hook for hook in config.get('custom_hooks') or [] if not _is_exact(hook)]
    config = without_hook(Config(dict(config.to_dict(), custom_hooks=hooks)))
    backbone = config.model.get('backbone') or {}
    sbp = _sbp(backbone)
    config = config.to_dict()
    model, wrapper, loop = (config.get(key) or {} for key in ('model', 'optim_wrapper', 'train_cfg'))
    train, val = config.get('train_dataloader') or {}, config.get('val_dataloader') or {}
    steps = wrapper.get('accumulative_counts', 1)
    family = family_of(backbone)
    return {
        'schedule': dict(
            {key: loop.get(key) for key in ('max_epochs', 'max_iters')}, param_scheduler=config.get('param_scheduler')
        ),
        'optimizer': _without(wrapper, {'accumulative_counts', 'loss_scale'}),
        'images of a step': (train.get('batch_size') or 0) * gpus * steps,
        'weights': dict(
            init_cfg=backbone.get('init_cfg'), load_from=None if config.get('resume') else config.get('load_from')
        ),
        'training data': _without(train.get('dataset') or {}, _PLACES),
        'evaluation': dict(
            _without(val.get('dataset') or {}, _PLACES),
            evaluator=config.get('val_evaluator'),
            test_cfg=model.get('test_cfg'),
        ),
        'SBP': sbp,
        'backbone': dict(
            _without(backbone.to_dict() if backbone else {}, {'sbp_cfg', 'init_cfg', 'with_cp'}),
            type=family.name if family else backbone.get('type'),
        ),
        'model': _without(model, {'backbone', 'test_cfg'}),
        'custom_hooks': config.get('custom_hooks') or [],
    }


def _without(values, keys):
    return {key: value for key, value in values.items() if key not in keys}


def _is_exact(hook):
    """Whether a hook leaves the gradients as they are."""
    try:
        kind = model_hook_class(hook)
    except ValueError:  # a project's own, which is not imported here
        return False
    return kind is not None and kind.exact


def _sbp(backbone):
    """All settings of SBP, the defaults of the backbone filled in; None without SBP."""
    if family_of(backbone) is None or backbone.get('sbp_cfg') is None:
        return None
    with torch.device('meta'):
        settings = MODELS.build(dict(backbone, init_cfg=None)).sbp
    return _without(dataclasses.asdict(settings), _SAME)


def differences(found, wanted, name: str = '') -> Iterator[str]:
    """In words, where two nested values differ. Of a path only the last component counts.

    Args:
        found (object): Dicts, lists and values.
        wanted (object): Likewise.
        name (str): What they are. Default: ''.

    Yields:
        str: 'schedule.max_epochs is 12, not 36'.
    """
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
        if label not in experiment.labels:
            raise ValueError(f'{experiment.name}: there is no {label!r}; it has {experiment.labels}')
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
            point = run['curve'][-1]['evaluated'] if run and run['curve'] else 0
            if run and run['finished']:
                runs.append(run)
            else:
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


def _lines(experiment, measured):
    for label in experiment.labels:
        paper, here = _paper(experiment, label), measured.get(label, {})
        both = {name: f'{here[name] - paper[name]:+.{_digits(name)}f}' for name in paper if name in here}
        for head, values in (('paper', paper), ('here', here), ('difference', both)):
            if values or head == 'here':
                yield dict(label=label if head == 'paper' else '', source=head, values=values)


def _long(experiment, measured):
    details = (*DETAILS, *(name.replace('box', 'mask') for name in DETAILS))
    names = ['memory', *(details if 'box AP' in experiment.heads else experiment.heads[1:])]
    columns = [Column('', lambda row: row['label']), Column('', lambda row: row['source'])]
    for name in names:
        head = 'memory, GB' if name == 'memory' else name
        columns.append(Column(head, lambda row, name=name: _number(row['values'].get(name), _digits(name))))
    columns.append(Column('seconds a step', lambda row: _number(row['values'].get('step_s'), 2)))
    return columns, [*_lines(experiment, measured)]


def _digits(name):
    return 2 if name == 'top-1' else 1  # as many as the paper gives


def _number(value, digits=1):
    return value if isinstance(value, str) or value is None else f'{value:.{digits}f}'


def paper_text(experiment: Experiment, measured: Mapping) -> str:
    """The whole table for a terminal: the paper's lines, what was measured, the difference."""
    return text_table(*_long(experiment, measured))


def paper_markdown(experiment: Experiment, measured: Mapping, folder: Path, short: bool = False) -> str:
    """The table as Markdown. What was not measured stays empty.

    Args:
        experiment (Experiment): With the paper's values.
        measured (Mapping): Of :func:`read_trained`.
        folder (Path): Of the page, for links to the configs.
        short (bool): A line for each label with memory and the first AP of boxes and masks. Default: False, all.

    Returns:
        str: Lines of Markdown.
    """
    if not short:
        return markdown_table(*_long(experiment, measured))
    records = [
        dict(label=_link(experiment, label, folder), paper=_paper(experiment, label), here=measured.get(label, {}))
        for label in experiment.labels
    ]
    columns = [Column('config', lambda row: row['label'])]
    for name in (name for name in ('memory', 'box AP', 'mask AP', 'top-1') if name in experiment.heads):
        head = 'memory, GB' if name == 'memory' else name
        columns.append(Column(f'{head}: paper', lambda row, name=name: _number(row['paper'].get(name), _digits(name))))
        columns.append(Column('here', lambda row, name=name: _number(row['here'].get(name), _digits(name))))
    return markdown_table(columns, records)


def _link(experiment, label, folder):
    config = experiment.configs.get(label)
    return f'[{label}]({os.path.relpath(experiment.folder / config, folder)})' if config else label


def metafile(experiment: Experiment, measured: Mapping, folder: Path) -> str:
    """The models of an OpenMIM ``metafile.yml``: measured values, or the paper's where nothing was measured."""
    models = []
    for label in experiment.labels:
        values = measured.get(label) or _paper(experiment, label)
        source = 'this repository' if label in measured else 'paper'
        config = Path(experiment.configs[label])
        epochs = configs_of(experiment, [label])[label].train_cfg.max_epochs
        memory = [f'      Training Memory (GB): {values["memory"]:.1f}'] if 'memory' in values else []
        lines = [
            f'  - Name: {config.stem}',
            '    In Collection: SBP ConvNeXt',
            f'    Config: {os.path.relpath(experiment.folder / config, folder / "../..")}',
            '    Metadata:',
            *memory,
            f'      Epochs: {epochs}',
            f'      Source of Results: {source}',
            '    Results:',
        ]
        for task, name in (('Object Detection', 'box AP'), ('Instance Segmentation', 'mask AP')):
            if name not in values:
                continue
            lines += [f'      - Task: {task}', '        Dataset: COCO', '        Metrics:']
            lines.append(f'          {name}: {values[name]:.1f}')
        models.append('\n'.join(lines))
    return '\n\n'.join(models)


def fill(path: Path, experiment: Experiment, measured: Mapping) -> tuple[str, int]:
    """A page with its tables made anew, between ``<!-- results: NAME -->`` or ``<!-- results: NAME short -->`` and
    ``<!-- end -->``; in ``metafile.yml`` between ``# results: NAME`` and ``# end``.

    Args:
        path (Path): Markdown, or YAML.
        experiment (Experiment): NAME is its name.
        measured (Mapping): Of :func:`read_trained`.

    Returns:
        tuple[str, int]: The text of the page, and how many tables there are.

    Raises:
        ValueError: If the page has no such marker.
    """
    text, folder = path.read_text(), path.parent
    if path.suffix == '.yml':
        block = re.compile(rf'(# results: {experiment.name}\n).*?(  # end\n)', re.DOTALL)
        text, n = block.subn(lambda match: f'{match[1]}{metafile(experiment, measured, folder)}\n{match[2]}', text)
    else:
        block = re.compile(rf'(<!-- results: {experiment.name}( short)? -->\n).*?(<!-- end -->)', re.DOTALL)

        def table(match):
            return f'{match[1]}{paper_markdown(experiment, measured, folder, bool(match[2]))}\n{match[3]}'

        text, n = block.subn(table, text)
    if not n:
        raise ValueError(f'{path} has no marker for results of {experiment.name!r}, such as <!-- results: NAME -->')
    return text, n
