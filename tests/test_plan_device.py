"""A device of a measurement is checked, and errors that mean too little memory are recognised."""

import pytest
import torch

from sbp_mmdet.plan.device import NoDevice, check_device, is_out_of_memory, use_device
from sbp_mmdet.plan.memory import peak_bytes


def test_a_gpu_without_a_number(monkeypatch):
    """torch.cuda.set_device does not accept 'cuda'."""
    seen = []

    def check(*args):
        device = torch.device(args[-1])
        assert device.index is not None, 'Expected a torch.device with a specified index'
        seen.append(str(device))

    monkeypatch.setattr(torch.cuda, 'set_device', check)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    assert str(use_device('cuda')) == 'cuda:0' and str(use_device('cuda:3')) == 'cuda:3'
    assert str(use_device('cpu')) == 'cpu'
    assert seen == ['cuda:0', 'cuda:3']


@pytest.mark.parametrize(
    ('device', 'gpus', 'message'),
    [('tpu', 1, "'tpu' is unknown"), ('cuda:0', 0, 'torch sees no GPU'), ('cuda:2', 2, 'torch sees 2 GPUs')],
)
def test_devices_that_are_not_there(device, gpus, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    with pytest.raises(NoDevice, match=message):
        check_device(device)
    assert check_device('cpu') == 'cpu' and (not gpus or check_device('cuda') == 'cuda')


@pytest.mark.parametrize(
    'message',
    [
        'CUDA out of memory. Tried to allocate 2 GiB',
        'GET was unable to find an engine to execute this computation',
        'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`',
        'cuDNN error: CUDNN_STATUS_ALLOC_FAILED',
    ],
)
def test_libraries_that_run_out_of_memory(message):
    assert is_out_of_memory(RuntimeError(message)) and not is_out_of_memory(ValueError(message))


def test_other_errors_are_errors():
    assert not is_out_of_memory(RuntimeError('mat1 and mat2 shapes cannot be multiplied'))


def test_the_first_run_is_not_the_one_that_counts(monkeypatch):
    """On CUDA, the first run also allocates the libraries' workspaces. What it leaves behind is freed before the second
    run."""
    log = []
    for name in ('synchronize', 'reset_peak_memory_stats'):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, 'memory_allocated', lambda: log.append('before') or 10)
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda: 25)
    assert peak_bytes(lambda: log.append('run'), 'cuda', lambda: log.append('clear')) == 15
    assert log == ['run', 'clear', 'synchronize', 'before', 'reset_peak_memory_stats', 'run', 'synchronize']
