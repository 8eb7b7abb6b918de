"""A project with a few images and a detector that trains in seconds, for the tests of configs and tools."""

import functools
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from mmengine.config import Config

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / 'tools'
RESEARCH = ROOT / 'research'
CONFIGS = ROOT / 'configs'
sys.path[:0] = [str(TOOLS), str(RESEARCH)]
from make_synthetic_coco import make_dataset  # noqa: E402

TINY_CONFIG = """
_base_ = './base.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, depths=[1, 1, 2, 1], channels=[8, 16, 32, 64])),
    neck=dict(in_channels=[8, 16, 32, 64], out_channels=16),
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16),
        bbox_head=dict(in_channels=16, fc_out_channels=32),
        mask_roi_extractor=dict(out_channels=16),
        mask_head=dict(in_channels=16, conv_out_channels=16),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre=50, max_per_img=20), rcnn=dict(sampler=dict(num=16))),
    test_cfg=dict(rpn=dict(nms_pre=50, max_per_img=20), rcnn=dict(max_per_img=10)),
)
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(batch_size=1, num_workers=0, persistent_workers=False)
test_dataloader = val_dataloader
param_scheduler = [dict(type='LinearLR', start_factor=0.5, by_epoch=False, end=8)]
train_cfg = dict(max_epochs=2, val_interval=10)
default_hooks = dict(checkpoint=dict(interval=1), logger=dict(interval=1))
visualizer = dict(vis_backends=[])
"""


def _cpu_has_fp16():
    try:
        with torch.autocast('cpu', torch.float16):
            return (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float16 and hasattr(torch.amp, 'GradScaler')
    except RuntimeError:
        return False


needs_fp16 = pytest.mark.skipif(not _cpu_has_fp16(), reason='this torch has no fp16 on a CPU')
FP16 = pytest.param(torch.float16, marks=needs_fp16)  # as one of the values of a parametrized test


def _cpu_has_bf16_attention():
    x = torch.ones(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    except (
        RuntimeError
    ):  # with ATEN_CPU_CAPABILITY below what the processor has, torch calls a kernel that is not there
        return False
    return True


needs_bf16_attention = pytest.mark.skipif(not _cpu_has_bf16_attention(), reason="torch's attention in bf16 fails here")


def make_project(folder: Path, train: int = 8, val: int = 2, size: int = 64) -> Path:
    """Write a data set and a config, as in a project outside of the repository.

    Args:
        folder (Path): Folder to write to, which has to be the working directory of the run.
        train (int): Number of training images. Default: 8.
        val (int): Number of validation images. Default: 2.
        size (int): Height and width of the images, in pixels. Default: 64.

    Returns:
        Path: The config.
    """
    make_dataset(folder / 'data/shapes', train=train, val=val, size=size)
    config = folder / 'tiny.py'
    (folder / 'base.py').write_text(_base_config())
    config.write_text(TINY_CONFIG)
    return config


@functools.cache
def _base_config():
    """Return the quick start's config in one file. For each parent in MMDetection, mmengine reads all metafiles."""
    base = CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
    return Config.fromfile(base, import_custom_modules=False).pretty_text


def make_environment(**variables) -> dict:
    """Return the environment of a process that runs on one CPU core, with this Python first in ``PATH``.

    Args:
        **variables: Additional variables.
    """
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    single = dict(PATH=path, CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1')
    return {**os.environ, **single, **{key: str(value) for key, value in variables.items()}}


def run(*command, cwd: Path, check: bool = True, seconds: float = 300, **variables) -> subprocess.CompletedProcess:
    """Run a command until it ends, and capture its output.

    Args:
        *command: Words of the command.
        cwd (Path): Working directory.
        check (bool): Whether the test fails, showing the output, if the command fails. Default: True.
        seconds (float): Time limit, in seconds. Default: 300.
        **variables: Environment variables.

    Returns:
        subprocess.CompletedProcess: The result, with stdout and stderr as text.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=make_environment(**variables), capture_output=True, text=True, timeout=seconds, check=False
    )
    if check and done.returncode:
        raise AssertionError(f'{words} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}')
    return done


class ForkedProcess:
    """Process that runs a Python program in a fork of this one, which has imported torch and mmdet.

    It starts in a tenth of a second, where a new interpreter takes eight. The arguments, attributes and methods are
    those of :class:`subprocess.Popen` that the report of a GPU uses.

    Args:
        words (Sequence): The command, ``[sys.executable, script, ...]`` or ``[sys.executable, '-m', module, ...]``.
        cwd (Path): Working directory, which modules are imported from as well.
        env (dict): Environment variables.
        stdout (IO): File for stdout and stderr.
        stderr: Not used, because it goes where stdout goes. Default: None.
        start_new_session (bool): Whether the process leads a process group of its own. Default: False.
    """

    def __init__(self, words, cwd, env, stdout, stderr=None, start_new_session=False):
        self.args = [*map(str, words)]
        given = self.args[1:], cwd, env, stdout, start_new_session
        self._process = mp.get_context('fork').Process(target=_run_program, args=given)
        self._process.start()
        self.pid = self._process.pid
        if start_new_session:  # here as well, because the process may be ended before it has come so far
            os.setpgid(self.pid, self.pid)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()


def run_forked(script: Path, *words, cwd: Path, seconds: float = 300, **variables) -> subprocess.CompletedProcess:
    """Run a script in a :class:`ForkedProcess`, until it ends or is killed.

    Args:
        script (Path): The script.
        *words: Its arguments.
        cwd (Path): Working directory, which modules are imported from as well.
        seconds (float): Time limit, in seconds. Default: 300.
        **variables: Environment variables.

    Returns:
        subprocess.CompletedProcess: The result, with stdout and stderr together as text.
    """
    with tempfile.TemporaryFile('w+') as output:
        process = ForkedProcess([sys.executable, script, *words], cwd, make_environment(**variables), output)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            raise AssertionError(f'{process.args} needed more than {seconds} s') from None
        output.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read(), '')


def _run_program(words, cwd, variables, output, leads):
    if leads:
        os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout = sys.stderr = open(1, 'w', buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    module = words[0] == '-m'
    sys.argv = words[module:]
    sys.path[:0] = [str(cwd)] if module else [str(Path(words[0]).resolve().parent), str(cwd)]
    try:
        if module:
            runpy.run_module(words[1], run_name='__main__', alter_sys=True)
        else:
            runpy.run_path(words[0], run_name='__main__')
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        os._exit(1 if isinstance(end.code, str) else end.code or 0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_ranks(function: Callable, *args, number: int = 2, seconds: float = 300) -> None:
    """Run a function in several processes, as torchrun does, but forked from this one, which has imported everything.

    Args:
        function (Callable): It makes the process group itself, from the environment.
        *args: Arguments of the function.
        number (int): Number of processes. Default: 2.
        seconds (float): Time limit, in seconds. Default: 300.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        variables = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=f'{free.getsockname()[1]}', WORLD_SIZE=f'{number}')
    ranks = mp.start_processes(_run_rank, (function, args, variables), number, join=False, start_method='fork')
    end = time.monotonic() + seconds
    while not ranks.join(timeout=1):  # raises what a process raises
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            raise AssertionError(f'{function} needed more than {seconds} s')


def _run_rank(rank, function, args, variables):
    os.environ.update(variables, RANK=f'{rank}', LOCAL_RANK=f'{rank}')
    function(*args)
