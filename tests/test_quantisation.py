"""Models that torch prepares for quantisation: the fake quantisation of all layers takes part in training."""

import copy

import pytest
import torch
from conv_models import randomize_norms
from mmcv.cnn import ConvModule
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, get_default_qconfig, prepare, prepare_qat

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule

pytestmark = pytest.mark.filterwarnings('ignore')  # torch is about to move eager quantisation to torchao


class Net(nn.Module):
    """A plain convolution, which is changed by itself, and one with a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.GELU()
        self.second = ConvModule(8, 8, 3, norm_cfg=dict(type='BN'))

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def build():
    torch.manual_seed(0)
    return randomize_norms(Net()).float().train()


def make_images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def compute_gradients(model):
    model.zero_grad()
    out = model(make_images())
    (out * torch.linspace(-1, 1, out.numel()).mul(99).sin().view_as(out)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def prepare_in_training(model):
    model.qconfig = get_default_qat_qconfig('fbgemm')
    return prepare_qat(model, inplace=True)


def test_prepared_before_the_change():
    """Everything is unchanged, since observers look at what each module computes."""
    plain = prepare_in_training(build())
    lean = copy.deepcopy(plain)
    with pytest.raises(ValueError, match='it is prepared for quantisation'):
        apply_lean(lean, 'exact', verify=False)
    expected, actual = compute_gradients(plain), compute_gradients(lean)
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


def test_parts_that_are_not_quantised_are_changed():
    plain = build()
    plain.second.qconfig = get_default_qat_qconfig('fbgemm')
    lean = copy.deepcopy(prepare_qat(plain, inplace=True))
    report = apply_lean(lean, 'exact', verify=False)
    assert 'first' in report.changed and 'prepared for quantisation' in report.left['second']
    expected, actual = compute_gradients(plain), compute_gradients(lean)
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('in_training', [True, False])
@pytest.mark.parametrize('inplace', [True, False])
def test_prepared_after_the_change(in_training, inplace):
    """torch finds layers by their exact class, so it would leave out a changed convolution: its next call raises."""
    model = build()
    apply_lean(model, 'exact', verify=False)
    assert isinstance(model.first, LeanModule)
    model.qconfig = get_default_qat_qconfig('fbgemm') if in_training else get_default_qconfig('fbgemm')
    prepared = prepare_qat(model, inplace=inplace) if in_training else prepare(model.eval(), inplace=inplace)
    with pytest.raises(ValueError, match=r'Conv2d was changed .* Prepare the model first .*remove_lean'):
        prepared(make_images())


def test_the_remedy():
    plain, lean = build(), build()
    apply_lean(lean, 'exact', verify=False)
    remove_lean(lean)
    expected, actual = (compute_gradients(prepare_in_training(model)) for model in (plain, lean))
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())
