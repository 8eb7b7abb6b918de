"""Measures stored bytes, times and gradient errors of presets, for a module of a detector or for whole steps.

    python research/benchmark.py CONFIG --presets none with_cp exact sbp --size 800x1344 --amp bf16
    python research/benchmark.py CONFIG --module backbone.stages.0.0 --rivals compile save-on-cpu
    python research/benchmark.py CONFIG --step --size 320x533 --boxes 20

CONFIG is any detector's; what it says of presets is left out. The module's input is taken from a forward pass of the
plain detector, so no family has to be known here. "stored" is what the forward pass stores for the backward pass,
parameters and images excluded; "peak" is the most that tensors of one forward and backward pass hold at a time. With
rivals both come from the allocator. Gradients (all parameters together, fp32, smooth images, stochastic depth on, the
same random numbers for all) are compared with those of the first preset. Presets take turns: a time is compared with
that of the first preset in the same round. A preset that is named twice shows the noise.

--step measures training steps of the whole detector: forward pass, backward pass and optimizer; on CUDA with mixed
precision as the config has it, with peaks, and with --cap while torch may have no more memory than that; on a CPU in
fp32, times alone (for bytes: sbp-mmdet plan). There a preset may have the planner's pieces: exact+targets+cp-heads.
"""

import argparse
import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from case import Case, capture, compared, launches, parse_name, smooth, take_turns
from mmengine.config import Config, DictAction
from provenance import describe_machine, output_file, write_json
from rivals import RIVALS, plain_draws
from tables import append_line, benchmark_table
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sbp_mmdet.plan.batch import at_the_first_step
from sbp_mmdet.plan.cuda_rules import autocast, full_fp32
from sbp_mmdet.plan.detector import build_training, own_crops, timed_step
from sbp_mmdet.plan.device import check_device, is_out_of_memory, use_device
from sbp_mmdet.plan.memory import held_bytes, peak_bytes, saved_bytes
from sbp_mmdet.plan.variants import load_config, plain, with_variant
from sbp_mmdet.presets import PRESETS

__all__ = ['measure_module', 'measure_steps']

