"""The runner of experiments works with a training script that only writes what mmengine writes."""

import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import CONFIGS, RESEARCH, ROOT, TOOLS

import training_study  # isort: skip  (helpers puts research/ on the path)
from experiment import Experiment, configs_of, read_experiment
from paper_table import fill, means, paper_table
from trainings import Launcher, Training, collect, look, plan, read_log

from sbp_mmdet.plan.variants import load_config

CONFIG = CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'

TRAIN = """
import json, os, runpy, sys
from pathlib import Path

config, folder = runpy.run_path(sys.argv[1]), Path(sys.argv[3])
sbp, seed = config['model']['backbone']['sbp_cfg'], config['randomness']['seed']
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
ap = 0.4 if sbp is None else sbp.get('keep_ratio', 0.5) / 10
lines = [dict(iter=20, loss=3.0 + seed), {'step': 1, 'coco/bbox_mAP': 0.01}, dict(iter=40, loss=2.0 + seed)]
if seed != 14:
    lines += [{'step': 6, 'coco/bbox_mAP': ap + seed / 100, 'coco/segm_mAP': ap}]
(folder / 'now/vis_data/scalars.json').write_text('\\n'.join(map(json.dumps, lines)))
(folder / 'now/now.log').write_text('2026/11/21 12:00:00 - x\\nmore\\n2026/11/21 12:01:30 - y')
"""


# With little else in it, for each call reads and formats a config several times.
SMALL = """
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
model = dict(backbone=dict(type='SBPConvNeXt', arch='atto', sbp_cfg=None))
train_cfg = dict(max_epochs=6)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))
"""
EXPERIMENT = """
config = 'small.py'
settings = dict(plain=None, quarter=dict(preset='sbp', keep_ratio=0.25))
seeds = [1, 2]
"""


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """Return a function that runs the tool in this process, with a replacement of the training script."""
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools/train.py').write_text(TRAIN)
    (tmp_path / 'small.py').write_text(SMALL)
    (tmp_path / 'e.py').write_text(EXPERIMENT)
    monkeypatch.setattr(training_study, 'TOOLS', tmp_path / 'tools')

    def run(*args, file='e.py'):
        words = ['training_study.py', tmp_path / file, '--work-dir', tmp_path / 'work', *args]
        monkeypatch.setattr(sys, 'argv', [*map(str, words)])
        code, message = 0, ''
        try:
            training_study.main()
        except SystemExit as end:
            code, message = (end.code, '') if isinstance(end.code, int) else (1, str(end.code))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err + message)

    return run


ONE = ('--labels', 'plain', '--seeds')


def test_settings_and_seeds(study, tmp_path):
    done = study('--jobs', '2', '--json', tmp_path / 'out.json')
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ['plain', '2', '41.5', '±', '0.7', '40.0', '±', '0.0'] in lines
    # The same from seed to seed: told apart, with an interval of no width.
    assert 'quarter      2   4.0 ± 0.7   2.5 ± 0.0  **-37.5 (-37.5 to -37.5)**  **-37.5' in done.stdout
    written = json.loads((tmp_path / 'out.json').read_text())
    assert written['results']['plain']['2']['seconds'] == 90
    # What was trained is not trained again, another seed is.
    assert study('--seeds', '1', '2', '3').returncode == 0
    counts = {path.parent.name: len(path.read_text()) for path in tmp_path.glob('work/*/count')}
    assert counts == {f'{label}-{seed}': 1 for label in ('plain', 'quarter') for seed in (1, 2, 3)}
    other = study('--no-run', '--cfg-options', 'train_cfg.max_epochs=9')
    assert other.returncode == 2 and 'plain-1 holds another training: train_cfg differ' in other.stderr


def test_results_that_say_nothing(study, tmp_path):
    folder = tmp_path / 'work/plain-1'
    folder.mkdir(parents=True)
    (folder / 'result.json').write_text('{}')
    done = study(*ONE, '1', '--no-run')
    assert done.returncode == 2 and f'{folder} has no config.py, so nothing says what was trained' in done.stderr
    (folder / 'result.json').unlink()
    assert study(*ONE, '1').returncode == 0
    (folder / 'result.json').write_text('{"curve')
    for option in ((), ('--no-run',)):
        done = study(*ONE, '1', *option)
        assert done.returncode == 1 and 'result.json is damaged' in done.stderr
    (folder / 'result.json').unlink()
    done = study(*ONE, '7', '--no-run')
    assert done.returncode == 1 and 'no log yet' in done.stderr


