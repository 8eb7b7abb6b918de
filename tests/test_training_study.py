"""The runner of experiments, with a training script that only writes what mmengine writes."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import CONFIGS, ROOT, TOOLS

from sbp_mmdet.study.experiments import Experiment, configs_of, read_experiment
from sbp_mmdet.study.trainings import Launcher, Training, collect, look, plan, read_log

TOOL = TOOLS / 'analysis_tools/training_study.py'
CONFIG = CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'

TRAIN = """
import json, os, sys
from pathlib import Path
from mmengine.config import Config

config, folder = Config.fromfile(sys.argv[1]), Path(sys.argv[3])
sbp, seed = config.model.backbone.sbp_cfg, config.randomness.seed
if seed == 13:
    raise SystemExit('out of luck')
if seed == 15:
    raise SystemExit(0)
if seed == 16:
    import time

    (folder / 'pid').write_text(str(os.getpid()))
    end = time.monotonic() + 100
    while not (folder / 'stop').exists() and time.monotonic() < end:
        time.sleep(0.05)
(folder / 'threads').write_text(os.environ.get('OMP_NUM_THREADS', ''))
with open(folder / 'count', 'a') as count:
    count.write('x')
(folder / 'now/vis_data').mkdir(parents=True, exist_ok=True)
ap = 0.4 if sbp is None else sbp.keep_ratio / 10
lines = [dict(iter=20, loss=3.0 + seed), {'step': 1, 'coco/bbox_mAP': 0.01}, dict(iter=40, loss=2.0 + seed)]
if seed != 14:
    lines += [{'step': 6, 'coco/bbox_mAP': ap + seed / 100, 'coco/segm_mAP': ap}]