DEFAULT = ['none', 'with_cp', 'exact', 'int8', 'sampled', 'sbp']
AMP = {'off': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


class _Runner:
    """Runs cases of a module on its input."""

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

    def clear(self, case):
        case.model.zero_grad()
        for leaf in tree_flatten(self.inputs)[0]:
            if isinstance(leaf, Tensor):
                leaf.grad = None

    def gradients(self, case, draws=2):
        found = []
        for seed in range(draws):
            torch.manual_seed(seed)
            outs = self.forward(case)
            # Small: in fp16 the sum over all positions would overflow.
            torch.autograd.backward(outs, [smooth(o.shape).to(o) * 0.01 for o in outs])
            found += [(f'{seed}.{n}', p.grad.float()) for n, p in case.module.named_parameters() if p.grad is not None]
            self.clear(case)
        return dict(found)

    def bytes(self, case, by_allocator):
        if by_allocator:
            self.step(case)  # what the first run makes for good does not count
            self.clear(case)
            saved, peak = held_bytes(lambda: self.forward(case, fresh=True), self.device)
        else:
            inputs = [x for x in tree_flatten(self.inputs)[0] if isinstance(x, Tensor)] if self.from_images else []
            known = [*case.model.parameters(), *case.model.buffers(), *inputs]
            saved = saved_bytes(lambda: self.forward(case), known)
            peak = peak_bytes(lambda: self.step(case), self.device, lambda: self.clear(case))
        self.clear(case)
        return dict(saved_bytes=saved, peak_bytes=peak)

    def seconds(self, case):
        _wait(self.device)
        start = time.perf_counter()
        self.step(case)
        _wait(self.device)
        seconds = time.perf_counter() - start
        self.clear(case)
        return seconds


def _wait(device):
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize()


def _of_all_images(name):
    """Return keys under which stochastic depth leaves out no image.

    Draws are then those of the plain model, and bytes those of a step that drops none, as the planner counts them.
    """
    return dict(skip_dropped_images=False) if PRESETS[parse_name(name)[0].partition('+')[0]].form else {}


def _tried(row: dict, rival: bool, measure: Callable[[], object], note: Callable[[dict], object]) -> bool:
    """Run something and note its row before and after; return whether it ran.

    If a preset does not apply, a rival fails or memory does not suffice, the row gets the reason. Any other error is
    noted too and ends the process: after an error of CUDA everything else would fail.
    """
    note(dict(row, state='begun'))
    try:
        measure()
        note(row)
        return True
    except Exception as error:  # whatever a compiler may raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        row['reason'] = 'out of memory' if is_out_of_memory(error) else text.partition('.  ')[0][:120]
        note(row)
        if not (rival or isinstance(error, ValueError) or is_out_of_memory(error)):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def measure_module(
    config: Config,
    names: Sequence[str],
    module: str,
    *,
    amp,
    rounds,
    channels_last=False,
    note=lambda row: None,
    **case,
):
    """Measure stored bytes, gradient errors and times of a module, by preset and rival.

    Args:
        config (Config): A plain detector's.
        names (Sequence[str]): Of presets, with keys, and rivals; the baseline first.
        module (str): Name of the submodule.
        amp (str): Of autocast: 'off', 'bf16' or 'fp16'.
        rounds (int): Timed rounds; 0: no times.
        channels_last (bool): Input and weights as (N, H, W, C) in memory. Default: False.
        note (Callable): Gets each row before it is measured, when all but its times is there, and with times after the
            first and the last round. Default: nothing.
        **case: ``batch``, ``height``, ``width``, ``boxes``, ``device``.

    Returns:
        list[dict]: For each name ``preset`` and ``saved_bytes``, ``peak_bytes``, ``cosine``, ``error``, ``seconds``,
        ``ratio``, ``ratio_min``, ``ratio_max``, with autocast ``amp_error``, on CUDA ``launches``, for compiled rivals
        ``compile_s``; or ``reason``, why it did not run.

    Raises:
        ValueError: If the module is not there, or the baseline does not run.
    """
    device = case['device']
    by_allocator = torch.device(device).type == 'cuda' or any(name in RIVALS for name in names)
    with own_crops(), at_the_first_step():
        torch.manual_seed(0)
        model, _, batch = build_training(config, **case)
        batch['inputs'] = [(smooth((1, *x.shape))[0] * 40 + 128).clamp(0, 255).to(x) for x in batch['inputs']]
        if channels_last:
            model.to(memory_format=torch.channels_last)
        found, images = capture(model, batch, module, lambda: autocast(device, AMP[amp]))
    if channels_last:
        found = tree_map(_channels_last, found)
    runner, plain_runner = (_Runner(found, images, device, dtype) for dtype in (AMP[amp], None))
    plain_runner.inputs = tree_map(_in_fp32, runner.inputs)
    rows, cases, exact = [], [], []

    def measure(row, name):
        keys = _of_all_images(name)
        with full_fp32(), plain_draws(name in RIVALS):
            error = plain_runner.gradients(Case(name, model, module, keys))
        exact[:] = exact or [error]
        row.update(compared(exact[0], error))
        case = Case(name, model, module, {})
        whole = Case(name, model, module, keys) if keys else case
        first = runner.seconds(case)
        row.update(runner.bytes(whole, by_allocator))
        if case.rival and case.rival.compiled:
            row['compile_s'] = max(first - runner.seconds(case), 0.0)
        elif AMP[amp]:
            row['amp_error'] = compared(exact[0], runner.gradients(whole))['error']
        row.update(launches(lambda: runner.step(case)))
        runner.clear(case)
        cases.append((row, case))

    for name in names:
        rows.append(dict(preset=name))
        if not _tried(rows[-1], name in RIVALS, lambda: measure(rows[-1], name), note) and len(rows) == 1:  # noqa: B023
            raise ValueError(f'{name}, which all others are compared with: {rows[0]["reason"]}; name another one first')
    take_turns(cases, rounds, lambda case, i: runner.seconds(case), note)
    return rows


def _in_fp32(x):
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().float().requires_grad_(x.requires_grad) if floats else x


def _channels_last(x):
    four = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if four else x


def measure_steps(
    config: Config, names: Sequence[str], *, rounds: int, cap: int | None = None, note=lambda row: None, **case
):
    """Measure whole training steps by preset, on the same batch and the same weights, which stay as they are.

    Args:
        config (Config): The detector.
        names (Sequence[str]): Presets and rivals; rivals change the backbone.
        rounds (int): How often each step is timed.
        note (Callable): Gets each row as soon as it is measured. Default: nothing is done with it.
        cap (int | None): Bytes that torch may have of the GPU. Default: None, all.
        **case: ``batch``, ``height``, ``width``, ``boxes``, ``device``.

    Returns:
        list[dict]: For each name ``preset``, ``seconds``, ``ratio``, ``ratio_min``, ``ratio_max``, on CUDA also
        ``peak_bytes``, ``reserved`` and ``launches``; or ``reason``.
    """
    rows, ready, shared, cuda = [], [], [], torch.device(case['device']).type == 'cuda'

    def build(name, **more):
        preset, keys = parse_name(name)
        torch.manual_seed(0)
        model, wrapper, batch = build_training(with_variant(config, preset, **{**keys, **more}), **case)
        if shared:
            model.load_state_dict(shared[0][0].state_dict(keep_vars=True), assign=True)
        for group in wrapper.optimizer.param_groups:
            group['lr'] = 0.0  # the same arithmetic, and all steps of all presets begin at the same weights
        shared[:] = shared or [(model, wrapper, batch)]
        if rival := RIVALS.get(name):
            if rival.change:
                rival.change(model.backbone)
            if rival.wrap:
                model.backbone.forward = rival.wrap(model.backbone.forward)
        return model

    def step(model, i):
        torch.manual_seed(i)
        _, wrapper, batch = shared[0]
        return timed_step(model, wrapper, batch)

    def measure(row, name):
        if cuda:
            whole = build(name, **_of_all_images(name))
            step(whole, 0)
            torch.cuda.reset_peak_memory_stats()
            step(whole, 0)
            row.update(peak_bytes=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
        model = build(name)
        step(model, 0)
        row.update(launches(lambda: step(model, 0)))
        ready.append((row, model))

    with own_crops(), at_the_first_step(), capped(cap, case['device']):
        for name in names:
            rows.append(dict(preset=name))
            _tried(rows[-1], name in RIVALS, lambda: measure(rows[-1], name), note)  # noqa: B023
        take_turns(ready, rounds, lambda model, i: step(model, i + 1), note)
    return rows


@contextlib.contextmanager
def capped(cap: int | None, device: str):
    """Let torch's allocator have no more than ``cap`` bytes of the GPU. CUDA's context is outside of it."""
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


def keep_freed_memory() -> None:
    """Keep freed memory in this process, as CUDA's allocator does.

    By default glibc returns large blocks to the system, which fills them with zeros when they are requested again: a
    module would pay time for each byte that it stores.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads


def parse_args():
    meanings = '\n'.join(f'  {found.name:<24}{found.meaning}' for found in (*PRESETS.values(), *RIVALS.values()))
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f'presets and rivals:\n{meanings}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--module', default='backbone', help='name of a submodule of the detector (default: backbone)')
    parser.add_argument('--step', action='store_true', help='whole training steps instead of a module')
    parser.add_argument(
        '--presets', nargs='+', default=DEFAULT, metavar='PRESET',
        help=f"first is the baseline; with keys: 'sbp,keep_ratio=0.25' (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument('--rivals', nargs='*', choices=RIVALS, metavar='RIVAL', help='also these (no name: all)')
    parser.add_argument('--size', default='800x1344', help='of images, HxW (default: 800x1344)')
    parser.add_argument('--batch', type=int, default=1, help='images (default: 1)')
    parser.add_argument('--boxes', type=int, default=20, help='of each image, with --step (default: 20)')
    parser.add_argument('--amp', choices=AMP, help='of a module (default: fp16 on CUDA, off on a CPU)')
    parser.add_argument('--rounds', type=int, default=9, help='timed rounds; 0: no times (default: 9)')
    parser.add_argument('--cap', type=float, metavar='GIB', help='with --step: what torch may have of the GPU')
    parser.add_argument('--channels-last', action='store_true', help='input and weights as (N, H, W, C) in memory')
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    parser.add_argument('--lines', type=output_file, help='append each row here as soon as it is there')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    names = args.presets + ([] if args.rivals is None else args.rivals or [*RIVALS])
    cuda = torch.device(args.device).type == 'cuda'
    try:
        height, width = map(int, args.size.split('x'))
        if min(height, width, args.batch) < 1 or args.rounds < 0:
            raise ValueError(
                f'--size {args.size} and --batch {args.batch} must be 1 or more, --rounds {args.rounds} 0 or more'
            )
        if args.cap and not (cuda and args.step):
            raise ValueError(f'--cap {args.cap} needs --step and a GPU; sbp-mmdet plan predicts without one')
        for name in names:
            parse_name(name)
        args.device = str(use_device(args.device))
        if not cuda:
            keep_freed_memory()
        case = dict(batch=args.batch, height=height, width=width, boxes=args.boxes, device=args.device)
        config = plain(load_config(args.config, args.cfg_options))
        note = functools.partial(append_line, args.lines) if args.lines else lambda row: None
        note(dict(machine=describe_machine(args.device)))
        if args.step:
            own = dict(module='training step', cap=args.cap)
            rows = measure_steps(
                config, names, rounds=args.rounds, cap=args.cap and int(args.cap * 2**30), note=note, **case
            )
        else:
            own = dict(module=args.module, amp=args.amp or ('fp16' if cuda else 'off'))
            own['channels_last'] = args.channels_last
            rows = measure_module(config, names, rounds=args.rounds, note=note, **own, **case)
    except ValueError as error:
        parser.error(str(error))
    print(f'\n{Path(args.config).stem}, {own["module"]}, {args.batch} x {args.size}, {args.device}')
    print(benchmark_table(rows))
    case = dict(config=Path(args.config).stem, rounds=args.rounds, **own, **case)
    if args.json:
        write_json(args.json, dict(machine=describe_machine(args.device), case=case, rows=rows))
        print(f'written to {args.json}')


if __name__ == '__main__':
    main()