def test_what_has_not_ended_is_reported(study, tmp_path):
    assert study().returncode == 0
    (tmp_path / 'work/quarter-2/result.json').unlink()
    scalars = tmp_path / 'work/quarter-2/now/vis_data/scalars.json'
    scalars.write_text('\n'.join(scalars.read_text().splitlines()[:3]) + '\n{"half a li')
    done = study('--no-run')
    assert 'quarter, seed 2: not ended, 20 steps evaluated' in done.stdout and '-37.5, one seed' in done.stdout


def test_paper(study, tmp_path):
    """The table has the paper's values, the measured ones and the difference; pages have a marker or not."""
    paper = "heads = ['memory', 'box AP', 'mask AP']\npaper = dict(plain=[8.0, 46.2, 41.7])\n"
    configs = f'configs = dict(other={str(CONFIG)!r})\n'
    (tmp_path / 'table.py').write_text(EXPERIMENT + paper + configs)
    page = tmp_path / 'page.md'
    page.write_text('<!-- results: table short -->\nold\n<!-- end -->\n<!-- results: table -->\n<!-- end -->\n')
    done = study('--labels', 'plain', '--write', page, file='table.py')
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ['here', '41.5', '40.0'] in lines and ['difference', '-4.7', '-1.7'] in lines
    text = page.read_text()
    assert '| plain | 8.0 | 46.2 | 41.5 | 41.7 | 40.0 |' in text and 'old' not in text
    assert f'| [other]({os.path.relpath(CONFIG, tmp_path)}) |' in text and '| other | here |' not in text
    done = study('--no-run', '--labels', 'plain', '--write', tmp_path / 'e.py', file='table.py')
    assert done.returncode == 1 and 'has no marker' in done.stderr


def test_pages_of_the_repository_are_what_the_tool_writes():
    for name in ('coco', 'imagenet'):
        experiment, marker = read_experiment(RESEARCH / f'experiments/{name}.py'), f'<!-- results: {name}'
        pages = [page for page in (*ROOT.glob('*.md'), *CONFIGS.glob('*/*.md')) if marker in page.read_text()]
        assert pages
        for page in pages:
            assert fill(page, experiment, means({})) == page.read_text(), page
    assert paper_table(experiment, {}).count('paper') == 8


@pytest.mark.parametrize(
    ('seed', 'message'),
    [
        (13, 'a training failed'),
        (14, 'a training logged no AP at its end'),
        (15, 'a training logged no AP at its end'),
    ],
)
def test_a_training_that_fails_is_named(study, tmp_path, seed, message):
    done = study('--seeds', f'{seed}')
    assert done.returncode == 1
    assert f'plain, seed {seed}: {message}' in done.stderr and 'log.txt' in done.stderr
    assert seed != 13 or 'out of luck' in (tmp_path / 'work/plain-13/log.txt').read_text()
    assert not list(tmp_path.glob('work/*/result.json'))


def test_one_process_trains_in_a_folder(study, tmp_path):
    """The process that started the training may be dead while the training still runs."""
    folder = tmp_path / 'work/plain-16'
    code = (
        f'import sys; from pathlib import Path; sys.path[:0] = [{str(RESEARCH)!r}, {str(ROOT)!r}]; '
        f'import training_study; training_study.TOOLS = Path({str(tmp_path / "tools")!r}); training_study.main()'
    )
    words = [sys.executable, '-c', code, tmp_path / 'e.py', '--work-dir', tmp_path / 'work', *ONE, '16']
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 200
        while not (folder / 'pid').exists() or not (folder / 'pid').read_text():
            assert time.monotonic() < end and first.poll() is None
            time.sleep(0.05)
        for _ in range(2):
            second = study(*ONE, '16')
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
    assert study(*ONE, '16').returncode == 0
    assert (folder / 'count').read_text() == 'xx'  # the one left alone, and the one after it


def test_a_failure_is_told_at_once(study, tmp_path):
    """A failed training run is reported before the others end."""
    done = study(*ONE, '16', '13', '--jobs', '2')
    assert done.returncode == 1 and 'plain, seed 13: a training failed' in done.stderr
    assert not (tmp_path / 'work/plain-16/count').exists()
    (tmp_path / 'work/plain-16/stop').touch()


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('--jobs', '0'), '--jobs 0'),
        (('--labels', 'third'), "there is no 'third'"),
        (('--jobs', '2', '--gpus', '4'), '--jobs 2: all would train on the same GPUs'),
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
        ("configs = dict(a='x.py'", 'e.py: SyntaxError'),
        ("configs = dict(a='x.py')\nheads = ['AP']", "heads names ['AP']; there are ['memory', "),
        ("configs = {'a/b': 'x.py'}", 'name folders'),
        ("configs = dict(a='x.py')\ncompare = dict(b='a')", "compare names ['b']"),
        ("configs = dict(a='x.py')", 'x.py does not exist'),
        (f"config = '{CONFIG}'\nsettings = dict(a=dict(preset='sbp', keep_ratio=7))", 'keep_ratio=7'),
    ],
    ids=str,
)
def test_bad_experiments(tmp_path, text, message):
    file = tmp_path / 'e.py'
    file.write_text(text)
    with pytest.raises(ValueError, match='.*') as error:
        experiment = read_experiment(file)
        configs_of(experiment, experiment.labels)
    assert message in str(error.value)


