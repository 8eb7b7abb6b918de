"""The ViT backbone's values and gradients against plain torch and against the definition of SBP."""

import pytest
import torch
import torch.nn.functional as F
from oracles import DEVICE, assert_near, gradients, image, relative_error, where_sbp

from sbp_mmdet import SBPViT, objects
from sbp_mmdet.analysis import saved_bytes
from sbp_mmdet.masks import Nearest
from sbp_mmdet.ops.tokens import token_positions

ARCH = dict(num_layers=3, embed_dims=12, num_heads=3, feedforward_channels=20)
CFGS = {
    'fused': dict(),
    'recompute': dict(recompute=True),
    'block': dict(recompute='block'),
    'reference': dict(implementation='reference'),
    'query': dict(attention='query', recompute='block'),
    'query-reference': dict(attention='query', implementation='reference'),
    'head': dict(attention='head', recompute=True),
    'head-block': dict(attention='head', recompute='block'),
    'head-reference': dict(attention='head', implementation='reference'),
    'per-block': dict(keep_ratio=[0.25, 1, 0.75], blocks=[3], sampler='random'),
}
ALL = pytest.mark.parametrize('sbp_cfg', CFGS.values(), ids=CFGS.keys())
FORMS = [CFGS[name] for name in ('fused', 'recompute', 'block', 'reference')]
EACH_FORM = pytest.mark.parametrize('sbp_cfg', FORMS, ids=['fused', 'recompute', 'block', 'reference'])


def small(sbp_cfg=None, *, dtype=torch.float64, seed=0, **kwargs):
    """A ViT in training mode whose parameters all have ordinary values."""
    kwargs = dict(arch=ARCH, img_size=64, layer_scale_init_value=1.0) | kwargs
    backbone = SBPViT(sbp_cfg=sbp_cfg, **kwargs).to(dtype).train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            wide = parameter.dim() > 1 and not name.endswith(('_token', 'pos_embed'))
            parameter.copy_(noise / parameter[0].numel() ** 0.5 if wide else 0.6 + 0.2 * noise)
    return backbone.to(DEVICE)


