"""Whether training runs under a cap on the GPU's memory."""

import contextlib
from collections.abc import Callable

import torch
from mmengine.config import Config

from .detector import measure_detector
from .device import if_it_fits, use_device
from .variants import with_variant

__all__ = ['cuda_cap', 'run_under_cap']


@contextlib.contextmanager
def cuda_cap(cap: int, device: str = 'cuda'):
    """Lets torch's allocator have no more than ``cap`` bytes of the GPU.

    CUDA's context and what libraries take by themselves are outside of torch's allocator and so outside of the cap.

    Args:
        cap (int): Bytes.
        device (str): The GPU. Default: 'cuda'.

    Raises:
        ValueError: If the GPU has less than that.
    """
    device = use_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if cap > total:
        raise ValueError(f'the cap of {cap / 2**30:.2f} GiB is above the {total / 2**30:.2f} GiB of {device}')
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def run_under_cap(
    config: Config,
    variants: list[str],
    cap: int,
    *,
    device: str = 'cuda',
    capped: Callable = cuda_cap,
    measure: Callable[..., dict] = measure_detector,
    done: Callable[[], None] = lambda: None,
    **case,
) -> list[dict]:
    """Trains a few steps in each variant under the cap.

    Args:
        config (Config): Config of a detector.
        variants (list[str]): Variants that apply to it.
        cap (int): Bytes.
        device (str): The GPU. Default: 'cuda'.
        capped (Callable): Context that enforces the cap. Default: :func:`cuda_cap`.
        measure (Callable): Runs the steps. Default: :func:`measure_detector`.
        done (Callable): Called after each variant.
        **case: ``batch``, ``height``, ``width``, ``boxes`` and further arguments of ``measure``.

    Returns:
        list[dict]: For each variant ``variant`` (its name), ``fits``, and the measured row if it does.
    """
    rows = []
    for variant in variants:
        changed = with_variant(config, variant)
        with capped(cap, device):
            row = if_it_fits(lambda: measure(changed, device=device, **case))  # noqa: B023
            rows.append(dict(variant=variant, **row))
        done()
    return rows
