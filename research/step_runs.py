"""Times and peaks of whole training steps, by preset."""

import contextlib
import copy
import time
from collections.abc import Callable, Sequence

import torch
from allocator_trace import record_and_replay
from case import free_memory, get_keys_for_all_images, name_the_base, parse_name, try_and_note
from mmengine.config import Config
from rivals import RIVALS
from torch import nn
from turns import count_kernels, take_turns

from sbp_mmdet.passes import DrawsInPasses
from sbp_mmdet.plan.batch import at_the_first_step
from sbp_mmdet.plan.detector import build_training
from sbp_mmdet.plan.device import use_device
from sbp_mmdet.plan.variants import with_variant

__all__ = ['limit_memory', 'measure_peaks', 'measure_steps', 'time_training_step']


def measure_peaks(step: Callable[[], object]) -> dict[str, int]:
    """Measure the memory that a training step allocates and reserves on a GPU.

    Args:
        step (Callable): The step. It runs three times: the second step is the first one that begins with all optimizer
            states, and in the third all workspaces of libraries exist.

    Returns:
        dict[str, int]: In bytes: ``peak_bytes`` (allocated in the third step), ``reserved`` (the most in all steps,
        beginning with an empty cache), ``replayed`` (the same according to the model of the caching allocator) and
        ``context`` (other memory of the process on the GPU); and ``retries``, how often the allocator freed its cache
        to make room.
    """
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats().get('num_alloc_retries', 0)
    with record_and_replay() as replayed:
        step()
        step()
        reserved = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return dict(
        peak_bytes=torch.cuda.max_memory_allocated(),
        reserved=max(reserved, torch.cuda.max_memory_reserved()),
        retries=torch.cuda.memory_stats().get('num_alloc_retries', 0) - retries,
        context=total - free - torch.cuda.memory_reserved(),
        **replayed,
    )


def time_training_step(model: nn.Module, wrapper, data: dict) -> float:
    """Run a training step: forward pass, backward pass, optimizer step.

    Args:
        model (nn.Module): The detector in training mode.
        wrapper (OptimWrapper): Optimizer wrapper of its parameters.
        data (dict): A batch, which is not changed.

    Returns:
        float: Duration in seconds.
    """
    batch = copy.deepcopy(data)  # a detector's data preprocessor changes it
    if not next(model.parameters()).is_cuda:
        start = time.perf_counter()
        model.train_step(batch, wrapper)
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    model.train_step(batch, wrapper)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


class _Steps:
    """Training steps of a detector by preset. All models share weights, optimizer wrapper and batch of the first one.

    Args:
        config (Config): Config of the detector.
        case (dict): Arguments of :func:`build_training`.
    """

    def __init__(self, config, case):
        self._config, self._case, self._shared = config, case, None

    def build(self, name, **more):
        """Return the model with a preset or a rival, with more keys of the preset."""
        preset, keys = parse_name(name)
        torch.manual_seed(0)
        model, wrapper, batch = build_training(with_variant(self._config, preset, **{**keys, **more}), **self._case)
        if self._shared:
            model.load_state_dict(self._shared[0].state_dict(keep_vars=True), assign=True)
        for group in wrapper.optimizer.param_groups:
            group['lr'] = 0.0  # the same arithmetic, and all steps of all presets begin at the same weights
        self._shared = self._shared or (model, wrapper, batch)
        if rival := RIVALS.get(name):
            if rival.change:
                rival.change(model.backbone)
            if rival.wrap:
                model.backbone.forward = rival.wrap(model.backbone.forward)
        return model

    def run(self, model, i):
        """Run a step with the i-th seed, and return its time."""
        torch.manual_seed(i)
        _, wrapper, batch = self._shared
        return dict(seconds=time_training_step(model, wrapper, batch))

    def clear(self):
        """Drop the gradients that a failed step has left."""
        if self._shared:
            self._shared[1].zero_grad()


def measure_steps(
    config: Config,
    names: Sequence[str],
    *,
    rounds: int,
    cap: int | None = None,
    profile: bool = True,
    note=lambda row: None,
    **case,
):
    """Measure whole training steps by preset, on the same batch and the same weights, which do not change.

    Args:
        config (Config): Config of the detector.
        names (Sequence[str]): Names of presets (with keys) and rivals, which change the backbone.
        rounds (int): Number of timed rounds of each step.
        note (Callable): Is called with each row as soon as it is measured. Default: does nothing.
        cap (int | None): Bytes of the GPU that torch may allocate. Under a cap presets take no turns, because each
            would pay for the memory that the one before has cached. If ``None``, all. Default: None.
        profile (bool): Whether kernels are counted on CUDA, after the times. Default: True.
        **case: ``batch``, ``height``, ``width``, ``boxes``, ``device``.

    Returns:
        list[dict]: For each name ``preset``, ``seconds``, ``ratio``, ``ratio_min``, ``ratio_max``, on CUDA also what
        :func:`measure_peaks` returns, ``launches`` and ``busy``, and ``compared_with`` if that is not the first name;
        or ``reason``.
    """
    rows, ready, steps, cuda = [], [], _Steps(config, case), torch.device(case['device']).type == 'cuda'

    def measure(row, name):
        model = steps.build(name)
        if cuda:
            drops = any(isinstance(module, DrawsInPasses) for module in model.modules())
            whole = steps.build(name, **get_keys_for_all_images(name)) if drops else model
            row.update(measure_peaks(lambda: steps.run(whole, 0)))
            del whole
        steps.run(model, 0)
        if cap:
            take_turns([(row, model)], rounds, lambda model, i: steps.run(model, i + 1), lambda row: None, warm_up=1)
            for key in ('ratio', 'ratio_min', 'ratio_max'):  # to itself
                row.pop(key, None)
        else:
            ready.append((row, model))

    with at_the_first_step(), limit_memory(cap, case['device']):
        for name in names:
            rows.append(dict(preset=name))
            if not try_and_note(rows[-1], name in RIVALS, lambda: measure(rows[-1], name), note):  # noqa: B023
                steps.clear()
        name_the_base(ready, names)
        take_turns(ready, rounds, lambda model, i: steps.run(model, i + 1), note, warm_up=cuda)
        for row, model in ready if cuda and profile else ():
            row.update(count_kernels(lambda: steps.run(model, 0)))  # noqa: B023
            note(row)
    return rows


@contextlib.contextmanager
def limit_memory(cap: int | None, device: str):
    """Limit torch's allocator to ``cap`` bytes of the GPU within the context. CUDA's context is not included."""
    if not cap:
        yield
        return
    device = use_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if cap > total:
        raise ValueError(f'--cap of {cap / 2**30:.2f} GiB is above the {total / 2**30:.2f} GiB of {device}')
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
