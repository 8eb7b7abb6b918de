"""Layers of transformer detectors that are changed in place train like the unchanged layers."""

import copy
import functools

import pytest
import torch
from cases import count_model_bytes
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.layers.transformer.conditional_detr_layers import ConditionalDetrTransformerDecoderLayer
from mmdet.models.layers.transformer.dab_detr_layers import DABDetrTransformerDecoderLayer
from mmdet.models.layers.transformer.deformable_detr_layers import (
    DeformableDetrTransformerDecoderLayer,
    DeformableDetrTransformerEncoderLayer,
)
from mmdet.models.layers.transformer.detr_layers import DetrTransformerDecoderLayer, DetrTransformerEncoderLayer
from mmdet.models.layers.transformer.grounding_dino_layers import GroundingDinoTransformerDecoderLayer
from mmdet.models.layers.transformer.mask2former_layers import Mask2FormerTransformerDecoderLayer
from oracles import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule

C, HEADS, QUERIES, TOKENS = 16, 2, 7, 42
SHAPES, STARTS = torch.tensor([[6, 5], [3, 3], [2, 1], [1, 1]]), torch.tensor([0, 30, 39, 41])


def attention(rate=0.0, **options):
    return dict(embed_dims=C, num_heads=HEADS, batch_first=True, **options, **(dict(dropout=rate) if rate else {}))


def plain(**options):
    """Return the arguments of layers without deformable attention."""
    return dict(self_attn_cfg=dict(attention(), **options), ffn_cfg=feed())


def feed(rate=0.0):
    return dict(embed_dims=C, feedforward_channels=64, ffn_drop=rate)


def conditional(cross):
    return dict(embed_dims=C, num_heads=HEADS, attn_drop=0.1, cross_attn=cross)


def tokens(number=QUERIES):
    return torch.randn(2, number, C, dtype=torch.float64).to(DEVICE).requires_grad_()


def padding():
    return (torch.arange(TOKENS) % 7 == torch.tensor([[3], [5]])).to(DEVICE)


def mask(keys):
    seen = (torch.rand(QUERIES, keys) > 0.7) & (torch.arange(keys) > 0)  # nobody sees nothing: stock layers put out NaN
    return seen.to(DEVICE)


def levels(numbers, queries):
    points = torch.rand(2, queries, 4, numbers, dtype=torch.float64).to(DEVICE).requires_grad_()
    return dict(reference_points=points, spatial_shapes=SHAPES.to(DEVICE), level_start_index=STARTS.to(DEVICE))


def get_decoder_builder(kind, rate=0.0):
    cfg = dict(self_attn_cfg=attention(rate), cross_attn_cfg=attention(rate), ffn_cfg=feed(rate))
    return lambda: kind(**copy.deepcopy(cfg))


def decoder_inputs():
    return dict(
        query=tokens(),
        key=tokens(TOKENS),
        value=tokens(TOKENS),
        query_pos=tokens(),
        key_pos=tokens(TOKENS),
        self_attn_mask=mask(QUERIES),
        cross_attn_mask=mask(TOKENS),
        key_padding_mask=padding(),
    )


def deformable_inputs(numbers):
    inputs = decoder_inputs()
    del inputs['cross_attn_mask'], inputs['key'], inputs['key_pos']
    return inputs | levels(numbers, QUERIES)


def conditional_inputs(is_first):
    sine = dict(ref_sine_embed=tokens(), is_first=is_first, key_padding_mask=padding())
    return dict(query=tokens(), key=tokens(TOKENS), query_pos=tokens(), key_pos=tokens(TOKENS), **sine)


def encoder_inputs(numbers=None):
    inputs = dict(query=tokens(TOKENS), query_pos=tokens(TOKENS), key_padding_mask=padding())
    return inputs | (levels(numbers, TOKENS) if numbers else {})


def deformable_encoder(rate):
    cfg = dict(self_attn_cfg=dict(attention(), dropout=rate), ffn_cfg=feed(rate))
    return DeformableDetrTransformerEncoderLayer(**cfg)


def get_conditional_builder(kind):
    return lambda: kind(self_attn_cfg=conditional(False), cross_attn_cfg=conditional(True), ffn_cfg=feed())


def grounding():
    cfg = dict(self_attn_cfg=attention(), cross_attn_cfg=attention(), cross_attn_text_cfg=attention())
    return GroundingDinoTransformerDecoderLayer(**cfg, ffn_cfg=feed())


def grounding_inputs():
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).to(DEVICE)
    return deformable_inputs(4) | dict(memory_text=tokens(5), text_attention_mask=mask)


