"""The parts of a detector that presets checkpoint: stem, neck, heads, layers of transformers, blocks that run as is."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import DETRHead, RTMDetHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.necks import DyHead
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmengine.model import Sequential
from torch import Tensor, nn

from .adapters import LeanModule, adapter_of
from .adapters.inputs import are_known_inputs
from .adapters.resnet import LeanSplitAttention
from .adapters.resnet_chain import may_chain
from .checkpointing import Checkpointed, find_override, mix_out_checkpoint, run_checkpointed
from .chunked_heads import computes_rois_one_by_one, runs_in_chunks
from .ops.common.autograd_function import Form
from .ops.common.modes import evaluates_lean, runs_within_others
from .ops.common.operation_sequence import run_sequence
from .ops.common.uncompiled import uncompiled
from .ops.roi_chunks import run_in_chunks
from .passes import is_known_inside, is_of_known_library
from .surgery import Mixin, detectors, refuse_tracing, stock_class

__all__ = [
    'CheckpointedInChunks',
    'CheckpointedLayer',
    'CheckpointedLevels',
    'CheckpointedPart',
    'give_parts_back',
    'parts_to_checkpoint',
]

_FEW_CLASSES = 100  # of a mask head: COCO has 80, LVIS 1,203


class CheckpointedPart(Checkpointed):
    """Part of a detector that saves only its inputs, unless a user's hook inside of it would run twice."""

    def checkpoints_now(self) -> bool:
        """See :meth:`.Checkpointed.checkpoints_now`."""
        return super().checkpoints_now() and is_known_inside(self)


class CheckpointedInChunks(CheckpointedPart):
    """Head of RoIs that saves only the maps of the RoIs, and is recomputed in chunks of RoIs."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Run the head on maps of RoIs, shape (number of RoIs, C, H, W)."""
        chunked = torch.is_grad_enabled() and self.checkpoints_now() and not runs_within_others()
        if not (chunked and runs_in_chunks(self, x)):
            return super().forward(x)
        if not self.has_run:
            self.has_run = True
        return run_in_chunks(super(Checkpointed, self).forward, x, [self])


_thread = threading.local()  # attribute `running`: the layer that runs in its checkpoint


@functools.cache
def _recomputed(form):
    return dataclasses.replace(form, recomputed=True)


