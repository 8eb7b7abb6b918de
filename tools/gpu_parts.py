"""The parts of the GPU report in the order in which they run, the most important ones first."""

import dataclasses
from pathlib import Path

import gpu_trials
from gpu_trials import Trial

__all__ = ['ROOT', 'Part', 'parts_of_report']

ROOT = Path(__file__).resolve().parents[1]
# Tests of the operations that have branches of their own on a GPU.
_FIRST_TESTS = ('test_ops_flash', 'test_ops_conv_norm', 'test_residual_chain', 'test_autocast')
_OTHER_TESTS = ('test_ops*.py', 'test_training.py', 'test_models*.py', 'test_adapters_*.py')


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of the report. It has either trials or commands.

    Attributes:
        name (str): Name of its files and its section.
        seconds (float): Expected duration; with trials, of each of them. A part is stopped after twice as many seconds
            without a row.
        commands (tuple[str, ...]): Arguments of python; {out} is the folder of the report, {lines} the file of its
            rows, {rows} those that are not there yet, {end} when the report ends, on the clock of ``time.monotonic``.
        kind (str): Measurement of the trials, see `tools/gpu_worker.py`. Default: ''.
        trials (tuple[Trial, ...]): Trials that are measured. Default: none.
        timed (bool): Whether it runs alone, because it measures time. Default: True.
        quick (bool): Whether it belongs to the report of ten minutes. Default: False.
    """

    name: str
    seconds: float
    commands: tuple[str, ...]
    kind: str = ''
    trials: tuple[Trial, ...] = ()
    timed: bool = True
    quick: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of its rows. A row without a trial in its name is compared with the first row."""
        return tuple(row for trial in self.trials for row in trial.rows)


def parts_of_report(rehearse: bool) -> list[Part]:
    """Return all parts; for a rehearsal on a CPU, with tiny sizes."""

    def measured(name, kind, seconds, trials, **more):
        trials, seconds = (_rehearsed(trials), 150) if rehearse else (trials, seconds)
        command = (
            f'tools/gpu_worker.py {name} --rows {{rows}} --lines {{lines}} --end {{end}}' + ' --rehearse' * rehearse
        )
        return Part(name, seconds, (command,), kind, trials, **more)

    def tested(name, *files):
        command = '-m pytest -o addopts= -v -rfE --tb=short -p no:cacheprovider ' + '--collect-only -q ' * rehearse
        return Part(name, 75, (command + ' '.join(f'tests/{file}.py' for file in files),), timed=False, quick=True)

    def each(name, files):
        return [tested(name, *files)] if rehearse else [tested(file, file) for file in files]

    caps = gpu_trials.CAPS[-1:] if rehearse else gpu_trials.CAPS  # on a CPU there is no cap, and these are STEPS again
    others = sorted({path.stem for name in _OTHER_TESTS for path in (ROOT / 'tests').glob(name)} - {*_FIRST_TESTS})
    return [
        measured('verify', 'verify', 30, gpu_trials.FAMILIES, timed=False, quick=True),
        *each('first_tests', _FIRST_TESTS),
        measured('steps', 'steps', 55, gpu_trials.STEPS, quick=True),
        measured('modules', 'modules', 27, gpu_trials.MODULES, quick=True),
        measured('blocks', 'profiles', 15, gpu_trials.BLOCKS, quick=True),
        measured('caps', 'steps', 30, caps, quick=True),
        measured('sync_bn', 'sync_bn', 20, gpu_trials.SYNC_BN, quick=True),
        measured('module_profiles', 'profiles', 20, gpu_trials.PROFILED[: 1 if rehearse else None], quick=True),
        measured('smoke', 'modules', 45, gpu_trials.SMOKE, timed=False, quick=True),
        *each('other_tests', others),
        measured('more_modules', 'modules', 60, gpu_trials.MORE_MODULES),
        measured('more_caps', 'steps', 50, gpu_trials.MORE_CAPS),
        measured('rivals', 'modules', 120, gpu_trials.RIVALS),
        *(_training(preset, rehearse) for preset in ('none', 'exact', 'sbp')),
    ]


def _rehearsed(trials):
    """Return trials with tiny sizes, without duplicates."""
    tiny = {}
    for trial in map(Trial.rehearsed, trials):
        tiny.setdefault(repr(dataclasses.replace(trial, name='', counted='', times='', issue='')), trial)
    return tuple(tiny.values())


def _training(preset, rehearse):
    images, size, epochs = (4, 64, 1) if rehearse else (1000, 128, 6)
    data = f'tools/make_synthetic_coco.py --out {{out}}/data --train {images} --val {images} --size {size} --seed 0'
    words = f'tools/train.py {gpu_trials.SHAPES} --work-dir {{out}}/training_{preset} --cfg-options'
    words += f' model.backbone.sbp_cfg.preset={preset} train_cfg.max_epochs={epochs} train_cfg.val_interval={epochs}'
    words += ' default_hooks.logger.interval=1 default_hooks.checkpoint.interval=-1'
    words += ' train_dataloader.dataset.data_root={out}/data/ val_dataloader.dataset.data_root={out}/data/'
    words += ' val_evaluator.ann_file={out}/data/annotations/instances_val.json'
    words += ' train_dataloader.batch_size=2' if rehearse else ' train_dataloader.num_workers=8'
    words += f' optim_wrapper.type={"" if rehearse else "Amp"}OptimWrapper'
    return Part(f'training_{preset}', 180, (data, words))
