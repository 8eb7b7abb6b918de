"""Models whose parameters have no values yet: lazy modules, and the meta device."""

import pytest
import torch
from mmengine.logging import MMLogger
from oracles import random_images
from torch import nn
from unusual_models import build_resnet

from sbp_mmdet import apply_lean

VERIFIES = True


class LazyHead(nn.Module):
    """A backbone and a head that learns its number of channels in the first pass."""

    def __init__(self):
        super().__init__()
        self.backbone = build_resnet()
        self.head = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(4, 1))
        self.double().train()

    def forward(self, x):
        return self.head(self.backbone(x)[-1])


def _run_steps(model):
    torch.manual_seed(0)  # the lazy modules draw their values in the first pass
    results = {}
    for step in range(2):
        model.zero_grad()
        out = model(random_images(2, 48, 48))
        out.square().mean().backward()
        results |= {f'{name}, step {step}': p.grad for name, p in model.named_parameters()}
        results[f'output of step {step}'] = out
    return results


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'with_cp'])
def test_lazy_modules(preset, caplog, monkeypatch):
    model, plain = LazyHead(), LazyHead()  # lazy buffers cannot be copied
    plain.backbone.load_state_dict(model.backbone.state_dict())
    report = apply_lean(model, preset)
    monkeypatch.setattr(MMLogger.get_current_instance(), 'handlers', [caplog.handler])
    actual, expected = _run_steps(model), _run_steps(plain)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-11 * value.norm().clamp_min(1e-3), name
    assert any(name.startswith('backbone.layer') for name in report.changed)
    if preset != 'with_cp':
        assert 'LazyConv2d' in report.left['head.0']
        assert 'not verified: the lazy module of head.0.weight has no values yet; run the model once' in caplog.text


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
def test_the_meta_device(preset):
    """Shapes are computed without values, as for counts of operations."""
    model = build_resnet().to('meta')
    plain = [out.shape for out in model(torch.empty(1, 3, 64, 64, device='meta', dtype=torch.float64))]
    apply_lean(model, preset)
    outs = model(torch.empty(1, 3, 64, 64, device='meta', dtype=torch.float64))
    sum(out.sum() for out in outs).backward()
    assert [out.shape for out in outs] == plain
    assert all(p.grad.is_meta for p in model.parameters())
