"""Feature maps that a layer shares with the next one, so that they are saved once.

A convolution needs its input for the gradient of its weight. Often the layer in front saves tensors from which this
input can be recomputed: a SiLU saves its own input, a batch norm the convolution's output. If the layer in front
registers how to recompute its output (:func:`share_map`), the next layer looks it up (:func:`find_shared_map`) and
saves nothing of its own.

This is right only while nothing writes to the output in between. Writes that autograd sees are found by the versions of
tensors. Writes past autograd (``x.data``, numpy, DLPack) cannot be seen, so layers share maps only within a
:class:`Scope`: while a module runs inside of which all code is known (see :mod:`sbp_mmdet.passes`). The scope holds the
registered maps. It ends when the module returns or raises, and nothing is ever attached to a tensor.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from .uncompiled import uncompiled

__all__ = [
    'Scope',
    'share_map',
    'find_shared_map',
    'find_shared_maps_of',
    'is_made_here',
    'mark_as_made_here',
    'open_scope',
    'unchanged_code',
]

_thread = threading.local()  # attribute `scope`: the innermost scope that is open in this thread
_TOP_HOOKS = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', None)  # torch 2.8 and newer


class _Entry(NamedTuple):
    """Entry of a scope: how an output is recomputed, and the versions of the tensors that this needs.

    Attributes:
        output (weakref.ref): The output. When it is freed, the entry is removed.
        map (tuple): NamedTuple of tensors with a method ``load`` that recomputes the output.
        versions (list[tuple[Tensor, int]]): The tensors of ``map`` with their versions.
        version (int): Version of the output.
    """

    output: weakref.ref
    map: tuple
    versions: list[tuple[Tensor, int]]
    version: int


class Scope:
    """Context manager within which layers of this thread share saved maps. An inner scope sees no maps of an outer one.

    Args:
        code (Iterable[int]): Ids of code that was found unchanged, see :func:`unchanged_code`. Default: none.

    Example:
        >>> with Scope():
        ...     out = backbone(images)
    """

    def __init__(self, code: Iterable[int] = ()):
        self.code = {*code}

    @uncompiled
    def __enter__(self) -> None:
        self._outer = getattr(_thread, 'scope', None)
        _thread.scope = self
        self.checkpoint = _checkpoint()
        self.entries: dict[int, _Entry] = {}
        self.made: dict[int, weakref.ref] = {}

    @uncompiled
    def __exit__(self, *_) -> None:
        _thread.scope = self._outer
        self._outer = None
        self.entries.clear(), self.made.clear()


def open_scope() -> Scope | None:
    """Return the scope within which layers share maps here, or ``None`` if there is none.

    They do not inside of a checkpoint that was entered within the scope. What runs again there, in the backward pass,
    finds no scope, and has to save as many tensors as the first run.
    """
    scope = getattr(_thread, 'scope', None)
    return scope if scope is not None and scope.checkpoint is _checkpoint() else None


def unchanged_code() -> set[int] | None:
    """Return the ids of the code that was found unchanged within the open scope, or ``None`` if there is none."""
    scope = getattr(_thread, 'scope', None)
    return None if scope is None else scope.code


def _checkpoint():
    """Return an object that identifies the innermost checkpoint: the hooks on saved tensors that it sets."""
    if _TOP_HOOKS is not None:
        hooks = _TOP_HOOKS(False)
        return hooks[0] if hooks else None
    frame, path = sys._getframe(1), torch.utils.checkpoint.__file__
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame


def share_map(y: Tensor, map: tuple) -> None:
    """Register how a layer's output is recomputed from what the layer saves. Without an open scope, do nothing.

    Args:
        y (Tensor): The output.
        map (tuple): NamedTuple of tensors and nested NamedTuples, with a method ``load`` that returns the values of y.
    """
    scope = open_scope()
    if scope is not None:
        entries, key, versions = scope.entries, id(y), []
        _note_versions(map, versions)
        entries[key] = _Entry(weakref.ref(y, lambda _: entries.pop(key, None)), map, versions, y._version)


def find_shared_map(x: Tensor) -> tuple | None:
    """Return how a layer's input is recomputed from what the layer in front saves.

    An entry whose input or tensors were written to since is removed.

    Args:
        x (Tensor): The input.

    Returns:
        tuple | None: The map that was given to :func:`share_map`, or ``None`` if there is none, or no longer.
    """
    scope = open_scope()
    entry = None if scope is None else scope.entries.get(id(x))
    if entry is None:
        return None
    if entry.version != x._version or any([tensor._version != version for tensor, version in entry.versions]):
        del scope.entries[id(x)]
        return None
    return entry.map


def find_shared_maps_of(edges: Sequence[tuple]) -> list[tuple | None]:
    """Return how outputs of nodes of autograd's graph are recomputed, as :func:`find_shared_map` does for a tensor.

    Args:
        edges (Sequence[tuple]): For each output its node, or ``None`` if it has none, and its number among the outputs
            of this node: ``next_functions`` of a later node.

    Returns:
        list[tuple | None]: The map of each output, or ``None`` if there is none.
    """
    scope = open_scope()
    outputs = [entry.output() for entry in scope.entries.values()] if scope is not None else ()
    made_by = {(id(y.grad_fn), y.output_nr): y for y in outputs if y is not None and y.grad_fn is not None}
    outputs_of_edges = (None if node is None else made_by.get((id(node), number)) for node, number in edges)
    return [None if y is None else find_shared_map(y) for y in outputs_of_edges]


def mark_as_made_here(y: Tensor) -> None:
    """Register a tensor without gradient as made within this scope, unlike images, which other code may write to."""
    scope = open_scope()
    if scope is not None:
        made, key = scope.made, id(y)
        made[key] = weakref.ref(y, lambda _: made.pop(key, None))


def is_made_here(x: Tensor) -> bool:
    """Return whether a tensor was made within this scope, by the graph or by :func:`mark_as_made_here`."""
    scope = open_scope()
    return scope is not None and (not x.is_leaf or id(x) in scope.made)


def _note_versions(value, found):
    for member in value:
        if member is None:
            continue
        if isinstance(member, Tensor):
            found.append((member, member._version))
        elif isinstance(member, tuple):
            _note_versions(member, found)
