"""``sbp`` drops tokens in encoders of images, and none in decoders and other layers."""

import copy
import functools

import pytest
import torch
from mmdet.models.layers.transformer.dab_detr_layers import DABDetrTransformerEncoder
from mmdet.models.layers.transformer.detr_layers import DetrTransformerDecoderLayer, DetrTransformerEncoder
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from oracles import DEVICE
from test_adapters_transformer import (
    TOKENS,
    assert_same,
    attention,
    decoder_inputs,
    deformable_encoder,
    encoder_inputs,
    feed,
    get_decoder_builder,
    randomize,
    run_step,
    tokens,
)
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters.detr import LeanDeformableEncoderLayer
from sbp_mmdet.checkpointing import checkpoint_modules


def test_the_reference_is_exact_here():
    model = nn.ModuleDict(dict(block=swin_block(), layer=deformable_encoder(0.0)))
    layer, inputs = randomize(model.layer), encoder_inputs(2)
    expected = run_step(layer, inputs)
    apply_lean(model, preset='reference')
    assert isinstance(layer, LeanDeformableEncoderLayer)
    assert_same(run_step(layer, inputs), expected)


def checkpointed(layers):
    layers = copy.deepcopy(layers)
    checkpoint_modules(layers, ['0'])
    return layers


def test_tokens_of_an_encoder_are_dropped():
    """All layers drop the same tokens, and the next pass drops others, even if no backbone drops positions."""
    layers = randomize(nn.ModuleList(deformable_encoder(0.0) for _ in range(2)))
    sizes = [[2, 3], [16, 24], [4, 6], [8, 12]]
    starts = torch.tensor([0, 6, 390, 414])
    points = torch.rand(2, 510, 4, 2, dtype=torch.float64).to(DEVICE).requires_grad_()
    inputs = dict(query=tokens(510), query_pos=tokens(510), key_padding_mask=None, reference_points=points)
    inputs.update(spatial_shapes=torch.tensor(sizes).to(DEVICE), level_start_index=starts.to(DEVICE))
    expected = [run_step(layer, inputs) for layer in layers]
    report = apply_lean(layers, preset='sbp', sampler='random')
    assert {*report.changed.values()} == {'gradients from 0.5 of the positions, preset sbp'}
    assert "preset='sbp', keeps 0.5 of the positions" in f'{layers}'
    with pytest.raises(ValueError, match='remove it from CheckpointModulesHook'):  # it would draw others
        apply_lean(checkpointed(layers), preset='sbp')
    seen = []
    for _ in range(3):
        actual = [run_step(layer, inputs) for layer in layers]
        for a, b in zip(actual, expected, strict=True):
            assert torch.allclose(a[0], b[0]) and not torch.allclose(a[1], b[1])
        # A query's own points get a gradient where it is kept, and from nowhere else.
        kept = [gradients[3].abs().sum((0, 2, 3)) > 0 for gradients in actual]
        maps = [m.unflatten(0, size) for m, size in zip(kept[0].tensor_split(starts[1:]), sizes, strict=True)]
        assert torch.equal(*kept) and maps[0].sum() == 3
        for shallow, deep in ((3, 2), (2, 0), (1, 3)):  # a kept token is a kept patch of the level below
            assert torch.equal(maps[shallow], maps[deep].repeat_interleave(2, 0).repeat_interleave(2, 1))
        seen.append(kept[0])
    assert not all(torch.equal(seen[0], other) for other in seen)


def algorithm_1(encoder, query, query_pos, key_padding_mask, kept):
    """Run stock layers whose functions backpropagate through kept tokens; with dropout, they run on the kept tokens
    first."""
    dropout = encoder.layers[0].ffn.layers[0][2].p

    def merged(f, rows):
        if not dropout:
            return torch.where(kept[:, None], f(rows), f(rows).detach())
        out = torch.empty_like(rows)
        some = f(rows[:, kept])
        out[:, ~kept] = f(rows[:, ~kept]).detach()
        out[:, kept] = some
        return out

    x = query
    for layer in encoder.layers:
        pos = query_pos * encoder.query_scale(x) if hasattr(encoder, 'query_scale') else query_pos
        options = dict(identity=x.new_zeros(1), key_pos=pos, key_padding_mask=key_padding_mask)
        x = layer.norms[0](x + merged(functools.partial(layer.self_attn, key=x, value=x, **options), x + pos))
        x = layer.norms[1](x + merged(functools.partial(layer.ffn, identity=x.new_zeros(1)), x))
    return x


