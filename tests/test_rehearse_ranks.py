"""If the step of one of two processes does not fit, the rehearsal stops both with the same message."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from helpers import run_ranks
from torch import nn

from sbp_mmdet.plan import rehearse

CASE = dict(batch=2, height=64, width=96, boxes=3)
GB = 2**30


def _rehearse():
    """Return peak and budget of each process, and the messages of both."""
    dist.init_process_group('gloo')
    rank, said = dist.get_rank(), []
    logger = SimpleNamespace(info=said.append)
    runner = SimpleNamespace(model=nn.Linear(1, 1), logger=logger, train_dataloader=None)
    for peaks, budgets, words in (
        ((5, 6), ('8GiB', '8GiB'), 'needs 6.00 GiB: it fits'),
        ((5, 6), (None, None), 'needs 6.00 GiB here; no budget was given'),
        ((5, None), ('8GiB', '8GiB'), 'needs more than the GPU has; 8.00 GiB may be used'),
        ((9, 5), ('8GiB', '8GiB'), 'needs 9.00 GiB; 8.00 GiB may be used'),
        ((5, 5), ('8GiB', '4GiB'), 'needs 5.00 GiB; 4.00 GiB may be used'),
    ):
        peak = None if peaks[rank] is None else peaks[rank] * GB
        with (
            mock.patch.object(rehearse, 'build_largest_batch', lambda runner: ({}, CASE)),
            mock.patch.object(rehearse, '_measure_training_peak', lambda *args, peak=peak: peak),
            mock.patch.object(rehearse, '_advise', lambda *args: ''),
        ):
            try:
                rehearse.RehearseHook(budgets[rank]).before_train(runner)
            except rehearse.DoesNotFit as error:
                said.append(str(error))
        assert words in said.pop(), (rank, peaks)
    dist.destroy_process_group()


def test_all_processes_go_on_or_all_stop():
    run_ranks(_rehearse)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group('gloo', f'file://{tmp_path}/meet', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_buckets_of_distributed_training_count(one_process, monkeypatch):
    """The model runs without its wrapper, which would wait for other ranks; the buckets are as large as gradients."""
    model = nn.Linear(10, 10)
    stepped = []
    monkeypatch.setattr(
        rehearse, '_measure_needed_bytes', lambda runner, model, run, held, usual: stepped.append(model) or 50 + held
    )
    peaks = [
        rehearse._measure_training_peak(SimpleNamespace(model=one, optim_wrapper=None), {}, CASE)
        for one in (model, nn.parallel.DistributedDataParallel(model))
    ]
    assert peaks == [50, 50 + 4 * 110] and stepped == [model, model]
