"""The device of a measurement: checks of its name, and of errors that mean that it is out of memory."""

import argparse

import torch

__all__ = ['NoDevice', 'check_device', 'is_out_of_memory', 'use_device']

# Texts of errors of libraries that could not allocate memory.
_OUT_OF_MEMORY = (
    'out of memory',
    'CUBLAS_STATUS_ALLOC_FAILED',
    'CUDNN_STATUS_ALLOC_FAILED',
    'CUSOLVER_STATUS_ALLOC_FAILED',
    'CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED',
    'unable to find an engine',
)


def use_device(device: torch.device | str) -> torch.device:
    """Make a device the current one, and return it. A CUDA device gets its index, which some functions require.

    Args:
        device (torch.device | str): 'cpu', 'cuda' or 'cuda:N'.

    Returns:
        torch.device: The device.
    """
    device = torch.device(device)
    if device.type == 'cuda':
        device = torch.device('cuda', torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def check_device(device: str) -> str:
    """Check that a device exists; the ``type=`` of a command line's argument.

    Args:
        device (str): 'cpu', 'cuda' or 'cuda:N'.

    Returns:
        str: The same text.

    Raises:
        NoDevice: If the device does not exist. It is a ``ValueError``.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = None
    if kind not in ('cpu', 'cuda'):
        raise NoDevice(f"device {device!r} is unknown; write 'cpu' or 'cuda'")
    if kind == 'cuda' and not torch.cuda.is_available():
        raise NoDevice(f"device {device!r} does not exist: torch sees no GPU; write 'cpu'")
    if kind == 'cuda' and (torch.device(device).index or 0) >= torch.cuda.device_count():
        number = torch.cuda.device_count()
        raise NoDevice(f"device {device!r} does not exist: torch sees {number} GPUs, 'cuda:0' to 'cuda:{number - 1}'")
    return device


class NoDevice(ValueError, argparse.ArgumentTypeError):
    """Error of a device that does not exist."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device is out of memory, whichever library raised it."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(text.lower() in message for text in _OUT_OF_MEMORY)
