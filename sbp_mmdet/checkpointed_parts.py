"""The parts of a detector that ``preset='exact_min'`` checkpoints: neck, dense heads level by level, heads of RoIs."""

from collections.abc import Iterator, Mapping

from mmdet.models.dense_heads import DETRHead, RTMDetHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from torch import nn

from .adapters import LeanModule
from .checkpointing import Checkpointed, run_checkpointed
from .passes import is_known_inside, of_known_library
from .surgery import Mixin, detectors, mix_out, stock_class

__all__ = ['CheckpointedLevels', 'CheckpointedPart', 'give_parts_back', 'parts_to_checkpoint']


class CheckpointedPart(Checkpointed):
    """A part of a detector that saves its inputs only; all, if a user's hook inside of it would run twice."""

    def checkpoints_now(self) -> bool:
        """See :meth:`.Checkpointed.checkpoints_now`."""
        return super().checkpoints_now() and is_known_inside(self)


class CheckpointedLevels(Mixin):
    """A dense head that saves the maps of the pyramid only, and is recomputed one level after the other."""

    outermost = True

    def forward_single(self, *args, **kwargs):
        """Run the head on the map of one level."""
        forward = super().forward_single
        if self.training and is_known_inside(self):
            return run_checkpointed(self, forward, args, kwargs)
        return forward(*args, **kwargs)


def parts_to_checkpoint(model: nn.Module, chosen: Mapping[int, nn.Module]) -> Iterator[tuple[nn.Module, type[Mixin]]]:
    """Yield the parts of a model that store less if they are checkpointed, and how.

    All code inside of them is of known libraries, without hooks, so it may run twice. Parts that are one operation
    already, such as a feature pyramid, are left out: they recompute what is cheap themselves. Transformers are left out
    too, whose changed layers store about as little as a checkpoint does.

    Args:
        model (nn.Module): The model, changed by its adapters.
        chosen (Mapping[int, nn.Module]): Modules that may be changed, by id.

    Yields:
        tuple[nn.Module, type[Mixin]]: A part, and the class to mix into its own.
    """
    for detector in detectors(model).values():
        for part in _parts(detector):
            mixin = _mixin(part)
            trains = any(p.requires_grad for p in part.parameters())
            if mixin is not None and id(part) in chosen and trains and _may_run_twice(part):
                yield part, mixin


def _parts(detector):
    if isinstance(neck := getattr(detector, 'neck', None), nn.Module):
        yield neck
    for child in detector.children():
        if isinstance(child, BaseDenseHead):
            yield child
        elif isinstance(child, BaseRoIHead):
            for name, head in child.named_children():
                if name.endswith('head'):
                    yield from head if isinstance(head, nn.ModuleList) else [head]


def _mixin(part):
    if isinstance(part, LeanModule) and not part.separable:
        return None
    if not isinstance(part, BaseDenseHead):
        return CheckpointedPart
    if 'forward_single' in stock_class(type(part)).forward.__code__.co_names:
        return CheckpointedLevels
    return CheckpointedPart if isinstance(part, RTMDetHead) and not isinstance(part, DETRHead) else None


def _may_run_twice(part):
    return all(map(of_known_library, part.modules())) and is_known_inside(part)


def give_parts_back(module: nn.Module) -> None:
    """Undo the checkpointing of a part; another module stays as it is.

    Args:
        module (nn.Module): The module; changed in place.
    """
    mix_out(module, (CheckpointedPart, CheckpointedLevels))
