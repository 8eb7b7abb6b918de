"""Cases of a benchmark: a preset or a rival in a copy of a detector, the input of a part, and gradient errors."""

import argparse
import contextlib
import copy
import functools
import gc
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from mmengine.config import DictAction
from rivals import RIVALS
from torch import Tensor, nn

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.common.shared_maps import Scope
from sbp_mmdet.passes import DrawsInPasses
from sbp_mmdet.plan.device import is_out_of_memory
from sbp_mmdet.presets import PRESETS, preset_named

__all__ = [
    'OUT_OF_MEMORY',
    'Case',
    'capture',
    'compare_gradients',
    'free_memory',
    'get_keys_for_all_images',
    'make_smooth_noise',
    'name_the_base',
    'parse_name',
    'try_and_note',
]

OUT_OF_MEMORY = 'out of memory'


class Case:
    """Preset or rival that is ready to run."""

    def __init__(self, name: str, model: nn.Module, module: str, keys: dict):
        preset, own = parse_name(name)
        self.name, self.rival = name, RIVALS.get(name)
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        if preset != 'none':
            apply_lean(self.model, preset=preset, **{**own, **keys})
        self.module = self.model.get_submodule(module)
        if self.rival and self.rival.change:
            self.rival.change(self.module)
        self.run = self.rival.wrap(self.module) if self.rival and self.rival.wrap else self.module

    @contextlib.contextmanager
    def alone(self, images: torch.Size) -> Iterator[None]:
        """Open the forward pass of the backbone, so that a part of it can run by itself.

        Args:
            images (torch.Size): Shape of the images that the backbone would get.
        """
        inside = set(self.module.modules())
        with contextlib.ExitStack() as stack:
            stack.enter_context(Scope())
            for owner in self.model.modules():
                if isinstance(owner, DrawsInPasses) and owner not in inside:
                    for draws in owner.step_draws:
                        stack.enter_context(draws.forward_pass(torch.empty(images, device='meta')))
            yield


def parse_name(name: str) -> tuple[str, dict]:
    """Parse 'sbp,keep_ratio=0.25,sampler=random' into preset and keys; a rival has a preset of its own."""
    if name in RIVALS:
        return RIVALS[name].preset, {}
    preset, *words = re.split(r',(?=\w+=)', name)
    preset_named(preset.partition('+')[0])
    if wrong := [word for word in words if '=' not in word]:
        raise ValueError(f"{name!r}: {wrong} is no key=value; write 'sbp,keep_ratio=0.25'")
    parser = argparse.ArgumentParser()
    parser.add_argument('--keys', nargs='+', action=DictAction, default={})
    return preset, dict(parser.parse_args(['--keys', *words] if words else []).keys)


class _Reached(Exception):
    pass


def capture(model: nn.Module, batch: dict, module: str, context: Callable) -> tuple[tuple, torch.Size]:
    """Return the arguments that a module gets in a training step, and the shape of the images.

    Raises:
        ValueError: If the detector has no such module, or its training step does not run it.
    """
    captured = {}

    def note(owner, args, kwargs):
        captured['images'] = next(iter((*args, *kwargs.values()))).shape

    def stop(owner, args, kwargs):
        captured['input'] = args, kwargs
        raise _Reached

    try:
        target = model.get_submodule(module)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name.count('.') < 2][1:]
        raise ValueError(f'--module {module} does not exist; the detector has {names}') from None
    hooks = [model.backbone.register_forward_pre_hook(note, with_kwargs=True)]
    hooks.append(target.register_forward_pre_hook(stop, with_kwargs=True))
    data = model.data_preprocessor(copy.deepcopy(batch), True)
    try:
        with torch.no_grad(), context():
            model(**data, mode='loss')
    except _Reached:
        return captured['input'], captured['images']
    finally:
        for hook in hooks:
            hook.remove()
    raise ValueError(f'--module {module}: no training step runs it; name a module that has a forward pass')


@functools.lru_cache(maxsize=8)  # a GPU would wait for the CPU that draws
def make_smooth_noise(shape: tuple[int, ...]) -> Tensor:
    """Make noise whose neighbouring values are similar, as in photographs, for feature maps or tokens (N, L, C)."""
    generator = torch.Generator().manual_seed(1)
    if len(shape) == 4:
        coarse = torch.randn(*shape[:2], *(n // 8 + 2 for n in shape[2:]), generator=generator)
        return nn.functional.interpolate(coarse, tuple(shape[2:]), mode='bicubic')
    if len(shape) == 3:
        coarse = torch.randn(shape[0], shape[2], shape[1] // 8 + 2, generator=generator)
        return nn.functional.interpolate(coarse, shape[1], mode='linear').transpose(1, 2)
    return torch.randn(tuple(shape), generator=generator)


def compare_gradients(exact: dict[str, Tensor], estimated: dict[str, Tensor]) -> dict[str, float]:
    """Return ``cosine`` and relative ``error`` of all gradients together. A missing gradient counts as zero."""
    dot = exact_square = found_square = error = 0.0
    for name in {*exact, *estimated}:
        zero = torch.zeros_like(exact.get(name, estimated.get(name)))
        e, s = exact.get(name, zero).double(), estimated.get(name, zero).double()
        dot, error = dot + (e * s).sum().item(), error + (e - s).square().sum().item()
        exact_square, found_square = exact_square + e.square().sum().item(), found_square + s.square().sum().item()
    norms = (exact_square * found_square) ** 0.5
    return dict(cosine=dot / norms if norms else 0.0, error=(error / max(exact_square, 1e-300)) ** 0.5)


def get_keys_for_all_images(name: str) -> dict:
    """Return keys with which stochastic depth leaves out no image.

    Its draws are then those of the plain model, and the bytes those of a step that drops no image, as the planner
    counts.
    """
    return dict(skip_dropped_images=False) if PRESETS[parse_name(name)[0].partition('+')[0]].form else {}


def try_and_note(row: dict, rival: bool, measure: Callable[[], object], note: Callable[[dict], object]) -> bool:
    """Run a measurement and note its row before and after; return whether it ran.

    The row gets the reason if a preset does not apply, if a rival fails, or if there is not enough memory. Any other
    error is noted too and ends the process, because after an error of CUDA everything else would fail.

    Args:
        row (dict): The row, which ``measure`` fills.
        rival (bool): Whether it is a rival, which may fail for any reason.
        measure (Callable): Runs the measurement.
        note (Callable): Called with the row.
    """
    note(dict(row, state='begun'))
    free_memory()
    try:
        measure()
        note(row)
        return True
    except Exception as error:  # whatever a compiler may raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        row['reason'] = OUT_OF_MEMORY if is_out_of_memory(error) else text.partition('.  ')[0][:120]
        note(row)
        if not (rival or isinstance(error, ValueError) or is_out_of_memory(error)):
            raise
    free_memory()  # here the error is gone, and with it the frames that hold tensors
    return False


def free_memory() -> None:
    """Return cached memory to the GPU. Otherwise, segments of this variant would count as reserved by the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def name_the_base(cases: list[tuple], names: Sequence[str]) -> None:
    """Name the baseline of the times in each row, if the first name did not run."""
    if cases and cases[0][0]['preset'] != names[0]:
        for row, _ in cases:
            row['compared_with'] = cases[0][0]['preset']
