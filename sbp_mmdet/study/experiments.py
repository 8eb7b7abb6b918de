"""Experiments as files: what is trained, with which seeds and schedule, what is compared, what the paper reports."""

import copy
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmengine.config import Config

from ..analysis.variants import imports_with_plugin, load_config, without_hook
from ..families import family_of, require
from ..provenance import CHECKOUT
from .gradients import backbone_with

__all__ = ['METRICS', 'Experiment', 'configs_of', 'read_experiment']

METRICS = {
    f'{kind} AP{size}': f'coco/{key}_mAP{suffix}'
    for kind, key in (('box', 'bbox'), ('mask', 'segm'))
    for size, suffix in (('', ''), ('50', '_50'), ('75', '_75'), (' small', '_s'), (' medium', '_m'), (' large', '_l'))
} | {'top-1': 'accuracy/top1'}
_KINDS = {Mapping: 'a dict', Sequence: 'a list', str: 'text', int: 'a whole number'}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is trained and compared: settings of one config, or whole configs, or both.

    Attributes:
        name (str): Of the experiment.
        config (str): Config file, or ``mmdet::FAMILY/NAME.py``. Default: ''.
        settings (Mapping): Label to ``sbp_cfg``; None is no SBP. Default: none.
        configs (Mapping): Label to the config that it has in place of ``config``; it is trained as it is where
            ``settings`` has no such label. Default: none.
        options (Mapping): ``--cfg-options`` of all trainings: schedule, data. Default: none.
        seeds (Sequence[int]): The same for each label: same start, same order of images. Default: 0.
        compare (Mapping): Label to the label that it is compared with. Default: each with the first one.
        reach (Mapping): Name of an AP (of :data:`METRICS`) to a value; the steps until it is reached are reported.
            Default: none.
        gpus (int): For each training; 0 is one process without a launcher. Default: 0.
        heads (Sequence[str]): What the paper reports: 'memory' (GB), 'box AP', ... in percent. Default: nothing.
        paper (Mapping): Label to the paper's values, in the order of ``heads``. Default: none.
        folder (Path): Configs' names are relative to it. Default: the working folder.
    """

    name: str
    config: str = ''
    settings: Mapping[str, dict | None] = dataclasses.field(default_factory=dict)
    configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    compare: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reach: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpus: int = 0
    heads: Sequence[str] = ()
    paper: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    folder: Path = Path()

    def __post_init__(self):
        self._check_kinds()
        labels = self.labels
        without = [label for label in labels if not self.config_of(label)]
        if not labels:
            raise ValueError(f'{self.name}: there is nothing to train; give config and settings, or configs')
        if without:
            raise ValueError(f'{self.name}: {without} has no config; give config and settings, or configs')
        self.check_seeds(self.seeds)
        for label in labels:
            if not label or '/' in label:
                raise ValueError(f'{self.name}: label {label!r} names a folder: no / in it, and not empty')
        for what, names, known in (
            ('compare', [*self.compare, *self.compare.values()], labels),
            ('paper', self.paper, labels),
            ('reach', self.reach, [*METRICS]),
            ('heads', self.heads, ['memory', *METRICS]),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f'{self.name}: {what} names {unknown}; there are {known}')
        for label, values in self.paper.items():
            if len(values) != len(self.heads):
                raise ValueError(f'{self.name}: paper[{label!r}] has {len(values)} values for the heads {self.heads}')

    def _check_kinds(self):
        for field in dataclasses.fields(self):
            kind = typing.get_origin(field.type) or field.type
            value = getattr(self, field.name)
            if kind in _KINDS and (not isinstance(value, kind) or (kind is Sequence and isinstance(value, str))):
                raise ValueError(f'{self.name}: {field.name}={value!r} must be {_KINDS[kind]}')

    def check_seeds(self, seeds: Sequence[int]) -> None:
        """Raises a ValueError if there is none, or two are the same."""
        if len(set(seeds)) < len(seeds) or not seeds or not all(isinstance(seed, int) for seed in seeds):
            raise ValueError(f'{self.name}: seeds {[*seeds]} must be given, be whole numbers, and differ')

    @property
    def labels(self) -> list[str]:
        """Of settings or configs, in their order."""
        return [*dict.fromkeys([*self.settings, *self.configs])]

    def config_of(self, label: str) -> str:
        """Name of its config."""
        return self.configs.get(label, self.config)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Label and the label that it is compared with."""
        first, *others = self.labels
        return list(self.compare.items()) or [(label, first) for label in others]


def read_experiment(path: str | Path) -> Experiment:
    """Reads an experiment file: Python, with ``_base_`` as in configs, so that a child states its difference.

    Args:
        path (str | Path): The file; its name is the experiment's.

    Returns:
        Experiment: What is in it.

    Raises:
        ValueError: If there is no such file, or a name in it is unknown or its value is bad.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'experiment {path} does not exist (working folder: {Path.cwd()}); see experiments/')
    try:
        content = Config.fromfile(path, import_custom_modules=False).to_dict()
    except Exception as error:  # it is a program: whatever it may raise
        raise ValueError(f'experiment {path}: {type(error).__name__}: {error}') from error
    if 'model' in content:
        raise ValueError(f'{path} is a config of a model; give its settings with --setting, or an experiment')
    known = {field.name for field in dataclasses.fields(Experiment)} - {'name', 'folder'}
    if unknown := sorted(set(content) - known):
        raise ValueError(f'{path}: unknown {", ".join(unknown)}; an experiment has {", ".join(sorted(known))}')
    return Experiment(path.stem, folder=path.parent, **content)


def configs_of(experiment: Experiment, labels: Sequence[str]) -> dict[str, Config]:
    """The configs that are trained, checked, before a seed is set.

    Args:
        experiment (Experiment): The experiment.
        labels (Sequence[str]): Of it.

    Returns:
        dict: Label to config.

    Raises:
        ValueError: For a label or a setting that is unknown or cannot be honoured, or a config that does not exist.
    """
    found = {}
    for label in labels:
        if label not in experiment.labels:
            raise ValueError(f'{experiment.name}: there is no {label!r}; it has {experiment.labels}')
        name = experiment.config_of(label)
        try:
            config = load_config(_path(name, experiment.folder), copy.deepcopy(dict(experiment.options)))
            found[label] = _set(config, experiment, label)
        except ValueError as error:
            raise ValueError(f'{experiment.name}, {label}: {error}') from error
    return found


def _path(name, folder):
    """Relative to the experiment's file; a child in another folder finds its parent's configs in the checkout."""
    if '::' in name:
        return name
    places = [folder / name, CHECKOUT / 'experiments' / name]
    return str(next((place for place in places if place.is_file()), places[0]))


def _set(config, experiment, label):
    if label in experiment.settings:
        config = without_hook(config)
        config.custom_imports = dict(imports=imports_with_plugin(config), allow_failed_imports=False)
    backbone = config.model.get('backbone')
    if backbone is None and label in experiment.settings:
        raise ValueError(f'the model ({config.model.get("type")}) has no model.backbone, whose sbp_cfg a setting is')
    if label in experiment.settings:
        backbone.update(type=require(backbone).backbone, sbp_cfg=experiment.settings[label])
    family = family_of(backbone)
    if family and backbone.type.endswith(family.backbone):
        backbone_with(config, backbone.get('sbp_cfg'))
    return config
