"""Functions that compilers skip, at little cost where nothing is compiled."""

import functools
from collections.abc import Callable

import torch

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code
except ImportError:  # old versions of torch
    get_eval_frame_callback = None

__all__ = ['uncompiled']


def uncompiled(function: Callable, recursive: bool = True) -> Callable:
    """Decorate a function that compilers skip.

    It does what ``torch.compiler.disable`` does, whose wrapper calls ten functions at each call. Where no compiler is
    active in the thread, there is nothing to disable, and the function is called at once.

    Args:
        function (Callable): The function.
        recursive (bool): Whether they also skip everything that it calls. Default: True.

    Returns:
        Callable: The decorated function.
    """
    disabled = torch.compiler.disable(function, recursive=recursive)
    if get_eval_frame_callback is None:
        return disabled

    @functools.wraps(disabled)  # with the attributes by which a compiler knows what it must not trace into
    def run(*args, **kwargs):
        return (function if get_eval_frame_callback() is None else disabled)(*args, **kwargs)

    skip_code(run.__code__)  # a compiler that is called for this frame itself would trace it otherwise
    return run
