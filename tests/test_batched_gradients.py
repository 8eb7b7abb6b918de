"""Several gradients at once, by ``is_grads_batched``: those of the plain model in fp64, or an error that says so."""

import copy

import pytest
import torch
from test_class_patches import FAMILIES
from unusual_models import random_images

from sbp_mmdet import apply_lean


def _run(model):
    torch.manual_seed(3)
    outs = model(random_images())
    return outs if isinstance(outs, (list, tuple)) else [outs]


@pytest.mark.skipif(not hasattr(torch._C._functorch, 'is_legacy_batchedtensor'), reason='this torch cannot tell')
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('family', FAMILIES)
def test_several_gradients_at_once_are_right_or_a_clear_error(family, preset):
    lean = FAMILIES[family]()
    plain, found = copy.deepcopy(lean), []
    apply_lean(lean, preset, verify=False)
    for model in (plain, lean):
        losses = torch.stack([out.square().mean() for out in _run(model) if out.requires_grad])
        parameters = [p for p in model.parameters() if p.requires_grad]
        options = dict(allow_unused=True, retain_graph=True)
        try:
            grads = torch.autograd.grad(
                losses, parameters, torch.eye(len(losses)).double(), is_grads_batched=True, **options
            )
        except RuntimeError as error:
            assert model is lean and 'cannot compute several gradients at once' in str(error)
            return
        found.append([g for g in grads if g is not None])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() <= 1e-9 * expected.norm().clamp_min(1e-3)