LAYERS = {
    'FFN': (lambda: FFN(C, 64), lambda: dict(x=tokens())),
    'FFN, GELU, scaled': (
        lambda: FFN(C, 64, act_cfg=dict(type='GELU'), layer_scale_init_value=0.5, ffn_drop=0.1),
        lambda: dict(x=tokens(), identity=tokens()),
    ),
    'FFN, three layers': (lambda: FFN(C, 64, 3, add_identity=False, ffn_drop=0.1), lambda: dict(x=tokens())),
    'FFN, PReLU': (lambda: FFN(C, 64, act_cfg=dict(type='PReLU')), lambda: dict(x=tokens())),
    'attention': (lambda: MultiheadAttention(C, HEADS), lambda: dict(query=tokens(), query_pos=tokens())),
    'attention, tokens first': (
        lambda: MultiheadAttention(C, HEADS, proj_drop=0.1),
        lambda: dict(query=tokens(), key=tokens(), attn_mask=mask(2)[:2]),
    ),
    'DETR encoder': (
        lambda: DetrTransformerEncoderLayer(attention(0.1), feed(0.1)),
        encoder_inputs,
    ),
    'DETR decoder': (get_decoder_builder(DetrTransformerDecoderLayer, 0.1), decoder_inputs),
    'Mask2Former decoder': (get_decoder_builder(Mask2FormerTransformerDecoderLayer), decoder_inputs),
    'Conditional DETR': (
        get_conditional_builder(ConditionalDetrTransformerDecoderLayer),
        functools.partial(conditional_inputs, True),
    ),
    'DAB-DETR': (get_conditional_builder(DABDetrTransformerDecoderLayer), functools.partial(conditional_inputs, False)),
    'deformable encoder': (functools.partial(deformable_encoder, 0.0), functools.partial(encoder_inputs, 2)),
    'deformable encoder, dropout': (functools.partial(deformable_encoder, 0.1), functools.partial(encoder_inputs, 4)),
    'deformable decoder': (
        get_decoder_builder(DeformableDetrTransformerDecoderLayer),
        functools.partial(deformable_inputs, 2),
    ),
    'deformable decoder, dropout': (
        get_decoder_builder(DeformableDetrTransformerDecoderLayer, 0.1),
        functools.partial(deformable_inputs, 4),
    ),
    'Grounding DINO decoder': (grounding, grounding_inputs),
    'PVT': (
        lambda: SpatialReductionAttention(C, HEADS, attn_drop=0.1, sr_ratio=2),
        lambda: dict(x=tokens(24), hw_shape=(4, 6)),
    ),
}


def randomize(module):
    """Return a module in fp64 and training mode on ``DEVICE``, with weights that look trained."""
    torch.manual_seed(0)
    for p in module.parameters():
        p.data.normal_(0, 0.3)
    for m in module.modules():
        if isinstance(m, nn.LayerNorm):
            m.weight.data.add_(1)
        if isinstance(m, MultiScaleDeformableAttention):
            m.sampling_offsets.bias.data.normal_(0, 2)
    return module.double().to(DEVICE).train()


def run_step(module, inputs, seed=3):
    """Return output and gradients of inputs and parameters."""
    torch.manual_seed(seed)
    leaves = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]
    out = module(**inputs)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, leaves, weight.to(out), allow_unused=True)]


def assert_same(actual, expected, tolerance=1e-10):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= tolerance * max(b.abs().max(), 1)


@pytest.mark.parametrize('name', LAYERS)
def test_layers(name):
    module, inputs = (make() for make in LAYERS[name])
    randomize(module)
    expected, stock = run_step(module, inputs), type(module)
    evaluated = module.eval()(**inputs)
    report = apply_lean(module.train(), preset='exact')
    assert report.changed and not report.left.keys() & report.changed.keys()
    assert_same(run_step(module, inputs), expected)
    assert torch.equal(module.eval()(**inputs), evaluated)
    remove_lean(module.train())
    assert type(module) is stock and not any(isinstance(m, LeanModule) for m in module.modules())


@pytest.mark.parametrize('name', ['DETR decoder', 'deformable decoder', 'deformable encoder'])
def test_eight_bits(name):
    module, inputs = (make() for make in LAYERS[name])
    randomize(module).float()
    for m in module.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    inputs = {k: _float(v) for k, v in inputs.items()}
    expected = run_step(module, inputs)
    apply_lean(module, preset='int8')
    actual = run_step(module, inputs)
    total = sum(e.square().sum() for e in expected[1:] if e is not None)
    error = sum((f - e).square().sum() for f, e in zip(actual[1:], expected[1:], strict=True) if e is not None)
    assert (error / total) ** 0.5 < 0.01


def _float(x):
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.detach().float().requires_grad_()


