"""What a forward pass keeps for the backward pass."""

import weakref

import torch

__all__ = ['saved_bytes']


class _Packed:
    """Stands in the autograd graph for a saved tensor, and goes when the graph lets go of it."""

    __slots__ = ('__weakref__', 'tensor')

    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(fn, exclude=()):
    """Bytes that autograd holds for the backward pass when `fn` returns.

    Counts each storage once, whole, whoever saved it (torch's own operations or `ctx.save_for_backward` of a custom
    function). Tensors that a custom function keeps as plain attributes of `ctx` are not seen.

    Args:
        fn (Callable): runs the forward pass and returns what the graph hangs on: a tensor, or any container of them.
        exclude (Iterable[torch.Tensor]): tensors whose storages are not counted, such as parameters, buffers and the
            input. Defaults to none.

    Returns:
        int: bytes.
    """
    packed = weakref.WeakSet()

    def pack(tensor):
        held = _Packed(tensor)
        packed.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        output = fn()  # noqa: F841  keeps the graph alive while it is counted
    # Only what is saved still is looked at: a storage freed on the way may have lent its address to another one.
    storages = [held.tensor.untyped_storage() for held in packed]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in exclude:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
