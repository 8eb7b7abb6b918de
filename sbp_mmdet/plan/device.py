"""The device that something is measured on: which one it is, and whether something fits into it."""

import argparse
import contextlib

import torch

__all__ = ['NoDevice', 'check_device', 'is_out_of_memory', 'noting', 'use_device']

# What libraries say that could not get their workspace.
_OUT_OF_MEMORY = (
    'out of memory',
    'CUBLAS_STATUS_ALLOC_FAILED',
    'CUDNN_STATUS_ALLOC_FAILED',
    'CUSOLVER_STATUS_ALLOC_FAILED',
    'CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED',
    'unable to find an engine',
)


def use_device(device: torch.device | str) -> torch.device:
    """Makes a device the current one. A CUDA device gets its index: some of torch's functions refuse it without."""
    device = torch.device(device)
    if device.type == 'cuda':
        device = torch.device('cuda', torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def check_device(device: str) -> str:
    """Refuses a device that is not there; also ``type=`` of an argument.

    Args:
        device (str): 'cpu', 'cuda' or 'cuda:N'.

    Returns:
        str: The same.

    Raises:
        NoDevice: Naming it and what is there. It is a ValueError.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = None
    if kind not in ('cpu', 'cuda'):
        raise NoDevice(f"device {device!r} is unknown; give 'cpu' or 'cuda'")
    if kind == 'cuda' and not torch.cuda.is_available():
        raise NoDevice(f"device {device!r}: torch sees no GPU; give 'cpu'")
    if kind == 'cuda' and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise NoDevice(f'device {device!r}: torch sees {torch.cuda.device_count()} GPUs, counted from 0')
    return device


class NoDevice(ValueError, argparse.ArgumentTypeError):
    """There is no such device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device has too little memory, whichever library found it out."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(text.lower() in message for text in _OUT_OF_MEMORY)


@contextlib.contextmanager
def noting(row: dict, wrapper, device: torch.device | str):
    """Notes what a table of times and bytes must not hide of the training step that runs in here.

    Args:
        row (dict): Gets one more of ``overflows`` if the optimizer was left out, because a gradient was infinite; and
            in ``retries`` how often CUDA's allocator had to give cached memory back to find room.
        wrapper (OptimWrapper): What steps.
        device (torch.device | str): Where it runs.
    """
    steps, before = [], _allocator_retries(device)
    handle = wrapper.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    try:
        yield
    finally:
        handle.remove()
    found = dict(retries=_allocator_retries(device) - before)
    if hasattr(wrapper, 'loss_scaler') and wrapper.should_update():
        found['overflows'] = int(not steps)
    row.update({key: row.get(key, 0) + number for key, number in found.items() if number})


def _allocator_retries(device):
    return torch.cuda.memory_stats(device)['num_alloc_retries'] if torch.device(device).type == 'cuda' else 0
