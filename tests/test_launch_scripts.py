"""The launch scripts pass on their arguments."""

import os
import re
import socket
import sys

import pytest
from helpers import ROOT, TOOLS, make_project, run

LAUNCHERS = ['dist_train.sh', 'dist_test.sh', 'slurm_train.sh', 'slurm_test.sh']


@pytest.fixture
def launch(tmp_path):
    """Run a launch script with replacements of srun and python, which write down arguments and environment."""
    for name in ('srun', 'python', 'other-python'):
        stand_in = tmp_path / 'bin' / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$(basename "$0")" "$@" >seen\nenv -0 >environment\n')
        stand_in.chmod(0o755)

    def start(script, *arguments, **variables):
        search = f'{tmp_path / "bin"}{os.pathsep}{os.environ["PATH"]}'
        run('bash', TOOLS / script, *arguments, cwd=tmp_path, **{'PATH': search, **variables})
        lines = (tmp_path / 'environment').read_text().split('\0')
        return (tmp_path / 'seen').read_text().split('\0')[:-1], dict(line.split('=', 1) for line in lines if line)

    return start


@pytest.mark.parametrize('script', LAUNCHERS)
def test_launcher_is_valid_and_explains_itself(script, tmp_path):
    run('bash', '-n', TOOLS / script, cwd=tmp_path)
    done = run('bash', TOOLS / script, 'only-one', cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert f'bash tools/{script} ' in done.stderr and 'PY_ARGS' in done.stderr and 'set -' not in done.stderr


def test_threads_of_torch_are_not_the_number_of_cores(tmp_path):
    """With ``OMP_NUM_THREADS=1``, mmcv still compiles on all cores, and tests run on all cores."""
    done = run('bash', '-c', f'source "{TOOLS}/usage.sh"; count_cores', cwd=tmp_path, OMP_NUM_THREADS=1)
    assert int(done.stdout) == len(os.sched_getaffinity(0))
    for script in TOOLS.glob('*.sh'):
        assert script.name == 'usage.sh' or '$(nproc)' not in script.read_text()


@pytest.mark.parametrize('word', ['--help', '-h'])
@pytest.mark.parametrize('script', [*LAUNCHERS, 'setup_env.sh', 'quickstart.sh', 'run_tests.sh', 'gpu_report.sh'])
def test_help_is_printed_and_nothing_else_is_done(script, word, tmp_path):
    done = run('bash', TOOLS / script, word, cwd=tmp_path, SBP_PYTHON='/does/not/exist', seconds=20)
    comment = re.match(r'#!.*\n((?:#.*\n)+)', (TOOLS / script).read_text())[1]
    assert done.stdout.strip() == re.sub(r'^# ?', '', comment, flags=re.M).strip() and not done.stderr


@pytest.mark.parametrize('script', ['setup_env.sh', 'quickstart.sh'])
def test_scripts_that_work_for_minutes_refuse_arguments(script, tmp_path):
    done = run('bash', TOOLS / script, '--preset', cwd=tmp_path, SBP_PYTHON='/does/not/exist', check=False, seconds=20)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"error: {TOOLS / script} takes no arguments, and not '--preset'; --help lists the variables that it reads\n"
    )


@pytest.mark.parametrize(
    ('script', 'arguments', 'variables'),
    [
        ('dist_train.sh', ('2', 'c.py'), {}),
        ('dist_train.sh', ('c.py', '0'), {}),
        ('slurm_train.sh', ('part', 'job', 'c.py', 'dir'), dict(GPUS='c.py')),
    ],
)
def test_number_of_gpus_is_named(script, arguments, variables, tmp_path):
    done = run('bash', TOOLS / script, *arguments, cwd=tmp_path, check=False, **variables)
    assert done.returncode == 2
    wrong = variables.get('GPUS', arguments[-1])
    assert done.stderr.startswith(f"error: GPUS='{wrong}' must be a whole number of 1 or more")
    assert done.stderr.count('\n') == 1


def test_dist_train(launch):
    options = ['--work-dir', 'a dir', '--cfg-options', 'a=*', 'b="[(1, 2)]"']
    words, environment = launch('dist_train.sh', 'my config.py', '2', *options, PY_ARGS='--amp  c=*')
    assert words == [
        *('python', str(TOOLS / 'torchrun.py'), '--nnodes=1', '--node_rank=0', '--master_addr=127.0.0.1'),
        *('--master_port=29500', '--nproc_per_node=2', str(TOOLS / 'train.py'), 'my config.py'),
        *('--launcher', 'pytorch', *options, '--amp', 'c=*'),
    ]
    assert environment['PYTHONPATH'].split(os.pathsep)[0] == str(ROOT)


