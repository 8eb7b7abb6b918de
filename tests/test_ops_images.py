"""A block runs on some images of a batch, and the others bypass it."""

import pytest
import torch
from ops_cases import differentiate
from oracles import assert_near

from sbp_mmdet.ops.common.stochastic_depth import run_on_images


@pytest.mark.parametrize('pattern', [[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_only_these_images_are_computed(pattern, memory_format):
    x = torch.randn(5, 3, 4, 4).to(memory_format=memory_format)
    seen = []
    images = torch.tensor(pattern).bool()
    out = run_on_images(lambda x: seen.append(x) or 10 * x, x, images, [])
    assert torch.equal(out, torch.where(images.view(-1, 1, 1, 1), 10 * x, x))
    (computed,) = seen
    assert torch.equal(computed, x[images])
    # What the block stores is not a view with the other images behind it, and keeps its layout.
    assert computed.untyped_storage().nbytes() == computed.nbytes
    assert computed.is_contiguous(memory_format=memory_format) and out.is_contiguous(memory_format=memory_format)


def test_a_block_without_images():
    """If all images are dropped, parameters have gradients of zero, not None: reducers of DDP wait for gradients."""
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    used, frozen = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    out = run_on_images(lambda x: pytest.fail('computed'), x, torch.tensor([False, False]), [used, frozen])
    (3 * out).sum().backward()
    assert torch.equal(out, x) and torch.equal(x.grad, torch.full_like(x, 3))
    assert torch.equal(used.grad, torch.zeros(3, 2)) and frozen.grad is None


@pytest.mark.parametrize('pattern', [[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], ids=str)
def test_gradients_are_those_of_multiplying_by_zero(pattern):
    images = torch.tensor(pattern).bool()
    tensors = dict(x=torch.randn(5, 3, 4, 4, dtype=torch.float64), weight=torch.randn(3, 3, dtype=torch.float64))

    def branch(x, weight):
        return torch.einsum('nchw,cd->ndhw', x, weight).tanh()

    def compute_actual(x, weight):
        return run_on_images(lambda x: x + 2 * branch(x, weight), x, images, [weight])

    def compute_expected(x, weight):
        return x + 2 * branch(x, weight) * images.view(-1, 1, 1, 1)

    assert_near(differentiate(compute_actual, tensors), differentiate(compute_expected, tensors), 1e-12)


def test_images_that_pass_by_keep_their_precision():
    """The block raises the other images to fp32."""
    x = torch.randn(3, 2, 2, 2).bfloat16().requires_grad_()
    out = run_on_images(lambda x: x.float() * 3, x, torch.tensor([True, False, True]), [])
    assert out.dtype == torch.float32 and torch.equal(out[1], x[1].float())
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad[:, 0, 0, 0].tolist() == [3, 1, 3]


def test_compiled():
    """The chosen images differ from call to call; the compiled code is the same."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, images: run_on_images(lambda x: 2 * x, x + 1, images, []), backend='eager')
    x = torch.randn(3, 2, 2, 2)
    for pattern in ([1, 0, 1], [0, 0, 1]):
        images = torch.tensor(pattern).bool()
        assert torch.equal(compiled(x, images), (x + 1) * (1 + images.float().view(-1, 1, 1, 1)))