(folder / 'now/vis_data/scalars.json').write_text('\\n'.join(map(json.dumps, lines)))
(folder / 'now/now.log').write_text('2026/11/21 12:00:00 - x\\nmore\\n2026/11/21 12:01:30 - y')
"""


@pytest.fixture
def study(tmp_path):
    """Runs the tool beside a training script of our own."""
    folder = tmp_path / 'tools/analysis_tools'
    folder.mkdir(parents=True)
    (folder / TOOL.name).write_text(TOOL.read_text())
    (tmp_path / 'tools/train.py').write_text(TRAIN)

    def run(*args, file=CONFIG):
        command = [sys.executable, folder / TOOL.name, file, '--work-dir', tmp_path / 'work', *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=TOOLS.parent, env=None)

    run.command = [sys.executable, folder / TOOL.name, CONFIG, '--work-dir', tmp_path / 'work']
    run.options = dict(cwd=TOOLS.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return run


SETTINGS = ('--setting', 'plain: none', '--setting', 'quarter: keep_ratio=0.25')


def test_settings_and_seeds(study, tmp_path):
    files = ('--json', tmp_path / 'out.json', '--plot', tmp_path / 'out.png')
    done = study(*SETTINGS, '--seeds', '1', '2', '--jobs', '2', *files)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ['plain', '2', '41.5', '±', '0.7', '40.0', '±', '0.0'] in lines
    # The same from seed to seed: told apart, with an interval of no width.
    assert 'quarter      2   4.0 ± 0.7   2.5 ± 0.0  **-37.5 (-37.5 to -37.5)**  **-37.5' in done.stdout
    written = json.loads((tmp_path / 'out.json').read_text())
    assert written['experiment']['settings'] == {'plain': None, 'quarter': {'keep_ratio': 0.25}}
    one = written['results']['quarter']['2']
    assert one['ap'] == {'box AP': 0.045, 'mask AP': 0.025} and one['seconds'] == 90 and one['finished']
    assert one['loss'] == [[20, 5.0], [40, 4.0]] and one['machine']['commit'] == written['machine']['commit']
    assert (tmp_path / 'out.png').stat().st_size > 1000

    # A second call trains what is new; another config does not go into the folder of the first one.
    assert study(*SETTINGS, '--seeds', '1', '3').returncode == 0
    other = study('--setting', 'plain: none', '--seeds', '1', '--cfg-options', 'train_cfg.max_epochs=9')
    assert other.returncode == 2 and 'plain-1 holds another training: train_cfg differ' in other.stderr
    (tmp_path / 'work/plain-1/now/vis_data/scalars.json').unlink()  # the result alone is not taken for another one's
    other = study('--setting', 'plain: none', '--seeds', '1', '--no-run', '--cfg-options', 'train_cfg.max_epochs=9')
    assert other.returncode == 2 and 'plain-1 holds another training: train_cfg differ' in other.stderr
    counts = {path.parent.name: len(path.read_text()) for path in tmp_path.glob('work/*/count')}
    assert counts == {f'{label}-{seed}': 1 for label in ('plain', 'quarter') for seed in (1, 2, 3)}


def test_results_that_say_nothing(study, tmp_path):
    folder = tmp_path / 'work/plain-1'
    folder.mkdir(parents=True)
    (folder / 'result.json').write_text('{}')
    one = ('--setting', 'plain: none', '--seeds', '1')
    done = study(*one, '--no-run')
    assert done.returncode == 2 and f'{folder} has no config.py, so nothing says what was trained' in done.stderr
    (folder / 'result.json').unlink()
    assert study(*one).returncode == 0
    (folder / 'result.json').write_text('{"curve')
    for option in ((), ('--no-run',)):
        done = study(*one, *option)
        assert done.returncode == 1 and 'result.json is damaged' in done.stderr and 'Traceback' not in done.stderr
    (folder / 'result.json').unlink()
    (folder / 'now/vis_data/scalars.json').write_text('{"iter": 20, "loss": 1.0}')
    done = study(*one, '--no-run', '--plot', tmp_path / 'x.png')
    assert done.returncode == 1 and 'nothing to draw' in done.stderr and 'Traceback' not in done.stderr


def test_what_others_have_trained_is_reported(study, tmp_path):
    """By a tool that did not keep the course of AP, and one that has not ended; the experiment is a file."""
    file = tmp_path / 'half.py'
    file.write_text(f"config = '{CONFIG}'\nsettings = dict(plain=None, half=dict(keep_ratio=0.5))\nseeds = [1, 2]\n")
    assert study(file=file).returncode == 0
    for path in tmp_path.glob('work/*/result.json'):
        path.write_text('{"ap": {}, "loss": []}')
    (tmp_path / 'work/half-2/result.json').unlink()
    scalars = tmp_path / 'work/half-2/now/vis_data/scalars.json'
    scalars.write_text('\n'.join(scalars.read_text().splitlines()[:3]) + '\n{"half a li')
    done = study('--no-run', '--commit', 'abc', '--json', tmp_path / 'out.json', file=file)
    assert done.returncode == 0, done.stderr
    assert 'half, seed 2: not ended, 20 steps evaluated' in done.stdout and '-35.0, one seed' in done.stdout
    found = json.loads((tmp_path / 'out.json').read_text())['results']
    assert found['plain']['1']['machine'] == {'commit': 'abc'}
    assert found['half']['2']['machine'] == {'commit': None} and not found['half']['2']['finished']


@pytest.mark.parametrize(
    ('seed', 'message'),
    [
        (13, 'a training failed'),
        (14, 'a training logged no AP at its end'),
        (15, 'a training logged no loss and no AP'),
    ],
)
def test_a_training_that_fails_is_named(study, tmp_path, seed, message):
    done = study(*SETTINGS, '--seeds', f'{seed}')
    assert done.returncode == 1
    assert f'plain, seed {seed}: {message}' in done.stderr and 'log.txt' in done.stderr
    assert seed != 13 or 'out of luck' in (tmp_path / 'work/plain-13/log.txt').read_text()
    assert not list(tmp_path.glob('work/*/result.json'))


def test_one_process_trains_in_a_folder(study, tmp_path):
    """Also where the one that started the training is dead: the training is not."""
    folder = tmp_path / 'work/plain-16'
    first = subprocess.Popen([*study.command, '--setting', 'plain: none', '--seeds', '16'], **study.options)
    try:
        end = time.monotonic() + 200
        while not (folder / 'pid').exists() or not (folder / 'pid').read_text():
            assert time.monotonic() < end and first.poll() is None
            time.sleep(0.05)
        for _ in range(2):
            second = study('--setting', 'plain: none', '--seeds', '16')
            assert second.returncode == 1
            assert f'plain, seed 16: another process trains in {folder}; wait' in second.stderr
            first.kill()
            first.wait()
    finally:
        first.kill()
        (folder / 'stop').touch()
    while Path(f'/proc/{(folder / "pid").read_text()}').exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert study('--setting', 'plain: none', '--seeds', '16').returncode == 0
    assert (folder / 'count').read_text() == 'xx'  # the one left alone, and the one after it


def test_a_failure_is_told_at_once(study, tmp_path):
    """And not when what runs beside it has ended."""
    one = ('--setting', 'plain: none', '--seeds', '16', '13', '--jobs', '2')
    with open(tmp_path / 'stderr', 'w') as stderr:
        running = subprocess.Popen([*study.command, *one], **dict(study.options, stderr=stderr))
    try:
        end = time.monotonic() + 90
        while 'plain, seed 13: a training failed' not in (tmp_path / 'stderr').read_text():
            assert time.monotonic() < end and running.poll() is None
            time.sleep(0.05)
    finally:
        (tmp_path / 'work/plain-16/stop').touch()
    assert running.wait(100) == 1


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('--setting', 'half'), 'cannot be read'),
        (('--setting', 'x: keep_ratio=2'), 'keep_ratio=2'),
        ((*SETTINGS, *SETTINGS), 'same label'),
        ((*SETTINGS, '--jobs', '0'), '--jobs 0'),
        ((*SETTINGS, '--labels', 'third'), "there is no 'third'"),
        ((*SETTINGS, '--seeds', '3', '3'), 'seeds [3, 3] must'),
        ((*SETTINGS, '--jobs', '2', '--gpus', '4'), '--jobs 2 with 4 GPUs each'),
        ((), 'is a config of a model'),
    ],
    ids=str,
)
def test_bad_input(study, args, message):
    done = study(*args)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'give config and settings, or configs'),
        ('settings = dict(a=None)', 'give config and settings, or configs'),
        ("configs = dict(a='x.py')\nseed = 3", 'unknown seed; an experiment has compare, config'),
        ("configs = dict(a='x.py')\nseeds = [3, 3]", 'differ'),
        ("configs = dict(a='x.py')\nseeds = 3", 'seeds=3 must be a list'),
        ("configs = dict(a='x.py')\nseeds = ['3']", "seeds ['3'] must"),
        ("configs = dict(a='x.py')\ngpus = '8'", "gpus='8' must be a whole number"),
        ("configs = 'x.py'", "configs='x.py' must be a dict"),
        ("configs = dict(a='x.py'", 'e.py: SyntaxError'),
        ("configs = dict(a='x.py')\nreach = {'box ap': 0.3}", "reach names ['box ap']; there are ['box AP', "),
        ("configs = dict(a='x.py')\nheads = ['AP']", "heads names ['AP']; there are ['memory', "),
        ("config = 'headless.py'\nsettings = dict(a=None)", 'e, a: the model (SemiBaseDetector) has no model.backbone'),
        ("configs = {'a/b': 'x.py'}", 'names a folder'),
        ("configs = dict(a='x.py')\ncompare = dict(b='a')", "compare names ['b']"),
        ("configs = dict(a='x.py')\nheads = ['box AP']\npaper = dict(a=[1, 2])", 'has 2 values'),
        ("configs = dict(a='x.py')", 'x.py does not exist'),
        ('configs = dict(a=None)', 'no config'),
        (f"config = '{CONFIG}'\nsettings = dict(a=dict(keep=0.5))", 'e, a: sbp_cfg'),
        (f"config = '{CONFIG}'\nsettings = dict(a=dict(keep_ratio=7))", 'keep_ratio=7'),
    ],
    ids=str,
)
def test_bad_experiments(tmp_path, text, message):
    file = tmp_path / 'e.py'
    file.write_text(text)
    headless = "model = dict(type='SemiBaseDetector')\noptim_wrapper = dict(type='OptimWrapper')\n"
    (tmp_path / 'headless.py').write_text(headless)
    with pytest.raises(ValueError, match='.*') as error:
        experiment = read_experiment(file)
        configs_of(experiment, experiment.labels)
    assert message in str(error.value)


def test_a_configs_own_imports_stay(tmp_path):
    (tmp_path / 'own.py').write_text(f"_base_ = '{CONFIG}'\ncustom_imports = dict(imports=['json', 'sbp_mmdet'])")
    (tmp_path / 'e.py').write_text("config = 'own.py'\nsettings = dict(half={})\nseeds = [0]")
    experiment = read_experiment(tmp_path / 'e.py')
    assert configs_of(experiment, ['half'])['half'].custom_imports.imports == ['json', 'sbp_mmdet']


@pytest.mark.parametrize('file', sorted((ROOT / 'experiments').glob('*.py')), ids=lambda file: file.stem)
def test_experiments_of_the_repository(file, tmp_path):
    experiment = read_experiment(file)
    rates = file.stem == 'imagenet'  # stochastic depth differs as well: test_classification.py
    if rates and importlib.util.find_spec('mmpretrain') is None:
        assert all((file.parent / name).is_file() for name in experiment.configs.values())
        with pytest.raises(ValueError, match='ViT-Tiny: .* mmpretrain is not installed'):
            plan(experiment, tmp_path)
        return
    trainings = plan(experiment, tmp_path)
    assert len(trainings) == len(experiment.labels) * len(experiment.seeds) == len({t.folder for t in trainings})
    for training in trainings:
        assert training.config.randomness.seed == training.seed
        sbp_cfg = training.config.model.backbone.get('sbp_cfg')
        assert sbp_cfg == experiment.settings.get(training.label, sbp_cfg)
    for label, base in experiment.pairs:  # what is compared differs in sbp_cfg alone
        one, other = (next(t.config.to_dict() for t in trainings if t.label == name) for name in (label, base))
        sbp_cfgs = []
        for config in (one, other):
            sbp_cfgs.append(config['model']['backbone'].pop('sbp_cfg', None))
            config.pop('custom_imports')
            hooks = [hook for hook in config.pop('custom_hooks', None) or [] if hook['type'] != 'ObjectMasksHook']
            config['custom_hooks'] = hooks
            if rates:
                config['model']['backbone'].pop('drop_path_rate')
        assert sbp_cfgs[0] != sbp_cfgs[1]
        assert one == other


def test_launchers(tmp_path):
    training = Training('a b', 3, None, tmp_path / 'x')
    words, _ = Launcher(TOOLS).command(training, 'c.py')
    assert words == [sys.executable, TOOLS / 'train.py', 'c.py', '--work-dir', tmp_path / 'x', '--resume']
    words, variables = Launcher(TOOLS, 4).command(training, 'c.py')
    assert words == ['bash', TOOLS / 'dist_train.sh', 'c.py', '4', '--work-dir', tmp_path / 'x', '--resume']
    words, other = Launcher(TOOLS, 4, 'big').command(training, 'c.py')
    assert words == ['bash', TOOLS / 'slurm_train.sh', 'big', 'a-b-3', 'c.py', tmp_path / 'x', '--resume']
    assert other['GPUS'] == '4' and other['PORT'] != variables['PORT']


@pytest.mark.parametrize('given', ['3', None])
def test_threads(study, tmp_path, monkeypatch, given):
    """The cores of this machine are shared out; what a launcher starts it knows better, it may be elsewhere."""
    start = 'exec "$PYTHON" "$(dirname "$0")/train.py"'
    (tmp_path / 'tools/dist_train.sh').write_text(f'{start} "$1" "${{@:3}}"')
    (tmp_path / 'tools/slurm_train.sh').write_text(f'{start} "$3" --work-dir "$4"')
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if given:
        monkeypatch.setenv('OMP_NUM_THREADS', given)
    for seed, options in ((1, ['--jobs', '1']), (2, ['--gpus', '2']), (3, ['--slurm', 'big'])):
        done = study('--setting', 'plain: none', '--seeds', f'{seed}', *options)
        assert done.returncode == 0, done.stderr
        expected = given or (f'{os.cpu_count()}' if seed == 1 else '')
        assert (tmp_path / f'work/plain-{seed}/threads').read_text() == expected


def test_what_a_log_says():
    lines = [
        dict(iter=1, loss=2.5, time=0.5, memory=100),
        {'step': 1, 'coco/bbox_mAP': 0.1, 'coco/bbox_mAP_s': 0.05, 'coco/bbox_mAP_l': -1.0},
        dict(iter=2, loss=2.0, time=0.7, memory=120),
        dict(iter=3, loss=1.5, time=0.6, memory=120),
        {'step': 2, 'coco/bbox_mAP': 0.3, 'coco/bbox_mAP_s': 0.2},
    ]
    assert collect(lines) == {
        'ap': {'box AP': 0.3, 'box AP small': 0.2},
        'curve': [
            {'step': 1, 'evaluated': 1, 'box AP': 0.1, 'box AP small': 0.05},
            {'step': 3, 'evaluated': 2, 'box AP': 0.3, 'box AP small': 0.2},
        ],
        'loss': [[1, 2.5], [2, 2.0], [3, 1.5]],
        'step_s': 0.6,
        'memory': 120,
    }
    assert collect([{'step': 1, 'accuracy/top1': 75.0}])['ap'] == {'top-1': 0.75}
    assert collect([]) == dict(ap={}, curve=[], loss=[], step_s=None, memory=None)


def test_evaluations_that_found_no_box():
    """mmdet logs no AP for them: it is 0. The same weights evaluated twice are one point of the course."""
    times = dict(time=0.1, data_time=0.01)
    lines = [
        dict(iter=1, loss=2.5, step=1),
        dict(times, step=1),
        dict(iter=2, loss=2.5, step=2),
        {'step': 2, 'coco/bbox_mAP': 0.2, 'coco/bbox_mAP_l': -1.0},
        dict(iter=3, loss=2.5, step=3),
        dict(times, step=3),
        dict(times, step=3),
    ]
    assert [point['box AP'] for point in collect(lines)['curve']] == [0, 0.2, 0]
    assert collect(lines)['ap'] == {'box AP': 0}
    assert (
        collect([line for line in lines if 'coco/bbox_mAP' not in line])['curve'] == []
    )  # nothing knows what was asked


def test_evaluations_are_at_the_end_of_an_epoch():
    """mmengine logs every so many steps of an epoch and not its last one: here epochs have 7 steps."""
    lines = [dict(iter=7 * (epoch - 1) + i, epoch=epoch, loss=1.0) for epoch in (1, 2, 3) for i in (3, 6)]
    for epoch in (3, 2, 1):
        lines.insert(2 * epoch, {'step': epoch, 'coco/bbox_mAP': epoch / 10})
    assert [point['step'] for point in collect(lines)['curve']] == [7, 14, 21]
    assert [point['step'] for point in collect(lines[:3])['curve']] == [6]  # nothing tells how long the epoch is


def test_logs_of_a_training_that_was_resumed(tmp_path):
    """The steps after the last checkpoint were trained twice; they count once."""
    ap = [{'step': i, 'coco/bbox_mAP': i / 10} for i in range(4)]
    steps = [dict(iter=i, loss=float(i), time=1.0) for i in range(9)]
    parts = [[*steps[:4], ap[1], *steps[4:7]], [dict(steps[5], loss=0.5), steps[6], ap[2]], [steps[8], ap[3]]]
    for i, part in enumerate(parts):
        folder = tmp_path / f'{i}/vis_data'
        folder.mkdir(parents=True)
        (folder / 'scalars.json').write_text('\n'.join(map(json.dumps, part)))
    found = read_log(tmp_path)
    assert [point['step'] for point in found['curve']] == [3, 6, 8]
    assert found['loss'] == [[0, 0.0], [1, 1.0], [2, 2.0], [3, 3.0], [4, 4.0], [5, 0.5], [6, 6.0], [8, 8.0]]
    assert read_log(tmp_path / 'none') is None


def test_nothing_logged_yet(tmp_path):
    training = plan(Experiment('x', str(CONFIG), dict(a=None)), tmp_path)[0]
    assert look(training) is None
