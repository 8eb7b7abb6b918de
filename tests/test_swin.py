"""Swin Transformer against mmdet's own, and SBP in it against its definition, in fp64."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from mmdet.models.backbones import SwinTransformer
from oracles import DEVICE, image, mask_of, where_sbp

from sbp_mmdet import SBPSwinTransformer

SMALL = dict(embed_dims=8, depths=(2, 1, 2, 1), num_heads=(1, 2, 2, 4), window_size=3, mlp_ratio=2)
# Maps of whole windows, odd ones that patch merging pads, and one smaller than a window.
SIZES = [(48, 48), (37, 52), (20, 9)]
PLAIN = [dict(keep_ratio=1.0), dict(keep_ratio=1.0, recompute=True), dict(keep_ratio=1.0, implementation='reference')]
SBP = [dict(), dict(recompute=True), dict(implementation='reference'), dict(keep_ratio=0.25, sampler='random')]


def randomised(model):
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data = noise / p[0].numel() ** 0.5 if p.dim() > 1 else 0.6 + 0.2 * noise
    return model


def pair(sbp_cfg, **options):
    """mmdet's and ours, of the same weights, in training mode."""
    options = SMALL | dict(drop_path_rate=0.0) | options
    stock = randomised(SwinTransformer(**options)).double()
    ours = SBPSwinTransformer(**options, sbp_cfg=sbp_cfg).double()
    ours.load_state_dict(stock.state_dict())
    stock.train()
    return stock.to(DEVICE), ours.train().to(DEVICE)


def blocks_of(model):
    return [(i, j) for i, stage in enumerate(model.stages) for j in range(len(stage.blocks))]


def gradients(model, x):
    model.zero_grad()
    outs = model(x)
    sum((out * torch.arange(out.numel()).to(out).mul(1.7).cos().view(out.shape)).sum() for out in outs).backward()
    return [out.detach() for out in outs], {n: p.grad for n, p in model.named_parameters()}