class CheckpointedLayer(CheckpointedPart):
    """Changed layer of a transformer that saves only its input.

    If all of it is operations, they run as one autograd node (:func:`.run_sequence`). Otherwise it is checkpointed, and
    drops the same images when it is recomputed.
    """

    replays_draws = True

    def forward(self, *args, **kwargs):
        """Run the layer."""
        if self.training:
            refuse_tracing(self, args)
        elif not evaluates_lean():
            return super().forward(*args, **kwargs)
        output = self._run_operations(args, kwargs)
        return super().forward(*args, **kwargs) if output is None else output

    @uncompiled
    def _run_operations(self, args, kwargs):
        if kwargs or not self.checkpoints_now() or not self._is_operations(args):
            return None
        self.has_run = True
        x, *others = args
        with self._as_recomputed():
            return run_sequence(lambda x: self.lean_forward(x, *others), x)

    def _is_operations(self, args):
        """Return whether a call with these arguments runs lean now, without own code of any part."""
        if not self.runs_lean():
            return False
        bound = self._lean.bound
        return not bound.left and are_known_inputs(bound.bypassed.precisions, args, {}) and self.accepts(*args)

    def replayable(self, forward: Callable) -> Callable:
        """See :meth:`.Checkpointed.replayable`."""
        if self._lean.draws is not None:
            forward = self._lean.draws.in_this_pass(forward)

        def run(*args, **kwargs):
            with self._as_recomputed():
                return forward(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _as_recomputed(self):
        outer, _thread.running = getattr(_thread, 'running', None), self
        try:
            yield
        finally:
            _thread.running = outer

    @property
    def form(self) -> Form:
        """Form of the operations."""
        return _recomputed(super().form) if getattr(_thread, 'running', None) is self else super().form


class CheckpointedLevels(Mixin):
    """Dense head that saves only the maps of the pyramid, and is recomputed level by level."""

    outermost = True

    def forward_single(self, *args, **kwargs):
        """Run the head on the map of one level."""
        forward = super().forward_single
        if self.training and is_known_inside(self):
            return run_checkpointed(self, forward, args, kwargs)
        return forward(*args, **kwargs)


def parts_to_checkpoint(
    model: nn.Module, chosen: Mapping[int, nn.Module], kinds: Collection[str]
) -> Iterator[tuple[nn.Module, type[Mixin]]]:
    """Yield the parts of a model that save less memory if they are checkpointed, with the class to mix in.

    All modules inside of them are of known libraries and without hooks, so they may run twice. Parts that are a single
    operation, such as a feature pyramid, are excluded, because they recompute what is cheap themselves. Blocks of
    transformers are checkpointed if they save more than their input. Layers of DETRs are not: those of encoders save
    one map, and those of decoders have few tokens.

    Args:
        model (nn.Module): The model, changed by its adapters.
        chosen (Mapping[int, nn.Module]): Modules that may be changed, by id.
        kinds (Collection[str]): Kinds of parts: 'stem' (of a CSP network), 'neck', 'dense head', 'mask head' (the only
            one, of few classes), 'RoI head' (any other one), 'layer' (of a transformer), 'block' (of backbone or neck,
            which runs its own code), 'layered block' (of a backbone, which calls layers that save a map each), 'mixed
            block' (such a block with layers that run their own code), 'mixed layer' (of a neck: a convolution with
            norm and activation that runs its own code).

    Yields:
        tuple[nn.Module, type[Mixin]]: A part, and the class to mix into its own.
    """
    parts = [pair for detector in detectors(model).values() for pair in _find_parts(detector)]
    chosen_parts, mixed_layers = [], []
    if 'mixed layer' in kinds:
        mixed_layers = _find_mixed_layers(model, [part for kind, part in parts if kind in ('neck', 'block')])
    if 'block' in kinds:  # first: a neck that holds a backbone is not recomputed whole, but block by block
        chosen_parts += [(block, CheckpointedPart) for block in model.modules() if _is_unchanged_block(block)]
    blocks = {id(block) for block, _ in chosen_parts}
    if len(mixed_layers) > _FEW_LAYERS:  # recomputed as a whole, a neck of so many would save all their maps at once
        blocks |= {*map(id, mixed_layers)}
    for kind, part in parts:
        if kind in kinds and blocks.isdisjoint(map(id, part.modules())):
            chosen_parts.append((part, _mixin(part)))
    if 'layer' in kinds:
        chosen_parts += [(layer, mixin) for layer in model.modules() if (mixin := _mixin_of_layer(layer))]
    if chooses := [
        _LAYERED[kind] for kind in kinds if kind in _LAYERED
    ]:  # last: those in a head are recomputed with it
        chosen_parts += [
            (block, CheckpointedPart) for block in model.modules() if any(choose(block) for choose in chooses)
        ]
    chosen_parts += [(layer, CheckpointedPart) for layer in mixed_layers]
    taken = set()
    for part, mixin in chosen_parts:
        trains = any(p.requires_grad for p in part.parameters())
        if mixin and id(part) in chosen and id(part) not in taken and trains and _may_run_twice(part):
            taken.update(map(id, part.modules()))  # modules inside are recomputed with it
            yield part, mixin


def _find_parts(detector):
    stem = getattr(getattr(detector, 'backbone', None), 'stem', None)
    if isinstance(stem, nn.Module):  # its maps are the largest, and its input is the image
        yield 'stem', stem
    if isinstance(neck := getattr(detector, 'neck', None), nn.Module):
        yield from _split_neck(neck)
    for child in detector.children():
        if isinstance(child, BaseDenseHead):
            yield 'dense head', child
        elif isinstance(child, BaseRoIHead):
            for name, head in child.named_children():
                if name.endswith('head'):
                    heads = head if isinstance(head, nn.ModuleList) else [head]
                    kind = 'mask head' if _is_freed_first(head) else 'RoI head'
                    yield from ((kind, one) for one in heads)


def _is_freed_first(head):
    """Return whether the maps of a mask head are freed before the backward pass reaches its peak.

    A single mask head runs last, so its maps are the first to be freed. The maps of several stages and the logits of
    many classes add to the peak.
    """
    return stock_class(type(head)) is FCNMaskHead and head.num_classes <= _FEW_CLASSES


def _split_neck(neck):
    """Yield the parts of a neck that run one after the other, so that one of them is recomputed at a time."""
    kind = stock_class(type(neck))
    if kind is DyHead:
        yield from (('block', block) for block in neck.dyhead_blocks)
    elif kind in (nn.Sequential, Sequential):
        for piece in neck:
            yield from _split_neck(piece)
    else:
        yield 'neck', neck


def _mixin(part):
    if isinstance(part, LeanModule) and not part.separable:
        return None
    if computes_rois_one_by_one(part):
        return CheckpointedInChunks
    if not isinstance(part, BaseDenseHead):
        return CheckpointedPart
    if 'forward_single' in stock_class(type(part)).forward.__code__.co_names:
        return CheckpointedLevels
    return CheckpointedPart if isinstance(part, RTMDetHead) and not isinstance(part, DETRHead) else None


def _mixin_of_layer(layer):
    return CheckpointedLayer if isinstance(layer, LeanModule) and layer.is_sequence else None


def _is_unchanged_block(module):
    return not isinstance(module, LeanModule) and bool((kind := adapter_of(module)) and kind.checkpointed)


def _calls_its_layers(module):
    """Return whether a module is a block that calls its layers one by one, and is no part of a chain."""
    return isinstance(module, LeanModule) and module.calls_layers and not may_chain(module)


def _is_mixed(module):
    """Return whether such a block has code that is no operation of this package, and saves its maps as floats."""
    if not _calls_its_layers(module):
        return False
    return _has_own_code(module, _in_operations(module)) or any(
        isinstance(inside, LeanSplitAttention) for inside in module.modules()
    )


def _in_operations(root):
    """Return the changed modules inside of a module, and the modules that their operations bypass."""
    lean = [inside for inside in root.modules() if isinstance(inside, LeanModule)]
    return {*lean, *(layer for inside in lean for layer in inside._lean.bound.used)}


def _has_own_code(module, known):
    """Return whether a layer inside of a module has parameters and is not one of those that :func:`_in_operations`."""
    return any(layer._parameters and layer not in known for layer in module.modules())


def _find_mixed_layers(model, necks):
    """Return the mixed layers of necks, see :func:`_is_mixed_layer`."""
    known = _in_operations(model)
    return [layer for neck in necks for layer in neck.modules() if _is_mixed_layer(layer, known)]


def _is_mixed_layer(module, known):
    """Return whether a module is a convolution with norm and activation of which a part at least runs its own code.

    Each of its modules saves a map as floats. Its input is one map, which often goes to other layers, too.
    """
    if stock_class(type(module)) is not ConvModule or not _has_own_code(module, known):
        return False
    overwrites = module.with_activation and getattr(module.activate, 'inplace', False)
    return len([*module.children()]) > 1 and not (overwrites and module.order[0] == 'act')


_LAYERED = {'layered block': _calls_its_layers, 'mixed block': _is_mixed}
# Mixed layers of a neck that is recomputed as a whole, at most.
_FEW_LAYERS = 8


def _may_run_twice(part):
    if find_override({*map(type, part.parameters())}):
        return False
    return all(map(is_of_known_library, part.modules())) and is_known_inside(part)


def give_parts_back(module: nn.Module) -> None:
    """Undo the checkpointing of a part. Any other module is left unchanged.

    Args:
        module (nn.Module): The module; changed in place.
    """
    mix_out_checkpoint(module, (CheckpointedPart, CheckpointedLevels))
