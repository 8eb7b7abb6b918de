"""Stored bytes, gradient errors and times of presets and rivals, for a module of a detector."""

from collections.abc import Sequence

import torch
from case import (
    OUT_OF_MEMORY,
    Case,
    capture,
    compare_gradients,
    get_keys_for_all_images,
    make_smooth_noise,
    name_the_base,
    try_and_note,
)
from mmengine.config import Config
from rivals import RIVALS, plain_draws
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from turns import count_kernels, take_turns, time_step

from sbp_mmdet.plan.batch import at_the_first_step
from sbp_mmdet.plan.cuda_rules import autocast, full_fp32
from sbp_mmdet.plan.detector import build_training
from sbp_mmdet.plan.memory import held_bytes, peak_bytes, saved_bytes

__all__ = ['AMP', 'Runner', 'build_and_capture', 'measure_module']

AMP = {'off': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


class Runner:
    """Runner of a module on its input, for different cases.

    Args:
        found: Arguments of the module, nested.
        images (torch.Size): Shape of the images that the backbone gets.
        device (str): Device of the module.
        dtype (torch.dtype | None): Precision of autocast. If ``None``, it is off.
    """

    def __init__(self, found, images, device, dtype):
        self.images, self.device, self.dtype = images, device, dtype
        self.from_images = False
        self.inputs = tree_map(self._leaf, found)

    def _leaf(self, value):
        if not isinstance(value, Tensor):
            return value
        value = value.detach().clone()
        self.from_images |= value.shape == self.images
        # A block's input is an activation of the block before, and has a gradient; an image has not.
        return value.requires_grad_(value.is_floating_point() and value.shape != self.images)

    def forward(self, case, fresh=False):
        args, kwargs = self.inputs
        if fresh and not self.from_images:  # made anew, it counts where the module keeps it
            args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.inputs)
        with case.alone(self.images), autocast(self.device, self.dtype):
            out = case.run(*args, **kwargs)
        return tuple(o for o in tree_flatten(out)[0] if isinstance(o, Tensor) and o.requires_grad)

    def step(self, case):
        outs = self.forward(case)
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    def clear(self, model):
        """Drop all gradients. Cases share their parameters, so those of a step that failed would go into the next."""
        model.zero_grad()
        for leaf in tree_flatten(self.inputs)[0]:
            if isinstance(leaf, Tensor):
                leaf.grad = None

    def gradients(self, case, draws=2):
        found = []
        for seed in range(draws):
            torch.manual_seed(seed)
            outs = self.forward(case)
            # Small: in fp16 the sum over all positions would overflow.
            torch.autograd.backward(outs, [make_smooth_noise(o.shape).to(o) * 0.01 for o in outs])
            found += [(f'{seed}.{n}', p.grad.float()) for n, p in case.module.named_parameters() if p.grad is not None]
            self.clear(case.model)
        return dict(found)

    def bytes(self, case, by_allocator):
        if by_allocator:
            self.step(case)  # what the first run makes for good does not count
            self.clear(case.model)
            saved, peak = held_bytes(lambda: self.forward(case, fresh=True), self.device)
        else:
            inputs = [x for x in tree_flatten(self.inputs)[0] if isinstance(x, Tensor)] if self.from_images else []
            known = [*case.model.parameters(), *case.model.buffers(), *inputs]
            saved = saved_bytes(lambda: self.forward(case), known)
            peak = peak_bytes(lambda: self.step(case), self.device, lambda: self.clear(case.model))
        self.clear(case.model)
        return dict(saved_bytes=saved, peak_bytes=peak)

    def times(self, case):
        times = time_step(lambda: self.step(case), self.device)
        self.clear(case.model)
        return times


def build_and_capture(
    config: Config, module: str, amp: str, channels_last: bool = False, **case
) -> tuple[nn.Module, Runner]:
    """Build a plain detector, and take the input of a module from a forward pass on smooth images.

    Args:
        config (Config): Config of a plain detector.
        module (str): Name of the submodule.
        amp (str): Precision of autocast: 'off', 'bf16' or 'fp16'.
        channels_last (bool): Whether input and weights are stored as (N, H, W, C). Default: False.
        **case: ``batch``, ``height``, ``width``, ``boxes``, ``device``.

    Returns:
        tuple[nn.Module, Runner]: The detector, and a runner of its module, for use within ``at_the_first_step``.
    """
    torch.manual_seed(0)
    model, _, batch = build_training(config, **case)
    batch['inputs'] = [(make_smooth_noise((1, *x.shape))[0] * 40 + 128).clamp(0, 255).to(x) for x in batch['inputs']]
    if channels_last:
        model.to(memory_format=torch.channels_last)
    found, images = capture(model, batch, module, lambda: autocast(case['device'], AMP[amp]))
    if channels_last:
        found = tree_map(_channels_last, found)
    return model, Runner(found, images, case['device'], AMP[amp])


