"""Experiments as files: what is trained, with which seeds and schedule, what is compared, what the paper reports."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config

from sbp_mmdet.plan.variants import load_config

__all__ = ['METRICS', 'Experiment', 'configs_of', 'read_experiment']

METRICS = {
    f'{kind} AP{size}': f'coco/{key}_mAP{suffix}'
    for kind, key in (('box', 'bbox'), ('mask', 'segm'))
    for size, suffix in (('', ''), ('50', '_50'), ('75', '_75'), (' small', '_s'), (' medium', '_m'), (' large', '_l'))
} | {'top-1': 'accuracy/top1'}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Trainings to run and compare: settings of one config, whole configs, or both.

    Attributes:
        name (str): Name of the experiment.
        config (str): Config file, or ``mmdet::FAMILY/NAME.py``. Default: ''.
        settings (Mapping): Label to the value that replaces the backbone's ``sbp_cfg``, or to the keys of ``LeanHook``
            if the backbone has none. A value of ``None`` means the plain model. Default: none.
        configs (Mapping): Label to a config of its own, trained as it is. Default: none.
        options (Mapping): ``--cfg-options`` of all trainings: schedule, data. Default: none.
        seeds (Sequence[int]): Seeds of each label: labels share the start and the order of images. Default: 0.
        compare (Mapping): Label to the label that it is compared with. Default: each with the first one.
        gpus (int): Number of GPUs of each training. If 0, one process runs without a launcher. Default: 0.
        heads (Sequence[str]): Columns that the paper reports: 'memory' (GB), 'box AP', ... in percent. Default: none.
        paper (Mapping): Label to the paper's values, in the order of ``heads``. Default: none.
        folder (Path): Folder that names of configs are relative to. Default: the working folder.
    """

    name: str
    config: str = ''
    settings: Mapping[str, dict | None] = dataclasses.field(default_factory=dict)
    configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    compare: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int = 0
    heads: Sequence[str] = ()
    paper: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    folder: Path = Path()

    def __post_init__(self):
        labels = self.labels
        if not labels or (self.settings and not self.config):
            raise ValueError(f'{self.name}: there is nothing to train; give config and settings, or configs')
        if wrong := [label for label in labels if not label or '/' in label]:
            raise ValueError(f'{self.name}: labels {wrong} name folders: no / in them, and not empty')
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f'{self.name}: seeds {[*self.seeds]} must be given and differ')
        for what, names, known in (
            ('compare', [*self.compare, *self.compare.values()], labels),
            ('paper', self.paper, labels),
            ('heads', self.heads, ['memory', *METRICS]),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f'{self.name}: {what} names {unknown}; there are {known}')

    @property
    def labels(self) -> list[str]:
        """Return the labels of settings or configs, in order."""
        return [*dict.fromkeys([*self.settings, *self.configs])]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return each label with the label that it is compared with."""
        first, *others = self.labels
        return list(self.compare.items()) or [(label, first) for label in others]


def read_experiment(path: str | Path) -> Experiment:
    """Read an experiment file: Python, with ``_base_`` as in configs. Its name is that of the experiment.

    Raises:
        ValueError: If something in it is unknown or bad.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'experiment {path} does not exist (working folder: {Path.cwd()}); see research/experiments')
    try:
        content = Config.fromfile(path, import_custom_modules=False).to_dict()
    except Exception as error:  # it is a program: whatever it may raise
        raise ValueError(f'experiment {path}: {type(error).__name__}: {error}') from error
    known = {field.name for field in dataclasses.fields(Experiment)} - {'name', 'folder'}
    if unknown := sorted(set(content) - known):
        raise ValueError(f'{path}: unknown {", ".join(unknown)}; an experiment has {", ".join(sorted(known))}')
    return Experiment(path.stem, folder=path.parent, **content)


def configs_of(experiment: Experiment, labels: Sequence[str]) -> dict[str, Config]:
    """Return the config of each label, before a seed is set.

    Raises:
        ValueError: For an unknown label or setting, one that cannot be honoured, or a config that does not exist.
    """
    configs = {}
    for label in labels:
        if label not in experiment.labels:
            raise ValueError(f'{experiment.name}: there is no {label!r}; it has {experiment.labels}')
        name = experiment.configs.get(label, experiment.config)
        path = name if '::' in name else str(experiment.folder / name)
        try:
            config = load_config(path, copy.deepcopy(dict(experiment.options)))
            backbone, setting = config.model.get('backbone') or {}, experiment.settings.get(label)
            if label in experiment.settings and 'sbp_cfg' in backbone:
                backbone.sbp_cfg = setting
            elif setting:
                config.custom_hooks = [*config.get('custom_hooks', []), dict(type='LeanHook', **setting)]
            if 'sbp_cfg' in backbone:  # what cannot be honoured is refused before anything is trained
                with torch.device('meta'):
                    MODELS.build(dict(backbone, init_cfg=None))
        except ValueError as error:
            raise ValueError(f'{experiment.name}, {label}: {error}') from error
        configs[label] = config
    return configs
