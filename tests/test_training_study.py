"""The study of trainings, with a training script that only writes what mmengine writes."""

import json
import subprocess
import sys

import pytest
from helpers import CONFIGS, TOOLS

from sbp_mmdet.study.trainings import collect

TOOL = TOOLS / 'analysis_tools/training_study.py'
CONFIG = CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'

TRAIN = """
import json, sys
from pathlib import Path
from mmengine.config import Config

config, folder = Config.fromfile(sys.argv[1]), Path(sys.argv[3])
sbp, seed = config.model.backbone.sbp_cfg, config.randomness.seed
if seed == 13:
    raise SystemExit('out of luck')
with open(folder / 'count', 'a') as count:
    count.write('x')
(folder / 'now/vis_data').mkdir(parents=True, exist_ok=True)
ap = 0.4 if sbp is None else sbp.keep_ratio / 10
lines = [dict(iter=20, loss=3.0 + seed), {'step': 1, 'coco/bbox_mAP': 0.01}, dict(iter=40, loss=2.0 + seed)]
lines += [{'step': 2, 'coco/bbox_mAP': ap + seed / 100, 'coco/segm_mAP': ap}]
(folder / 'now/vis_data/scalars.json').write_text('\\n'.join(map(json.dumps, lines)))
"""


@pytest.fixture
def study(tmp_path):
    """Runs the tool beside a training script of our own."""
    folder = tmp_path / 'tools/analysis_tools'
    folder.mkdir(parents=True)
    (folder / TOOL.name).write_text(TOOL.read_text())
    (tmp_path / 'tools/train.py').write_text(TRAIN)

    def run(*args):
        command = [sys.executable, folder / TOOL.name, CONFIG, '--work-dir', tmp_path / 'work', *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=TOOLS.parent, env=None)

    return run


SETTINGS = ('--setting', 'plain: none', '--setting', 'quarter: keep_ratio=0.25')


def test_settings_and_seeds(study, tmp_path):
    files = ('--json', tmp_path / 'out.json', '--plot', tmp_path / 'out.png')
    done = study(*SETTINGS, '--seeds', '1', '2', '--jobs', '2', *files)
    assert done.returncode == 0, done.stderr
    assert ['box', 'AP', 'plain', '0.415', '0.410', 'to', '0.420', '2'] in map(str.split, done.stdout.splitlines())
    written = json.loads((tmp_path / 'out.json').read_text())
    assert written['settings'] == {'plain': None, 'quarter': {'keep_ratio': 0.25}}
    one = written['results']['quarter']['2']
    assert one['ap'] == {'box AP': 0.045, 'mask AP': 0.025}
    assert one['loss'] == [[20, 5.0], [40, 4.0]] and one['machine']['commit'] == written['machine']['commit']
    assert (tmp_path / 'out.png').stat().st_size > 1000

    # A second call trains what is new, and what is not the same any more.
    assert study(*SETTINGS, '--seeds', '1', '3').returncode == 0
    assert study('--setting', 'plain: none', '--seeds', '1', '--cfg-options', 'train_cfg.max_epochs=9').returncode == 0
    counts = {path.parent.name: len(path.read_text()) for path in tmp_path.glob('work/*/count')}
    assert counts == {f'{label}-{seed}': 1 for label in ('plain', 'quarter') for seed in (1, 2, 3)} | {'plain-1': 2}


def test_a_training_that_fails_is_named(study, tmp_path):
    done = study(*SETTINGS, '--seeds', '13')
    assert done.returncode == 1
    assert 'plain, seed 13: a training failed' in done.stderr and 'log.txt says why' in done.stderr
    assert 'out of luck' in (tmp_path / 'work/plain-13/log.txt').read_text()
    assert not list(tmp_path.glob('work/*/result.json'))


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('--setting', 'half'), 'cannot be read'),
        (('--setting', 'x: keep_ratio=2'), 'keep_ratio=2'),
        ((*SETTINGS, *SETTINGS), 'same label'),
        ((*SETTINGS, '--jobs', '0'), '--jobs 0'),
    ],
    ids=str,
)
def test_bad_input(study, args, message):
    done = study(*args)
    assert done.returncode == 2
    assert message in done.stderr


def test_what_a_log_says():
    lines = [
        dict(iter=1, loss=2.5, time=0.5, memory=100),
        {'step': 1, 'coco/bbox_mAP': 0.1, 'coco/bbox_mAP_s': 0.05, 'coco/bbox_mAP_l': -1.0},
        dict(iter=2, loss=2.0, time=0.7, memory=120),
        dict(iter=3, loss=1.5, time=0.6, memory=120),
        {'step': 2, 'coco/bbox_mAP': 0.3},
    ]
    assert collect(map(json.dumps, lines)) == {
        'ap': {'box AP': 0.3, 'box AP small': 0.05},
        'curve': [{'step': 1, 'box AP': 0.1, 'box AP small': 0.05}, {'step': 3, 'box AP': 0.3}],
        'loss': [[1, 2.5], [2, 2.0], [3, 1.5]],
        'step_s': 0.6,
        'memory': 120,
    }
    assert collect([]) == dict(ap={}, curve=[], loss=[], step_s=None, memory=None)