@pytest.mark.parametrize('rate', [0.0, 0.1])
@pytest.mark.parametrize('kind', [DetrTransformerEncoder, DABDetrTransformerEncoder])
def test_a_plain_encoder_drops_tokens(kind, rate):
    """All layers drop the same tokens, as in Algorithm 1; a decoder in the same model drops none."""
    cfg = dict(self_attn_cfg=attention(), ffn_cfg=feed())
    decoder = get_decoder_builder(DetrTransformerDecoderLayer)()
    model = randomize(nn.ModuleDict(dict(encoder=kind(2, cfg), decoder=nn.ModuleList([decoder]))))
    for m in model.modules():  # not by the configs: mmcv writes a rate into its default for all that follow
        if isinstance(m, nn.Dropout):
            m.p = rate
        if isinstance(m, nn.MultiheadAttention):
            m.dropout = rate
    stock, inputs, queries = copy.deepcopy(model), encoder_inputs(), decoder_inputs()
    report = apply_lean(model, preset='sbp', sampler='random', keep_ratio=0.25)
    assert {n for n, said in report.changed.items() if 'gradients from 0.25' in said} == {'encoder'}
    assert "preset='sbp', keeps 0.25 of the positions" in f'{model.encoder}'
    assert_same(run_step(model.decoder[0], queries), run_step(stock.decoder[0], queries))
    draws, seen = model.encoder._lean.draws, []
    draw, draws.positions = draws.positions, lambda *a: seen.append(draw(*a)) or seen[-1]
    for number in range(2):
        result = run_step(model.encoder, inputs)
        kept = torch.zeros(TOKENS, dtype=torch.bool, device=seen[-1].keep.device)
        kept[seen[-1].keep] = True
        assert len(seen) == number + 1 and kept.sum() == TOKENS // 4
        oracle = copy.deepcopy(stock.encoder)
        oracle.forward = functools.partial(algorithm_1, oracle, kept=kept)
        assert_same(result, run_step(oracle, inputs))
    assert not torch.equal(seen[0].keep, seen[1].keep)
    evaluated = [m.eval().encoder(**inputs) for m in (model, stock)]
    assert torch.equal(*evaluated)


def test_a_plain_encoder_with_other_parts_is_named():
    cfg = dict(self_attn_cfg=attention(), ffn_cfg=dict(feed(), dropout_layer=dict(type='DropPath', drop_prob=0.1)))
    model = nn.ModuleList([DetrTransformerEncoder(1, cfg), deformable_encoder(0.0)])
    assert 'DropPath' in apply_lean(model, preset='sbp').left['0']
    assert '0' not in apply_lean(model, preset='exact').left.keys() | apply_lean(model, preset='exact').changed.keys()


def test_what_drops_no_tokens():
    layers, inputs = nn.ModuleList([deformable_encoder(0.0)]), encoder_inputs(2)
    for keys in (dict(preset='reference'), dict(preset='sbp', keep_ratio=1.0), dict(preset='sbp', keep_ratio=[1])):
        with pytest.raises(ValueError, match='drops positions, and no module of'):
            apply_lean(layers, **keys)
    randomize(layers).requires_grad_(False)
    expected = run_step(layers[0], inputs)
    apply_lean(layers, preset='sbp')
    assert_same(run_step(layers[0], inputs), expected)


def swin_block():
    init_default_scope('mmdet')
    sizes = dict(embed_dims=8, depths=(1, 1), num_heads=(1, 1), strides=(4, 2), out_indices=(0, 1))
    return MODELS.build(dict(type='SwinTransformer', **sizes))