def assert_alike(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        torch.testing.assert_close(grad, expected[1][name], msg=lambda text, name=name: f'{name}: {text}')


@pytest.mark.parametrize('sbp_cfg', [None, *PLAIN])
@pytest.mark.parametrize('size', SIZES)
def test_without_sbp_it_is_mmdets(sbp_cfg, size):
    stock, ours = pair(sbp_cfg)
    x = image(2, *size)
    assert_alike(gradients(ours, x), gradients(stock, x))


@pytest.mark.parametrize(
    'options',
    [
        dict(qkv_bias=False, qk_scale=0.5),
        dict(patch_norm=False),
        dict(out_indices=(1, 3)),
        dict(with_cp=True),
        dict(frozen_stages=0),
        dict(frozen_stages=2),
        dict(drop_path_rate=0.6),
        dict(drop_path_rate=0.6, with_cp=True),
        dict(use_abs_pos_embed=True, pretrain_img_size=(48, 48)),
    ],
    ids=str,
)
@pytest.mark.parametrize('implementation', ['fused', 'reference'])
def test_options_are_mmdets(options, implementation):
    stock, ours = pair(dict(keep_ratio=1.0, implementation=implementation), **options)
    x = image(3, 48, 48)
    torch.manual_seed(3)
    expected = gradients(stock, x)
    torch.manual_seed(3)
    assert_alike(gradients(ours, x), expected)


def test_state_dict_evaluation_and_passes_without_gradients():
    stock, ours = pair(dict())
    assert list(stock.state_dict()) == list(ours.state_dict())
    x = image(1, 37, 52)
    for model in (stock, ours):
        model.eval()
    for a, b in zip(stock(x), ours(x), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        for a, b in zip(stock(x), ours.train()(x), strict=True):
            torch.testing.assert_close(a, b)
    assert ours._draws.now is None


def oracle(stock, masks):
    """mmdet's model where kept positions alone send gradients through the MLPs and the patch merging."""

    def thin(module, mask, call):
        inner = module.forward
        module.forward = lambda *args, **kwargs: call(inner, mask, *args, **kwargs)

    def ffn(inner, mask, x, identity):
        return identity + where_sbp(lambda x: inner(x, identity=torch.zeros_like(x)), x, mask.flatten()[:, None])

    def block_norm(inner, mask, x):
        return where_sbp(inner, x, mask.flatten()[:, None])

    def merge(inner, mask, x, size):
        out, size = inner(x, size)
        assert tuple(size) == mask.shape
        return torch.where(mask.flatten()[:, None], out, out.detach()), size

    for (stage, place), mask in masks.items():
        if place == 'downsample':
            thin(stock.stages[stage - 1].downsample, mask, merge)
        else:
            block = stock.stages[stage].blocks[place]
            thin(block.ffn, mask, ffn)
            thin(block.norm2, mask, block_norm)
    return stock


@pytest.mark.parametrize('sbp_cfg', SBP, ids=str)
@pytest.mark.parametrize('size', SIZES)
def test_sbp_is_its_definition(sbp_cfg, size):
    stock, ours = pair(sbp_cfg)
    x = image(2, *size)
    found = gradients(ours, x)
    sizes = ours.stage_sizes(*size)
    drawn = ours.draw(x, again=True).positions
    assert drawn.keys() == {(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (1, 'downsample'), (2, 'downsample')}
    masks = {layer: mask_of(p.keep, *sizes[layer[0]]) for layer, p in drawn.items()}
    assert all(not mask.all() for mask in masks.values())
    assert_alike(found, gradients(oracle(stock, masks), x))


@pytest.mark.parametrize('sbp_cfg', [dict(with_cp=True), dict(with_cp=True, implementation='reference')], ids=str)
def test_checkpointed_blocks_draw_once(sbp_cfg):
    """The first of two passes runs its blocks again with its own positions, although another has begun since."""
    options = dict(sbp_cfg)
    with_cp = options.pop('with_cp')
    models = [pair(options | dict(sampler='random'), with_cp=cp)[1] for cp in (False, with_cp)]
    found = []
    for model in models:
        torch.manual_seed(0)
        outs = [model(image(2, 48, 48, seed=seed)) for seed in (0, 1)]
        sum(out.cos().sum() for pyramid in outs for out in pyramid).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name])


@pytest.mark.parametrize('dropped', ['nearest', 'pool'])
def test_dropped_gradients_and_eight_bits_come_near(dropped):
    stock, ours = pair(dict(dropped=dropped, keep_ratio=0.5, recompute=True))
    x = F.interpolate(image(2, 6, 12), (48, 96), mode='bicubic')
    exact = gradients(stock, x)
    rounded = gradients(pair(dict(keep_ratio=1.0, recompute=True, storage='int8'))[1], x)
    near, zero = gradients(ours, x), gradients(pair(dict(keep_ratio=0.5))[1], x)

    def cosine(found):
        a, b = (torch.cat([g.flatten() for g in grads.values()]) for grads in (found[1], exact[1]))
        return F.cosine_similarity(a, b, 0)

    assert cosine(rounded) > 0.999
    assert cosine(near) > cosine(zero)


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize('implementation', ['fused', 'reference'])
def test_images_that_are_left_out(with_cp, implementation):
    """The gradients are those of the images that a branch keeps, multiplied as mmdet does."""
    cfg = dict(keep_ratio=1.0, skip_dropped_images=True, implementation=implementation)
    stock, ours = pair(cfg, drop_path_rate=0.6, with_cp=with_cp)
    x = image(4, 48, 48)
    found = gradients(ours, x)
    images = ours.draw(x, again=True).images
    branches = {(i, j, *name) for i, j in blocks_of(ours) for name in ((), ('attention',))}
    assert images.keys() == {b for b in branches if b[:2] != (0, 0)}  # the first block's rate is 0
    assert not all(kept.all() for kept in images.values())
    for (i, j, *name), kept in images.items():
        block = stock.stages[i].blocks[j]
        drop = block.attn.drop if name else block.ffn.dropout_layer
        factor = kept.to(x) / (1 - drop.drop_prob)
        drop.forward = lambda out, factor=factor: out * factor[:, None, None]
    assert_alike(found, gradients(stock, x))


def test_copies_and_names():
    _, ours = pair(dict())
    x = image(2, 48, 48)
    twin = copy.deepcopy(ours)
    assert twin._draws is not ours._draws and twin._draws.model.layers[0, 0] is twin.stages[0].blocks[0]
    torch.manual_seed(0)
    found = gradients(twin, x)
    assert ours._draws.now is None
    assert_alike(found, gradients(ours, x))
    blocks = [block for stage in ours.stages for block in stage.blocks]
    assert {type(block).__name__ for block in blocks} == {'SwinBlock'} and len({type(block) for block in blocks}) == 1
    read = pickle.loads(pickle.dumps(ours))
    torch.manual_seed(0)
    read._draws.begin(read, (x,))  # so that both have run as often
    ours._draws.begin(ours, (x,))
    found, expected = gradients(read, x), gradients(ours, x)
    assert_alike(found, expected)


@pytest.mark.parametrize('sbp_cfg', [dict(keep_ratio=1.0), dict(skip_dropped_images=True)], ids=str)
def test_a_copy_after_a_pass_that_drew_no_positions(sbp_cfg):
    """As EMA or a checkpoint of the whole model makes one in the middle of a training."""
    _, ours = pair(sbp_cfg)
    with torch.no_grad():
        ours(image(2, 48, 48))
    gradients(ours, image(2, 48, 48))
    copy.deepcopy(ours), pickle.dumps(ours)


@pytest.mark.parametrize(
    ('options', 'sbp_cfg', 'text'),
    [
        (dict(drop_rate=0.1), {}, r'block 0 of stage 0: its attention has dropout'),
        (dict(act_cfg=dict(type='ReLU')), {}, 'its FFN has ReLU for an activation, and GELU is needed'),
        ({}, dict(recompute='block'), "recompute='block' is not there for Swin"),
        ({}, dict(blocks=[1, 1]), r'blocks=\[1, 1\] must list one number for each of the 4 stages'),
    ],
)
def test_what_cannot_be_done_is_said(options, sbp_cfg, text):
    with pytest.raises(ValueError, match=text):
        SBPSwinTransformer(**SMALL, **options, sbp_cfg=sbp_cfg)
    with pytest.raises(ValueError, match='no pass has drawn anything'):
        SBPSwinTransformer(**SMALL, sbp_cfg={}).draw(image(), again=True)
