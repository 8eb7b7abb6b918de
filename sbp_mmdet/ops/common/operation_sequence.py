"""Operations that run one after the other as one autograd node, which saves the input of the first one only.

The backward pass recomputes the inputs of the others, with what each operation saves, and then runs their backward
passes in reverse order. The output of the last operation is not recomputed.

``torch.utils.checkpoint`` would do the same with hooks on each saved tensor and a second run of the modules, whose code
and state would have to be those of the first run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .autograd_function import (
    apply_function,
    differentiable_once,
    put_tensors_back,
    saved_tensors_of,
    take_tensors_out,
)
from .precision import no_autocast
from .recorded_steps import record_steps

__all__ = ['run_sequence']


def run_sequence(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run operations one after the other and save the input of the first one, and parameters.

    Args:
        run (Callable): Applies operations (:class:`.Operation`) to its argument, each to the output of the one before,
            and returns the output of the last one. Images that stochastic depth drops may pass an operation by
            (:func:`.run_on_images`). Nothing else may have a gradient. All parameters are saved, so writing to one of
            them before the backward pass is an error.
        x (Tensor): Input of the first operation.

    Returns:
        Tensor: Output of the last operation.

    Example:
        >>> y = run_sequence(lambda x: channel_mlp(s2, t2._replace(x=f(x))), x)  # f calls an operation, too
    """
    steps = []
    with record_steps(steps):
        y = run(x)
    leaves = [x]
    for step in steps:
        leaves += step.parameters()
    if any([leaf is not None and leaf.requires_grad for leaf in leaves]):
        return apply_function(_Sequence, [y], steps, *leaves)  # in a list, the output is no input of the node
    return y


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, steps, x, *leaves):
        tensors = []
        ctx.structure = take_tensors_out((x, *[step.tensors for step in steps]), tensors)
        ctx.steps = [step._replace(tensors=None) for step in steps]
        ctx.numbers = [len(step.parameters()) for step in steps]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        (y,) = outputs
        return y.clone() if y is x else y  # all images bypassed all operations; what runs next may write to it

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        x, *given = put_tensors_back(ctx.structure, iter(saved_tensors_of(ctx)))
        steps = [step._replace(tensors=tensors) for step, tensors in zip(ctx.steps, given, strict=True)]
        needs_x, *needed = ctx.needs_input_grad[2:]
        through, saved, place = needs_x, [], 0
        with no_autocast(grad):
            for step, number in zip(steps, ctx.numbers, strict=True):
                needs = [through, *needed[place : place + number]]
                x, of_step = step.run_again(x, needs, step is steps[-1])
                saved.append((of_step, needs))
                through, place = any(needs), place + number
            del x
            gradients = []
            for step, number in zip(reversed(steps), reversed(ctx.numbers), strict=True):
                of_step, needs = saved.pop()
                if not any(needs):  # frozen, and so is everything in front
                    gradients = [*[None] * number, *gradients]
                    continue
                grad, own = step.backward(of_step, needs, grad)
                gradients = [*own, *gradients]
        flags = zip(gradients, needed, strict=True)
        return None, None, grad if needs_x else None, *[g if needs else None for g, needs in flags]