class _Measured:
    """Module of a detector that is measured by preset and rival, one after the other.

    Args:
        model (nn.Module): The detector.
        module (str): Name of the submodule.
        runner (Runner): Runner of the module.
        amp (str): Precision of autocast: 'off', 'bf16' or 'fp16'.
        by_allocator (bool): Whether bytes are those that the allocator holds.

    Attributes:
        cases (list[tuple[dict, Case]]): Row and case of each preset and rival that ran.
    """

    def __init__(self, model, module, runner, amp, by_allocator):
        self._model, self._module, self._runner = model, module, runner
        self._amp, self._by_allocator = AMP[amp], by_allocator
        self._plain_runner = Runner(runner.inputs, runner.images, runner.device, None)
        self._plain_runner.inputs = tree_map(_in_fp32, runner.inputs)
        self._exact, self.cases = None, []

    def measure(self, row, name):
        """Measure everything but the times in turns, and write it to the row."""
        runner, keys = self._runner, get_keys_for_all_images(name)
        with full_fp32(), plain_draws(name in RIVALS):
            error = self._plain_runner.gradients(Case(name, self._model, self._module, keys))
        if self._exact is None:
            self._exact = error
        row.update(compare_gradients(self._exact, error))
        case = Case(name, self._model, self._module, {})
        whole = Case(name, self._model, self._module, keys) if keys else case
        first = runner.times(case)['seconds']
        row.update(runner.bytes(whole, self._by_allocator))
        if case.rival and case.rival.compiled:
            row['compile_s'] = max(first - runner.times(case)['seconds'], 0.0)
        elif self._amp:
            row['amp_error'] = compare_gradients(self._exact, runner.gradients(whole))['error']
        self.cases.append((row, case))

    def clear(self):
        """Drop the gradients that a case that failed has left."""
        self._runner.clear(self._model)
        self._plain_runner.clear(self._model)


def measure_module(
    config: Config,
    names: Sequence[str],
    module: str,
    *,
    amp,
    rounds,
    channels_last=False,
    profile=True,
    note=lambda row: None,
    **case,
):
    """Measure stored bytes, gradient errors and times of a module, by preset and rival.

    Args:
        config (Config): Config of a plain detector.
        names (Sequence[str]): Names of presets (with keys) and rivals, the baseline first.
        module (str): Name of the submodule.
        amp (str): Precision of autocast: 'off', 'bf16' or 'fp16'.
        rounds (int): Number of timed rounds. If 0, nothing is timed.
        channels_last (bool): Whether input and weights are stored as (N, H, W, C). Default: False.
        profile (bool): Whether kernels are counted on CUDA, after the times: torch's profiler slows down what is
            launched behind it. Default: True.
        note (Callable): Is called with each row before it is measured, without times, and with times. Default: does
            nothing.
        **case: ``batch``, ``height``, ``width``, ``boxes``, ``device``.

    Returns:
        list[dict]: For each name ``preset`` and ``saved_bytes``, ``peak_bytes``, ``cosine``, ``error``, what
        :func:`turns.take_turns` notes, with autocast ``amp_error``, on CUDA ``launches`` and ``busy``, for compiled
        rivals ``compile_s``, and ``compared_with`` if that is not the first name; or ``reason``, why it did not run.

    Raises:
        ValueError: If the module is not there, or the baseline does not apply.
    """
    cuda = torch.device(case['device']).type == 'cuda'
    by_allocator = cuda or any(name in RIVALS for name in names)
    with at_the_first_step():
        model, runner = build_and_capture(config, module, amp, channels_last, **case)
    measured, rows = _Measured(model, module, runner, amp, by_allocator), []
    for name in names:
        rows.append(dict(preset=name))
        if not try_and_note(rows[-1], name in RIVALS, lambda: measured.measure(rows[-1], name), note):  # noqa: B023
            measured.clear()
            if len(rows) == 1 and rows[0]['reason'] != OUT_OF_MEMORY:
                reason = rows[0]['reason']
                raise ValueError(f'{name}, which all others are compared with: {reason}; name another one first')
    name_the_base(measured.cases, names)
    take_turns(measured.cases, rounds, lambda case, i: runner.times(case), note, warm_up=cuda)
    for row, own in measured.cases if cuda and profile else ():
        row.update(count_kernels(lambda: runner.step(own)))  # noqa: B023
        runner.clear(model)
        note(row)
    return rows


def _in_fp32(x):
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().float().requires_grad_(x.requires_grad) if floats else x


def _channels_last(x):
    four = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if four else x
