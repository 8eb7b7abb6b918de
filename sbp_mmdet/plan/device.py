"""The device that something is measured on: which one it is, and whether something fits into it."""

import argparse

import torch

__all__ = ['NoDevice', 'check_device', 'is_out_of_memory', 'use_device']

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
    """Make a device the current one. A CUDA device gets its index: some of torch's functions refuse it without."""
    device = torch.device(device)
    if device.type == 'cuda':
        device = torch.device('cuda', torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def check_device(device: str) -> str:
    """Refuse a device that is not there; also ``type=`` of an argument.

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
    """Return whether an error means that the device is out of memory, whichever library raised it."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(text.lower() in message for text in _OUT_OF_MEMORY)
