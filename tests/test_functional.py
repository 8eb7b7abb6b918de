"""Algorithm 1 has the values of f and the gradients of the kept positions."""

import pytest
import torch
from oracles import DEVICE, apply_sbp, relative_error
from torch import nn

from sbp_mmdet import sbp
from sbp_mmdet.stochastic_backprop.masks import positions

MASKS = {
    'half': torch.arange(12) % 2 == 0,
    'one': torch.arange(12) == 7,
    'none': torch.zeros(12, dtype=torch.bool),
    'all': torch.ones(12, dtype=torch.bool),
}
MASKS = {name: mask.to(DEVICE) for name, mask in MASKS.items()}


class Tokens(nn.Sequential):
    """Position-wise network on tokens, from (N, L, 6) to (N, L, 5)."""

    shape = (2, 12, 6)

    def __init__(self):
        super().__init__(nn.LayerNorm(6), nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 5))


class Patches(nn.Module):
    """Convolution with kernel and stride 2 on patches, from (N, L, 4, 6) to (N, L, 7)."""

    shape = (2, 12, 4, 6)

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(24, 7)

    def forward(self, x):
        return self.linear(self.norm(x).flatten(2))


def setting(kind):
    torch.manual_seed(0)
    f = kind().double().to(DEVICE)
    x = torch.randn(kind.shape, dtype=torch.float64).to(DEVICE).requires_grad_()
    return f, x, torch.randn_like(f(x))


@pytest.mark.parametrize('kind', [Tokens, Patches])
@pytest.mark.parametrize('mask', MASKS.values(), ids=MASKS.keys())
def test_equals_the_definition(kind, mask):
    f, x, weight = setting(kind)
    expected = apply_sbp(f, x, mask[:, None])
    actual = sbp(f, x, positions(mask.view(3, 4)))
    assert relative_error(actual, expected) < 1e-14
    inputs = [x, *f.parameters()]
    for got, want in zip(
        torch.autograd.grad(actual, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        assert relative_error(got, want) < 1e-13
    if not mask.any():
        assert not got.any()


def test_gradient_of_the_input_is_zero_where_dropped():
    f, x, weight = setting(Tokens)
    mask = MASKS['half']
    (exact,) = torch.autograd.grad(f(x), x, weight)
    (grad,) = torch.autograd.grad(sbp(f, x, positions(mask.view(3, 4))), x, weight)
    assert not grad[:, ~mask].any()
    torch.testing.assert_close(grad[:, mask], exact[:, mask], rtol=1e-12, atol=0)


def test_autocast_weights_get_gradients():
    """Algorithm 1 has to run the pass with gradients first.

    Some versions of torch fill the cache of cast weights even inside of no_grad, which cuts weights off from gradients.
    """
    f, x, weight = setting(Tokens)
    f, x, mask = f.float(), x.detach().float(), MASKS['half']
    expected = torch.autograd.grad(apply_sbp(f, x, mask[:, None]), list(f.parameters()), weight.float())
    modes = []
    f.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    with torch.autocast(x.device.type, torch.bfloat16):
        out = sbp(f, x, positions(mask.view(3, 4)))
    assert modes == [True, False]
    assert out.dtype == torch.bfloat16
    out.backward(weight.to(out.dtype))
    for parameter, want in zip(f.parameters(), expected, strict=True):
        assert relative_error(parameter.grad, want) < 0.05


def test_without_gradients():
    f, x, _ = setting(Tokens)
    with torch.no_grad():
        out = sbp(f, x, positions(MASKS['half'].view(3, 4)))
    assert not out.requires_grad
    assert relative_error(out, f(x)) < 1e-14


def test_a_mask_in_place_of_positions_is_refused():
    with pytest.raises(TypeError, match=r'positions is a Tensor.*positions\(mask\)'):
        sbp(nn.Linear(6, 6), torch.ones(2, 12, 6), MASKS['half'])