def oracle(backbone, x, drawn, rates=(0, 0, 0)):
    """ViT in plain torch, with SBP by its definition: dropped entries of the attention's map are detached."""
    state, heads = dict(backbone.named_parameters()), backbone.num_heads
    p = backbone.patch_size

    def linear(x, name):
        return F.linear(x, state[f'{name}.weight'], state.get(f'{name}.bias'))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f'{name}.weight'], state[f'{name}.bias'], 1e-6)

    def scaled(x, name):
        return x * state[f'{name}.gamma'] if f'{name}.gamma' in state else x

    def attend(x, name, kept, kept_heads):
        n, tokens, c = x.shape
        qkv = linear(norm(x, f'{name}.norm1'), f'{name}.attn.qkv')
        q, k, v = qkv.view(n, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (c // heads) ** 0.5
        if kept is not None and backbone.sbp.attention == 'qkv':
            scores = torch.where(kept, scores, scores.detach())
            v = torch.where(kept[:, None], v, v.detach())
        out = scores.softmax(-1) @ v
        if kept_heads is not None:
            mask = torch.zeros(heads, 1, 1, dtype=torch.bool, device=x.device)
            mask[kept_heads] = True
            whole = scaled(linear(out.transpose(1, 2).flatten(2), f'{name}.attn.proj'), f'{name}.ls1')
            # What goes back through the dropped heads' columns is taken off again.
            bias = state[f'{name}.attn.proj.bias']
            weight = state[f'{name}.attn.proj.weight'].view(c, heads, -1)
            parts = scaled(torch.einsum('nhtd,chd->nhtc', out, weight), f'{name}.ls1')
            branch = torch.where(mask, parts, parts.detach()).sum(1) + scaled(bias, f'{name}.ls1')
            assert relative_error(branch, whole) < 1e-12
            return branch
        branch = scaled(linear(out.transpose(1, 2).flatten(2), f'{name}.attn.proj'), f'{name}.ls1')
        return branch if kept is None else torch.where(kept[:, None], branch, branch.detach())

    def mlp(x, name):
        x = F.gelu(linear(norm(x, f'{name}.norm2'), f'{name}.mlp.fc1'))
        return scaled(linear(x, f'{name}.mlp.fc2'), f'{name}.ls2')

    def depth(branch, rate):
        if not rate:
            return branch
        kept = torch.rand(len(branch), dtype=x.dtype, device=x.device) >= rate
        return branch * kept[:, None, None] / (1 - rate)

    x = F.pad(x, (0, -x.shape[3] % p, 0, -x.shape[2] % p))
    x = F.conv2d(x, state['patch_embed.proj.weight'], state['patch_embed.proj.bias'], stride=p)
    size = x.shape[2:]
    embedding = (
        state['pos_embed'][:, -backbone.grid[0] * backbone.grid[1] :].transpose(1, 2).unflatten(2, backbone.grid)
    )
    if tuple(size) != backbone.grid:
        embedding = F.interpolate(embedding, size, mode='bicubic', align_corners=False)
    front = [state['cls_token'] + state['pos_embed'][:, :1]] if 'cls_token' in state else []
    front += [state['reg_token']] if 'reg_token' in state else []
    tokens = torch.cat([*(t.expand(len(x), -1, -1) for t in front), (x + embedding).flatten(2).mT], 1)
    for i, rate in enumerate(rates):
        positions, kept = drawn.positions.get((0, i)), None
        if positions is not None:
            kept = torch.zeros(tokens.shape[1], dtype=torch.bool, device=x.device)
            kept[token_positions(positions, backbone.prefix).keep] = True
        by_heads = backbone.sbp is not None and backbone.sbp.attention == 'head'
        branch = attend(tokens, f'blocks.{i}', None if by_heads else kept, drawn.heads.get((0, i)))
        tokens = tokens + depth(branch, rate)
        mask = tokens.new_ones(tokens.shape[1], dtype=torch.bool) if kept is None else kept
        tokens = tokens + depth(where_sbp(lambda x: mlp(x, f'blocks.{i}'), tokens, mask[:, None]), rate)  # noqa: B023
    if backbone.out_type == 'cls_token':
        return [norm(tokens[:, 0], 'norm')]
    if backbone.out_type == 'avg_featmap':
        return [norm(tokens[:, backbone.prefix :].mean(1), 'norm')]
    y = norm(tokens[:, backbone.prefix :], 'norm').mT.unflatten(2, size)

    def up(x, name):
        return F.conv_transpose2d(x, state[f'{name}.weight'], state[f'{name}.bias'], stride=2)

    scales = [None, None, y, F.max_pool2d(y, 2, ceil_mode=True)]
    if 'scale0.0.weight' in state:
        inner = norm(up(y, 'scale0.0').permute(0, 2, 3, 1), 'scale0.1').permute(0, 3, 1, 2)
        scales[0] = up(F.gelu(inner), 'scale0.3')
    if 'scale1.0.weight' in state:
        scales[1] = up(y, 'scale1.0')
    return [scales[i] for i in backbone.out_indices]


def compare(backbone, x, rates=(0, 0, 0), tolerance=1e-10):
    torch.manual_seed(3)
    actual = gradients(backbone, x)
    drawn = backbone.draw(x, again=True) if backbone.keep_ratios() else backbone.draw(x)
    assert drawn.positions.keys() == backbone.keep_ratios().keys()
    torch.manual_seed(3)
    assert_near(actual, gradients(backbone, x, lambda x: oracle(backbone, x, drawn, rates)), tolerance)


@ALL
@pytest.mark.parametrize('size', [(2, 64, 64), (1, 70, 93)], ids=['even', 'odd'])
def test_forward_is_that_of_the_plain_backbone(sbp_cfg, size):
    plain, backbone = small(drop_path_rate=0.5), small(sbp_cfg, drop_path_rate=0.5)
    x = image(*size)
    torch.manual_seed(3)
    expected = plain(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    actual = backbone(x)
    assert torch.equal(torch.get_rng_state(), after)
    for got, want in zip(actual, expected, strict=True):
        assert got.requires_grad and relative_error(got, want) < 1e-12


@ALL
@pytest.mark.parametrize('size', [(2, 64, 64), (1, 70, 93)], ids=['even', 'odd'])
def test_gradients_are_those_of_the_definition(sbp_cfg, size):
    backbone = small(dict(sampler='random', blocks=[2]) | sbp_cfg, drop_path_rate=0.5, register_tokens=2)
    compare(backbone, image(*size), (0, 0.25, 0.5))


@ALL
def test_plain_gradients_differ(sbp_cfg):
    """Guards the tests above: masks and heads are no formality."""
    x = image()
    actual, plain = gradients(small(sbp_cfg), x), gradients(small(), x)
    assert relative_error(actual['image'], plain['image']) > 0.01


@EACH_FORM
@pytest.mark.parametrize(
    'kwargs',
    [
        dict(with_cls_token=False),
        dict(register_tokens=3, qkv_bias=False),
        dict(layer_scale_init_value=0.0, patch_size=14),
        dict(out_type='cls_token'),
        dict(out_type='avg_featmap', register_tokens=1),
        dict(out_indices=(2,)),
        dict(with_cp=True, drop_path_rate=0.5),
    ],
    ids=str,
)
def test_forms_of_the_backbone(sbp_cfg, kwargs):
    rates = (0, 0.25, 0.5) if 'drop_path_rate' in kwargs else (0, 0, 0)
    compare(small(sbp_cfg | dict(sampler='random'), **kwargs), image(2, 64, 70), rates)
    compare(small(None, **kwargs), image(2, 64, 70), rates)


@EACH_FORM
def test_frozen_blocks(sbp_cfg):
    backbone = small(sbp_cfg | dict(blocks=[3]), frozen_blocks=2)
    assert backbone.keep_ratios().keys() == {(0, 2)}
    actual = gradients(backbone, image())
    assert not any(name.startswith(('blocks.0', 'blocks.1', 'patch_embed', 'pos_embed')) for name in actual)
    compare(backbone, image())
    assert not backbone.blocks[1].training and backbone.blocks[2].training


@ALL
def test_keep_ratio_one_is_exact(sbp_cfg):
    x = image()
    exact = gradients(small(), x)
    assert_near(gradients(small(sbp_cfg | dict(keep_ratio=1.0)), x), exact, 1e-10)


@pytest.mark.parametrize('attention', ['qkv', 'query', 'head'])
@pytest.mark.parametrize(('dropped', 'storage'), [('pool', 'native'), ('nearest', 'native'), ('nearest', 'int8')])
def test_neighbours_and_eight_bits_stay_near(attention, dropped, storage):
    """Dropped tokens that send gradients, stored as they are or in eight bits; smooth images, as photographs are."""
    x = F.interpolate(image(2, 8, 8), (64, 64), mode='bicubic')
    exact = gradients(small(), x)

    def cosine(**cfg):
        found = gradients(small(dict(attention=attention, recompute=True, **cfg)), x)
        a, b = (torch.cat([g.flatten() for g in grads.values()]) for grads in (found, exact))
        return F.cosine_similarity(a, b, 0).item()

    near, zero = cosine(dropped=dropped, storage=storage), cosine()
    assert near > zero - (0.02 if attention == 'head' else 0)
    assert cosine(keep_ratio=1.0, storage=storage) > 0.999


def test_images_that_are_left_out_are_those_of_stochastic_depth():
    backbone, x = small(dict(skip_dropped_images=True), drop_path_rate=0.7), image(4)
    torch.manual_seed(5)
    actual = gradients(backbone, x)
    drawn = backbone.draw(x, again=True)
    factors = {key: keep.double() / (1 - backbone.blocks[key[1]].rate) for key, keep in drawn.images.items()}
    assert factors.keys() == {(0, i, branch) for i in (1, 2) for branch in ('attn', 'mlp')}
    twin = small(dict(), drop_path_rate=0.7)
    twin.draw = lambda x: drawn._replace(images={})
    for i, block in enumerate(twin.blocks):
        given = [factors[0, i, branch] for branch in ('attn', 'mlp')] if i else [None, None]
        block._factor = lambda x, drawn, given=given: given.pop(0)
    assert_near(actual, gradients(twin, x), 1e-10)


def test_stored_bytes():
    """In units of one map of tokens: what the package's docstrings say, in fp32 and with all blocks thinned out."""
    arch = dict(num_layers=1, embed_dims=96, num_heads=3)
    options = dict(arch=arch, dtype=torch.float32, out_indices=(2,), with_cls_token=False, out_type='avg_featmap')
    x = image(2, 256, 256, dtype=torch.float32)
    unit = 2 * 256 * 96 * 4

    def stored(sbp_cfg, **kwargs):
        backbone = small(sbp_cfg, **options, **kwargs)
        known = [*backbone.parameters(), x]
        return saved_bytes(lambda: backbone(x)[0].sum(), known) / unit

    rest = stored(dict(blocks=[1], recompute=True, keep_ratio=1.0)) - 3  # embedding, pooling, statistics
    assert 0 <= rest < 0.3
    expected = {'block': 2, True: 3, False: 3 + 3 + 4}
    for recompute, maps in expected.items():
        assert stored(dict(blocks=[1], keep_ratio=1.0, recompute=recompute)) == pytest.approx(maps + rest, abs=0.1)
        half = 3 if recompute == 'block' else maps
        assert stored(dict(blocks=[1], recompute=recompute)) == pytest.approx(half / 2 + rest, abs=0.15)
    eight = stored(dict(blocks=[1], keep_ratio=1.0, recompute='block', storage='int8'))
    assert eight == pytest.approx(0.5 + rest, abs=0.1)
    assert stored(None, with_cp=True) == pytest.approx(1 + rest, abs=0.15)


@pytest.mark.parametrize('amp', [torch.bfloat16])
def test_autocast(amp):
    x = image(dtype=torch.float32)
    exact = gradients(small(), x.double())
    for sbp_cfg in (None, dict(keep_ratio=1.0), dict(keep_ratio=1.0, recompute='block')):
        with torch.autocast('cpu', amp):
            found = gradients(small(sbp_cfg, dtype=torch.float32), x)
        a, b = (torch.cat([g.double().flatten() for g in grads.values()]) for grads in (found, exact))
        assert F.cosine_similarity(a, b, 0) > 0.99


@pytest.mark.parametrize('dropped', ['zero', 'pool'])
def test_a_mask_for_each_image(dropped):
    """Object masks: as if each image were alone, with the masks that it has in the batch."""
    cfg = dict(sampler='objects', dropped=dropped, recompute=True, skip_dropped_images=True)
    backbone, x = small(cfg, drop_path_rate=0.5), image(3)
    boxes = [torch.tensor([[4.0, 4, 30, 20]]), torch.zeros(0, 4), torch.tensor([[20.0, 30, 60, 60]])]
    with objects(boxes):
        actual = gradients(backbone, x)
        drawn = backbone.draw(x, again=True)
    assert {p.keep.dim() for p in drawn.positions.values()} == {2}
    total = None
    for i in range(3):
        parts = {key: p._replace(keep=p.keep[i], drop=p.drop[i]) for key, p in drawn.positions.items()}
        if dropped == 'pool':
            parts = {key: p._replace(nearest=Nearest(*(t[i] for t in p.nearest))) for key, p in parts.items()}
        alone = small(cfg, drop_path_rate=0.5)
        alone.draw = lambda x, parts=parts, i=i: drawn._replace(
            positions=parts, images={key: rows[i : i + 1] for key, rows in drawn.images.items()}
        )
        found = gradients(alone, x[i : i + 1], lambda x, alone=alone, i=i: weighted(alone(x), i))
        found['image'] = F.pad(found['image'], (0, 0) * 3 + (i, 2 - i))
        total = found if total is None else {name: total[name] + g for name, g in found.items()}
    assert_near(actual, total, 1e-10)


def weighted(outs, i):
    """The outputs of one image in the places that they have among three, for ``loss_of``."""
    return [torch.cat([torch.zeros_like(out)] * i + [out] + [torch.zeros_like(out)] * (2 - i)) for out in outs]
