"""A training that is killed and resumed ends like one that was not."""

import shutil

import pytest
import torch
from helpers import TOOLS, run_forked
from resume_project import EPOCHS, make_resume_project, read_masks, read_weights

VERIFIES = True


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('resume')
    make_resume_project(folder)  # 4 iterations an epoch
    return folder


def train(folder, work_dir, *options, **trouble):
    words = ('resume.py', '--work-dir', work_dir, *options)
    done = run_forked(TOOLS / 'train.py', *words, cwd=folder, **trouble)
    assert trouble or done.returncode == 0, done.stdout[-3000:]
    return done, done.stdout


@pytest.fixture(scope='module')
def whole(folder):
    train(folder, 'whole')
    return folder / 'whole'


def test_killed_in_mid_epoch_and_in_mid_write(folder, whole):
    """The run is killed by SIGKILL in the second epoch, then while it writes its checkpoint, and resumed each time."""
    work_dir = folder / 'killed'
    killed, _ = train(folder, 'killed', KILL_AFTER_ITERATION_0=6)
    assert killed.returncode == -9
    assert {path.name for path in work_dir.glob('*.pth*')} == {'epoch_1.pth'}

    killed, log = train(folder, 'killed', '--resume', KILL_WRITING_EPOCH_0=2)
    assert killed.returncode == -25  # SIGXFSZ
    assert 'resumed epoch: 1, iter: 4' in log and 'Epoch(train) [1]' not in log
    assert {path.name for path in work_dir.glob('*.pth*')} == {'epoch_1.pth', 'epoch_2.pth.unfinished'}
    assert (work_dir / 'last_checkpoint').read_text().endswith('epoch_1.pth')

    _, log = train(folder, 'killed', '--resume')
    assert 'resumed epoch: 1, iter: 4' in log
    assert {path.name for path in work_dir.glob('*.pth*')} == {f'epoch_{i}.pth' for i in range(1, EPOCHS + 1)}
    assert read_masks(work_dir) == read_masks(whole)
    assert len(set(read_masks(whole).values())) == 4 * EPOCHS
    expected, actual = read_weights(whole), read_weights(work_dir)
    assert expected.keys() == actual.keys()
    assert not [name for name in expected if not torch.equal(expected[name], actual[name])]


def test_resume_from_a_damaged_checkpoint(folder, whole):
    """mmengine leaves such a file if the run is killed while it writes the last checkpoint again."""
    work_dir = folder / 'damaged'
    shutil.copytree(whole, work_dir)
    (work_dir / 'epoch_3.pth').unlink()
    last, older = work_dir / 'epoch_2.pth', work_dir / 'epoch_1.pth'
    last.write_bytes(last.read_bytes()[:300_000])
    (work_dir / 'last_checkpoint').write_text(str(last))
    _, log = train(folder, 'damaged', '--resume', KILL_AFTER_ITERATION_0=5)
    assert f'{last}, which ' in log and f'is truncated; going on from {older}' in log
    assert 'resumed epoch: 1, iter: 4' in log

    older.unlink()
    failed, log = train(folder, 'damaged', '--resume', KILL_AFTER_ITERATION_0=5)
    assert failed.returncode == 1 and 'Traceback' not in log
    assert f'error: --resume: {last}, which ' in log and 'no whole checkpoint beside it' in log
