"""Operations that run as one autograd node agree with their definitions, one after the other."""

import all_ops as ops
import pytest
import torch
from ops_cases import count_stored_bytes_of, plain_mlp, tokens_of_mlp
from oracles import assert_near

from sbp_mmdet.ops.common.operation_sequence import run_sequence
from sbp_mmdet.ops.common.recorded_steps import recorded_steps
from sbp_mmdet.ops.common.stochastic_depth import run_on_images

IMAGES = 4
# Images that run the first and the second MLP.
KEPT = {
    'all': ((1, 1, 1, 1), (1, 1, 1, 1)),
    'some': ((1, 0, 0, 1), (0, 1, 1, 1)),
    'none of the first': ((0, 0, 0, 0), (1, 1, 0, 1)),
    'none of the last': ((1, 0, 1, 1), (0, 0, 0, 0)),
    'none': ((0, 0, 0, 0), (0, 0, 0, 0)),
}
FACTOR = 1.6  # of stochastic depth


def _inputs():
    """Return the input, and the parameters of two MLPs on tokens by name."""
    found = [tokens_of_mlp(seed=seed, n=IMAGES) for seed in (0, 1)]
    x = found[0].pop('x')
    for tensors in found:
        tensors.pop('shortcut'), tensors.pop('x', None)
    return dict(x=x) | {f'{name}.{i}': t for i, tensors in enumerate(found) for name, t in tensors.items()}


def _parameters(tensors, i):
    return {name.removesuffix(f'.{i}'): t for name, t in tensors.items() if name.endswith(f'.{i}')}


def _plain(kept):
    def run(x, **tensors):
        for i, images in enumerate(kept):
            factor = FACTOR * torch.tensor(images, dtype=x.dtype)
            x = plain_mlp(x, x, **_parameters(tensors, i), factor=factor)
        return x

    return run


def _sequence(kept, outside=run_sequence):
    def run(x, **tensors):
        def mlps(x):
            for i, images in enumerate(kept):
                own = _parameters(tensors, i)

                def mlp(x, own=own):
                    return ops.channel_mlp(ops.MLPSettings(), ops.MLPTensors(x, x, **own, factor=FACTOR))

                x = run_on_images(mlp, x, torch.tensor(images, dtype=torch.bool), own.values())
            return x

        return outside(mlps, x)

    return run


def _gradients(run, tensors, trainable):
    leaves = {name: t.detach().clone().requires_grad_(name in trainable) for name, t in tensors.items()}
    out = run(**leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weight).sum().backward()
    return {name: t.grad for name, t in leaves.items()} | dict(out=out.detach())


@pytest.mark.parametrize('kept', KEPT)
def test_gradients_are_those_of_the_definition(kept):
    tensors = _inputs()
    for trainable in ([*tensors], ['x'], ['weight1.0'], ['bias2.1', 'gamma.0'], [*tensors][1::2]):
        actual = _gradients(_sequence(KEPT[kept]), tensors, trainable)
        assert_near(actual, _gradients(_plain(KEPT[kept]), tensors, trainable), 1e-12)


@pytest.mark.parametrize('outside', [run_sequence, lambda run, x: run(x)], ids=['one node', 'one by one'])
@pytest.mark.parametrize('kept', KEPT)
def test_what_runs_behind_may_write_to_the_output(kept, outside):
    """Code behind may write to the output, also if no image runs the operations; the input keeps its values."""

    def write(run):
        def write_to_output(x, **tensors):
            x = x * 1
            return torch.cat([run(x, **tensors).mul_(3), x])

        return write_to_output

    tensors = _inputs()
    actual = _gradients(write(_sequence(KEPT[kept], outside)), tensors, [*tensors])
    assert_near(actual, _gradients(write(_plain(KEPT[kept])), tensors, [*tensors]), 1e-12)


def test_the_input_alone_is_saved():
    tensors = _inputs()
    one = tensors['x'].numel() * tensors['x'].element_size()
    kept = KEPT['all']
    assert count_stored_bytes_of(_sequence(kept), tensors) == one
    assert count_stored_bytes_of(_sequence(kept, outside=lambda run, x: run(x)), tensors) == 2 * one


def test_nothing_is_recorded_outside_or_without_gradients():
    tensors = _inputs()
    run = _sequence(KEPT['some'])
    assert not run(**tensors).requires_grad
    with torch.no_grad():
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        assert not run(**leaves).requires_grad
        assert count_stored_bytes_of(run, tensors) == 0

    def stops(x):
        raise KeyError('an operation that raises')

    with pytest.raises(KeyError):
        run_sequence(stops, tensors['x'])
    assert recorded_steps() is None


def test_two_backward_passes_and_no_second_derivative():
    tensors = _inputs()
    run, leaves = _sequence(KEPT['some']), {n: t.detach().requires_grad_() for n, t in tensors.items()}
    out = run(**leaves)
    first = torch.autograd.grad(out.sum(), [*leaves.values()], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [*leaves.values()])
    assert all(map(torch.equal, first, second))
    (grad,) = torch.autograd.grad(run(**leaves).square().sum(), leaves['x'], create_graph=True)
    with pytest.raises(RuntimeError, match='differentiate twice'):
        grad.sum().backward()


def test_a_parameter_that_changes_in_between_is_an_error():
    leaves = {n: t.detach().requires_grad_() for n, t in _inputs().items()}
    out = _sequence(KEPT['all'])(**leaves)
    with torch.no_grad():
        leaves['weight1.0'].mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.sum().backward()