def _pop_setting(config):
    """Remove the setting from the backbone if it is one of this package's, and otherwise from the hook."""
    own = config['model']['backbone'].pop('sbp_cfg', None)
    for hook in config.pop('custom_hooks', []):
        if hook['type'] == 'LeanHook':
            return {key: value for key, value in hook.items() if key != 'type'}
    return own


@pytest.mark.parametrize('file', sorted((RESEARCH / 'experiments').glob('*.py')), ids=lambda file: file.stem)
def test_experiments_of_the_repository(file, tmp_path, monkeypatch):
    load = functools.lru_cache(lambda path, options: load_config(path, json.loads(options)))  # once for all settings
    monkeypatch.setattr('experiment.load_config', lambda path, options: copy.deepcopy(load(path, json.dumps(options))))
    experiment = read_experiment(file)
    rates = file.stem == 'imagenet'  # stochastic depth differs as well: test_classification.py
    if rates and importlib.util.find_spec('mmpretrain') is None:
        assert all((file.parent / name).is_file() for name in experiment.configs.values())
        with pytest.raises(ValueError, match='ViT-Tiny: .* mmpretrain is not installed'):
            plan(experiment, tmp_path)
        return
    seeds = experiment.seeds[:2]  # the others differ in nothing else
    trainings = plan(experiment, tmp_path, seeds=seeds)
    assert len(trainings) == len(experiment.labels) * len(seeds) == len({t.folder for t in trainings})
    for training in trainings:
        assert training.config.randomness.seed == training.seed
        setting = _pop_setting(training.config.to_dict())
        assert setting == experiment.settings.get(training.label, setting)
    for label, base in experiment.pairs:  # what is compared differs in the setting alone
        one, other = (next(t.config.to_dict() for t in trainings if t.label == name) for name in (label, base))
        sbp_cfgs = []
        for config in (one, other):
            sbp_cfgs.append(_pop_setting(config))
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
    """The cores of this machine are divided among the runs, unless a launcher starts the runs elsewhere."""
    start = 'exec "$PYTHON" "$(dirname "$0")/train.py"'
    (tmp_path / 'tools/slurm_train.sh').write_text(f'{start} "$3" --work-dir "$4"')
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if given:
        monkeypatch.setenv('OMP_NUM_THREADS', given)
    for seed, options in ((1, ['--jobs', '1']), (3, ['--slurm', 'big'])):
        done = study(*ONE, f'{seed}', *options)
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
    """mmdet logs no AP for them, so it is 0. Two evaluations of the same weights are one point of the course."""
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
    """mmengine logs every n-th step of an epoch, and not its last one. Here epochs have 7 steps."""
    lines = [dict(iter=7 * (epoch - 1) + i, epoch=epoch, loss=1.0) for epoch in (1, 2, 3) for i in (3, 6)]
    for epoch in (3, 2, 1):
        lines.insert(2 * epoch, {'step': epoch, 'coco/bbox_mAP': epoch / 10})
    assert [point['step'] for point in collect(lines)['curve']] == [7, 14, 21]
    assert [point['step'] for point in collect(lines[:3])['curve']] == [6]  # nothing tells how long the epoch is


def test_logs_of_a_training_that_was_resumed(tmp_path):
    """The steps after the last checkpoint were trained twice, and count once."""
    ap = [{'step': i, 'coco/bbox_mAP': i / 10} for i in range(4)]
    steps = [dict(iter=i, loss=float(i), time=1.0) for i in range(9)]
    parts = [[*steps[:4], ap[1], *steps[4:7]], [dict(steps[5], loss=0.5), steps[6], ap[2]], [steps[8], ap[3]]]
    for i, part in enumerate(parts):
        folder = tmp_path / f'{i}/vis_data'
        folder.mkdir(parents=True)
        (folder / 'scalars.json').write_text('\n'.join(map(json.dumps, part)))
    log = read_log(tmp_path)
    assert [point['step'] for point in log['curve']] == [3, 6, 8]
    assert log['loss'] == [[0, 0.0], [1, 1.0], [2, 2.0], [3, 3.0], [4, 4.0], [5, 0.5], [6, 6.0], [8, 8.0]]
    assert read_log(tmp_path / 'none') is None


def test_nothing_logged_yet(tmp_path):
    training = plan(Experiment('x', str(CONFIG), dict(a=None)), tmp_path)[0]
    assert look(training) is None