def test_dist_test_on_several_nodes(launch):
    variables = dict(NNODES='4', NODE_RANK='3', MASTER_ADDR='node0', PORT='1234', PYTHON='other-python')
    words, environment = launch('dist_test.sh', 'c.py', 'my model.pth', '8', '--tta', PYTHONPATH='/mine', **variables)
    assert words == [
        *('other-python', str(TOOLS / 'torchrun.py'), '--nnodes=4', '--node_rank=3', '--master_addr=node0'),
        *('--master_port=1234', '--nproc_per_node=8', str(TOOLS / 'test.py'), 'c.py', 'my model.pth'),
        *('--launcher', 'pytorch', '--tta'),
    ]
    assert environment['PYTHONPATH'] == f'{ROOT}{os.pathsep}/mine'


def test_slurm_train(launch):
    variables = dict(SRUN_ARGS='--gres=none --time=1:00', GPUS='16', CPUS_PER_TASK='2', PORT='4321', PY_ARGS='--resume')
    arguments = ('part', 'my job', 'c.py', 'my dir', '--cfg-options', 'a=*')
    words, environment = launch('slurm_train.sh', *arguments, **variables)
    assert words == [
        *('srun', '--partition=part', '--job-name=my job', '--gres=gpu:8', '--ntasks=16', '--ntasks-per-node=8'),
        *('--cpus-per-task=2', '--kill-on-bad-exit=1', '--gres=none', '--time=1:00', 'python', '-u'),
        *(str(TOOLS / 'train.py'), 'c.py', '--work-dir=my dir', '--launcher=slurm', '--cfg-options', 'a=*', '--resume'),
    ]
    assert environment['MASTER_PORT'] == '4321'


def test_slurm_test_with_the_defaults(launch):
    words, environment = launch('slurm_test.sh', 'part', 'job', 'c.py', 'm.pth')
    assert {'--gres=gpu:8', '--ntasks=8', '--ntasks-per-node=8', '--cpus-per-task=5'} <= set(words)
    assert words[-4:] == [str(TOOLS / 'test.py'), 'c.py', 'm.pth', '--launcher=slurm']
    assert environment['MASTER_PORT'] == '29500'
    words, _ = launch('slurm_test.sh', 'part', 'job', 'c.py', 'm.pth', GPUS='2')
    assert {'--gres=gpu:2', '--ntasks=2', '--ntasks-per-node=2'} <= set(words)
    words, _ = launch('slurm_test.sh', 'part', 'job', 'c.py', 'm.pth', GPUS='8', GPUS_PER_NODE='4')
    assert {'--gres=gpu:4', '--ntasks=8', '--ntasks-per-node=4'} <= set(words)


def test_two_cpu_ranks_train_and_test(tmp_path):
    """The launch is real, and starts in another folder than the checkout, in a path with a space."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    folder = make_project(tmp_path / 'my project', train=4, val=2).parent
    options = ['--work-dir', folder / 'two ranks', '--cfg-options', 'train_cfg.max_epochs=1']
    done = run('bash', TOOLS / 'dist_train.sh', 'tiny.py', '2', *options, cwd=folder, PORT=port)
    assert done.stderr.count('no GPU here: CPU ranks') == 1
    log = done.stdout + done.stderr
    assert 'Epoch(train) [1][1/1]' in log and 'coco/segm_mAP:' in log
    assert 'GPU number: 2' in log and 'Distributed launcher: pytorch' in log
    assert (folder / 'two ranks/epoch_1.pth').is_file()


@pytest.mark.parametrize(
    ('end', 'code', 'said'),
    [("sys.exit('error: mine')", 1, 'error: mine'), ('os._exit(7)', 7, ''), ('os.kill(os.getpid(), 9)', 1, 'SIGKILL')],
)
def test_processes_that_fail_are_reported_without_the_traceback_of_the_launcher(end, code, said, tmp_path):
    ranks = tmp_path / 'ranks.py'
    ranks.write_text(f'import os, sys, time\nif os.environ["RANK"] == "1": {end}\ntime.sleep(60)\n')
    words = sys.executable, TOOLS / 'torchrun.py', '--standalone', '--nproc_per_node=2', ranks
    done = run(*words, cwd=tmp_path, check=False)
    assert done.returncode == code and said in done.stderr and 'Traceback' not in done.stderr
    assert ('FAILED' in done.stderr) == (said == 'SIGKILL')  # the summary, which names it