@pytest.mark.parametrize('preset, expected', [('exact', 0.75), ('int8', 0.75)])
@pytest.mark.parametrize('name', ['DETR encoder', 'DETR decoder', 'DAB-DETR', 'deformable decoder'])
def test_layers_store_less(name, preset, expected):
    module, inputs = (make() for make in LAYERS[name])
    randomize(module)
    before = count_model_bytes(module, **inputs)
    apply_lean(module, preset=preset)
    assert count_model_bytes(module, **inputs) <= expected * before


REFUSED = {
    'norm': (lambda m: setattr(m, 'norms', nn.ModuleList([nn.LayerNorm(C), nn.Identity()])), 'Identity'),
    'three layers': (lambda m: setattr(m, 'ffn', FFN(C, 64, 3)), '3 linear layers'),
    'hook': (lambda m: m.ffn.layers[1].register_forward_hook(lambda *a: None), 'hooks'),
    'dropout layer': (lambda m: setattr(m, 'ffn', FFN(C, 64, dropout_layer=dict(type='DropPath'))), 'dropout_layer'),
    'no shortcut': (lambda m: setattr(m, 'ffn', FFN(C, 64, add_identity=False)), 'shortcut'),
    'own forward': (lambda m: setattr(m, 'forward', lambda *a, **k: None), 'was replaced'),
    'tokens first': (lambda m: setattr(m.self_attn, 'batch_first', False), 'batch_first'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_stays_is_named(name):
    change, reason = REFUSED[name]
    module = deformable_encoder(0.0)
    change(module)
    model = nn.Sequential(module)
    assert reason in apply_lean(model, preset='exact').left['0']


def test_subclasses_with_a_forward_pass_of_their_own_stay():
    class Mine(MultiheadAttention):
        def forward(self, query):
            return super().forward(query) * 2

    model = nn.ModuleList([Mine(C, HEADS), FFN(C, 64)])
    assert 'has a forward pass of its own' in apply_lean(model, preset='exact').left['0']


def test_checkpointing_by_fairscale_is_off():
    calls = []

    def checkpointed(forward, module, *args, **kwargs):
        calls.append(1)
        return forward(module(), *args, **kwargs)

    checkpointed.__module__ = 'fairscale.nn.checkpoint.checkpoint_activations'
    module, inputs = (make() for make in LAYERS['deformable encoder'])
    randomize(module)
    expected = run_step(module, inputs)
    wrapped = functools.partial(checkpointed, type(module).forward, lambda: module)
    module.forward = wrapped
    assert 'num_cp is switched off' in apply_lean(module, preset='exact').changed['']
    assert_same(run_step(module, inputs), expected)
    module.eval()(**inputs)
    assert not calls
    remove_lean(module.train())
    assert module.forward is wrapped
    assert_same(run_step(module, inputs), expected)
    assert calls


@pytest.mark.parametrize('sizes', [(0, 10, 10), (2, 0, 0), (2, 10, 0), (2, 0, 10)], ids=str)
@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('masked', [True, False])
def test_attention_without_images_queries_or_keys(sizes, batch_first, masked):
    """The module's own code computes them; torch's kernel would raise an error for some of the masks."""
    images, *numbers = sizes
    plain = randomize(MultiheadAttention(C, HEADS, batch_first=batch_first))
    lean = copy.deepcopy(plain)
    assert apply_lean(lean, verify=False).changed
    query, key = (torch.randn(images, n, C, dtype=torch.float64).to(DEVICE).requires_grad_() for n in numbers)
    given = [query, key] if batch_first else [x.transpose(0, 1) for x in (query, key)]
    mask = torch.zeros(images, numbers[1], dtype=torch.bool, device=DEVICE) if masked else None
    results = []
    for module in (lean, plain):
        out = module(*given, key_padding_mask=mask)
        results.append([out, *torch.autograd.grad(out.sum(), [query, key, *module.parameters()], allow_unused=True)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12, equal_nan=True)


class OtherObjects(torch.autograd.graph.saved_tensors_hooks):
    """Context manager in which each saved tensor comes back as an object of its own, as from another device."""

    def __init__(self):
        super().__init__(lambda x: x.detach().clone(), lambda x: x)


class Checkpointed(nn.Module):
    """A checkpoint around a module, whose inputs come back as other objects."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        def run(*given):
            return self.module(**dict(zip(inputs, given, strict=True)))

        with OtherObjects():
            return checkpoint(run, *inputs.values(), use_reentrant=False)


def test_a_checkpoint_around_attention_whose_key_and_value_are_one_tensor():
    """In its recomputation they are two, and a recomputed attention has to save as many tensors as before."""
    module, inputs = (make() for make in LAYERS['Mask2Former decoder'])
    randomize(module)
    inputs['value'] = inputs['key']
    expected = run_step(module, inputs)
    apply_lean(module, preset='exact')
    assert_same(run_step(Checkpointed(module), inputs), expected)
