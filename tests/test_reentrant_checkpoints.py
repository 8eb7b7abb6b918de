"""Reentrant checkpoints around layers with dropout: they run a layer without gradients first, and then with them."""

import pytest
import torch
from mmdet.models.layers.transformer import DetrTransformerEncoder
from mmdet.models.utils.vlfuse_helper import SingleScaleBiAttentionBlock
from test_adapters_codetr import SIZES, encoder_layer
from test_adapters_codetr import inputs as inputs_of_codetr
from test_adapters_transformer import LAYERS, attention, feed, randomize
from torch import nn
from torch.utils.checkpoint import checkpoint

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.common import layouts

FUSION = dict(v_dim=8, l_dim=8, embed_dim=8, num_heads=2, dropout=0.3, drop_path=0.0)


def _tokens(number):
    return torch.randn(2, number, 8, dtype=torch.float64)


def _inputs_of_codetr():
    query, pos, places = inputs_of_codetr(True)
    return dict(
        query=query,
        query_pos=pos,
        reference_points=places,
        spatial_shapes=SIZES,
        level_start_index=torch.tensor([0, 48]),
    )


FAMILIES = {
    **{name: LAYERS[name] for name in ('FFN, GELU, scaled', 'deformable encoder, dropout')},
    'Co-DETR': (lambda: encoder_layer(True, 0.3), _inputs_of_codetr),
    'fusion': (lambda: SingleScaleBiAttentionBlock(**FUSION), lambda: dict(v=_tokens(24), text=_tokens(5))),
    'attention': (
        lambda: LAYERS['attention, tokens first'][0](),
        lambda: dict(query=torch.randn(6, 2, 16, dtype=torch.float64)),
    ),
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Let operations draw dropout for a few rows at a time."""
    monkeypatch.setattr(layouts, '_ROWS', 3)
    monkeypatch.setattr(layouts, 'elements_at_a_time', lambda *_: 1)


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('name', FAMILIES)
def test_gradients_are_the_derivative_of_the_output(name, preset, small_chunks):
    """The oracle is the derivative, by finite differences, of what the first run of the checkpoint computes."""
    make, make_inputs = FAMILIES[name]
    model, inputs = nn.ModuleList([randomize(make())]), make_inputs()
    apply_lean(model, preset, verify=False)
    first, *others = inputs
    x = inputs[first].detach().clone()

    def run(x):
        out = model[0](x, *[inputs[key] for key in others]) if name == 'fusion' else model[0](**inputs | {first: x})
        outs = out if isinstance(out, tuple) else (out,)
        return sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).cos().view_as(o)).sum() for o in outs)

    def seeded(run):
        torch.manual_seed(3)
        return run()

    leaf = x.clone().requires_grad_()
    seeded(lambda: checkpoint(run, leaf, use_reentrant=True)).backward()
    way, step = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)), 1e-6
    with torch.no_grad():
        ahead, behind = (seeded(lambda sign=sign: run(x + sign * step * way)) for sign in (1, -1))
    expected = (ahead - behind) / (2 * step)
    assert abs((leaf.grad * way).sum() - expected) <= 1e-5 * abs(expected)


ENCODERS = {
    'DETR encoder': lambda: DetrTransformerEncoder(2, dict(self_attn_cfg=attention(), ffn_cfg=feed(0.1))),
    'deformable encoder': LAYERS['deformable encoder'][0],
}


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('name', ENCODERS)
def test_an_encoder_that_drops_tokens_is_refused(name, reentrant):
    """A checkpoint around an encoder that drops tokens is an error: its recomputation would keep other tokens."""
    model, inputs = nn.ModuleList([randomize(ENCODERS[name]())]), LAYERS[name][1]()
    apply_lean(model, 'sbp', verify=False)
    query = inputs.pop('query')
    out = checkpoint(lambda x: model[0](x, **inputs), query, use_reentrant=reentrant)
    with pytest.raises(
        ValueError, match=r"an encoder with preset='sbp' is recomputed by a checkpoint.*modules=\[...\]"
    ):
        out.sum().backward()
