"""Settings that become parameters, which operations have no gradients of: modules run their own code then."""

import copy

import pytest
import torch
from test_accepted_calls import fusion, normal
from torch import nn

from sbp_mmdet import apply_lean


@pytest.mark.parametrize('before', [True, False])
def test_a_trained_scale_of_an_attention_between_image_and_text(before):
    """A trained scale is told from a number of the same value, and the attention runs its own code."""
    plain, found = nn.ModuleList([fusion(), nn.Conv2d(2, 2, 1)]).double().train(), []
    lean, tokens = copy.deepcopy(plain), (normal(2, 6, 8), normal(2, 3, 8))
    for model in (plain, lean):
        if model is lean and not before:
            apply_lean(model, verify=False)
        attention = model[0].attn
        number = attention.scale
        del attention.scale
        attention.scale = nn.Parameter(torch.tensor(number, dtype=torch.float64))
        if model is lean and before:
            apply_lean(model, verify=False)
        sum(out.square().sum() for out in model[0](*tokens)).backward()
        found.append(attention.scale.grad)
    torch.testing.assert_close(found[1], found[0])
