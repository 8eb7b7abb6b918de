"""The launch scripts start trainings under a real Slurm with two nodes on this machine."""

import os
import shutil
import socket
import time

import pytest
import torch
from helpers import ROOT, TOOLS, run
from resume_project import EPOCHS, make_resume_project, read_masks, read_weights

os.environ['PATH'] += os.pathsep + '/usr/sbin'
PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'srun', 'sbatch', 'scancel', 'scontrol', 'squeue')
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)),
    reason='no Slurm here; on Debian: apt-get install slurm-wlm munge (.ci/run does it where it may)',
)


@pytest.fixture(scope='module')
def slurm(tmp_path_factory):
    """Return the environment for a launch, and a project with a space in its path."""
    folder = tmp_path_factory.mktemp('slurm')
    script = ROOT / 'tests/slurm_cluster.sh'
    run('bash', script, 'up', folder / 'cluster', '2', cwd=folder)
    yield dict(
        SLURM_CONF=folder / 'cluster/slurm.conf',
        MASTER_ADDR='127.0.0.1',  # mmengine takes the first node's name, which is no host here
        GPUS=2,
        GPUS_PER_NODE=1,
        CPUS_PER_TASK=1,
        PYTHONPATH=folder / 'my project',
    )
    run('bash', script, 'down', folder / 'cluster', cwd=folder)


@pytest.fixture(scope='module')
def project(slurm):
    make_resume_project(slurm['PYTHONPATH'], train=8)
    return slurm['PYTHONPATH']


def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


@pytest.fixture(scope='module')
def trained(slurm, project):
    """Run a complete training run with slurm_train.sh."""
    arguments = ('test', 'my job', 'resume.py', 'whole')
    return run('bash', TOOLS / 'slurm_train.sh', *arguments, cwd=project, PORT=free_port(), **slurm)


def test_train(trained, slurm, project):
    log = trained.stdout + trained.stderr
    assert trained.stderr.count('no GPU here: CPU ranks') == 1
    assert 'Distributed launcher: slurm' in log and 'GPU number: 2' in log
    nodes = run('srun', '--nodes=2', '--ntasks=2', '--gres=gpu:1', 'printenv', 'SLURMD_NODENAME', cwd=project, **slurm)
    assert sorted(nodes.stdout.split()) == ['node1', 'node2']
    assert f'Epoch(train) [{EPOCHS}][2/2]' in log  # 8 images, 2 ranks with 2 of them each
    drawn = read_masks(project / 'whole')
    assert set(drawn) == {(rank, step) for rank in range(2) for step in range(2 * EPOCHS)}
    assert len(set(drawn.values())) == len(drawn)  # each rank and step has its own
    assert all(torch.isfinite(value).all() for value in read_weights(project / 'whole').values())


def test_test(trained, slurm, project):
    arguments = ('test', 'my job', 'resume.py', f'whole/epoch_{EPOCHS}.pth', '--work-dir', 'test it')
    done = run('bash', TOOLS / 'slurm_test.sh', *arguments, cwd=project, **dict(slurm, GPUS=1, PORT=free_port()))
    log = done.stdout + done.stderr
    assert 'coco/bbox_mAP:' in log and 'coco/segm_mAP:' in log and 'Epoch(test) [2/2]' in log


def wait_for(condition, what, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.3)


def test_a_requeued_job_ends_like_a_whole_one(trained, slurm, project):
    """A requeue kills the job in its second epoch, after a step that no checkpoint has."""
    script = project / 'job.sh'
    script.write_text(
        '#!/usr/bin/env bash\n'
        '#SBATCH --partition=test --nodes=2 --ntasks-per-node=1 --gres=gpu:1 --requeue --open-mode=append\n'
        f'bash "{TOOLS}/slurm_train.sh" test job resume.py killed\n'
    )
    variables = dict(slurm, PORT=free_port(), PY_ARGS='--resume', HANG_AFTER_ITERATION_0=3)
    job = run('sbatch', '--parsable', '--output=job.log', script, cwd=project, **variables).stdout.strip()
    work_dir, log = project / 'killed', project / 'job.log'

    def slurm_says(*command):
        return run(*command, cwd=project, check=False, **slurm).stdout

    def what():
        return slurm_says('scontrol', 'show', 'job', job) + (log.read_text()[-3000:] if log.exists() else '')

    wait_for(lambda: all((work_dir / f'hanging-{rank}-0').exists() for rank in range(2)), what)
    run('scontrol', 'requeue', job, cwd=project, **slurm)
    # Slurm lets a requeued job wait for two minutes; a node refuses it in the second in which it was killed there.
    wait_for(lambda: 'JobState=PENDING' in slurm_says('scontrol', 'show', 'job', job), what)
    time.sleep(3)
    assert not (work_dir / f'epoch_{EPOCHS}.pth').exists()
    run('scontrol', 'update', f'JobId={job}', 'StartTime=now', cwd=project, **slurm)
    wait_for(lambda: not slurm_says('squeue', '--noheader', '--jobs', job).strip(), what)
    assert 'resumed epoch: 1, iter: 2' in log.read_text(), what()
    assert read_masks(work_dir) == read_masks(project / 'whole')
    expected, actual = read_weights(project / 'whole'), read_weights(work_dir)
    assert expected.keys() == actual.keys()
    assert not [name for name in expected if not torch.equal(expected[name], actual[name])]
