"""Alternatives to this package's presets, for ``benchmark.py``. Each runs on a plain module."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from unittest import mock

import torch
import torch.utils.checkpoint as cp
from torch import nn

__all__ = ['RIVALS', 'Rival', 'plain_draws']

_SAVED_BY_CHOICE = ('convolution', 'mm', 'addmm', 'bmm', 'baddbmm')  # of torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Rival:
    """Alternative way to store less.

    Attributes:
        name (str): Name on the command line.
        meaning (str): One line for --help.
        preset (str): The preset that it runs on. Default: 'none'.
        wrap (Callable | None): Forward pass -> forward pass. Default: None.
        change (Callable | None): Changes a module in place. Default: None.
        compiled (bool): Whether ``torch.compile`` compiles it. Default: False.
    """

    name: str
    meaning: str
    preset: str = 'none'
    wrap: Callable | None = None
    change: Callable[[nn.Module], None] | None = None
    compiled: bool = False


def _within(enter):
    """Return a change of a forward pass that runs it inside a context."""

    def wrap(run):
        def wrapped(*args, **kwargs):
            with enter():
                return run(*args, **kwargs)

        return wrapped

    return wrap


@contextlib.contextmanager
def _saving_products():
    """Make checkpoints save the results of convolutions and matrix products."""
    if not hasattr(cp, 'create_selective_checkpoint_contexts'):
        raise ValueError(
            f'torch {torch.__version__} has no selective checkpointing; take another rival, or a newer torch'
        )
    operators = [getattr(torch.ops.aten, name).default for name in _SAVED_BY_CHOICE]
    contexts = functools.partial(cp.create_selective_checkpoint_contexts, operators)
    with mock.patch.object(cp, 'checkpoint', functools.partial(cp.checkpoint, context_fn=contexts)):
        yield


def _compile(run, budget=None, backend='inductor'):
    config = importlib.import_module('torch._functorch.config')  # slow, so only where something is compiled
    if budget is not None and not hasattr(config, 'activation_memory_budget'):
        raise ValueError(
            f'torch {torch.__version__} has no activation_memory_budget; take another rival, or a newer torch'
        )
    torch._dynamo.reset()
    inner = torch._dynamo.lookup_backend(backend)

    def compile_graph(graph, inputs):
        # The budget is read where a graph is compiled. A backend of its own for each rival: otherwise one would find
        # the graphs of another, for the code is the same.
        with config.patch({} if budget is None else {'activation_memory_budget': budget}):
            return inner(graph, inputs)

    return torch.compile(run, backend=compile_graph)


def _offload():
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _batch_norms_in_place(module):
    from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval_for_single_model

    turn_on_efficient_conv_bn_eval_for_single_model(module)


def plain_draws(compiled: bool):
    """Make compiled code draw with torch's own generator, as plain code does, in the backward pass too."""
    if not compiled:
        return contextlib.nullcontext()
    return importlib.import_module('torch._inductor.config').patch(fallback_random=True)


RIVALS = {
    rival.name: rival
    for rival in (
        Rival('selective', 'blocks checkpointed, products saved', 'with_cp', _within(_saving_products)),
        Rival('compile', 'torch.compile', wrap=_compile, compiled=True),
        *(
            Rival(
                f'compile-{b}',
                f'torch.compile, activation_memory_budget {b}',
                wrap=functools.partial(_compile, budget=b),
                compiled=True,
            )
            for b in (0.5, 0.25, 0.1)
        ),
        Rival('save-on-cpu', 'what is saved goes to the host and comes back', wrap=_within(_offload)),
        Rival('conv-bn-eval', "mmengine's efficient_conv_bn_eval", change=_batch_norms_in_place),
    )
}
