"""SBP in place: mmdet's Swin and mmpretrain's models, blocks of one's own, the report, and the way back."""

import copy
import functools

import pytest
import torch
import torch.utils.checkpoint as cp
from mmdet.models.backbones import ResNet, SwinTransformer
from mmengine.model import BaseModule, ExponentialMovingAverage
from oracles import DEVICE, image, mask_of, where_pooled, where_sbp
from torch import nn

from sbp_mmdet import SBPConvNeXt, SBPHook, SBPSwinTransformer, apply_sbp
from sbp_mmdet.apply import BLOCKS, Thin, register_block, remove_sbp
from sbp_mmdet.savings import checkpoint_modules

SMALL = dict(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4), window_size=3, mlp_ratio=2, drop_path_rate=0.3)


def small_swin(**options):
    torch.manual_seed(0)
    model = SwinTransformer(**SMALL | options).double().to(DEVICE)
    model.train()
    return model


def gradients(model, x, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    outs = model(x)
    sum(out.cos().sum() for out in outs).backward()
    return [out.detach() for out in outs], {n: p.grad for n, p in model.named_parameters()}


def assert_alike(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b)
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, msg=lambda text, name=name: f'{name}: {text}')


class Mean(nn.Module):
    """A detector, as far as the hook sees it."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone


@pytest.mark.parametrize('sbp_cfg', [dict(), dict(skip_dropped_images=True), dict(implementation='reference')], ids=str)
def test_swin_in_place_is_the_class_of_its_own(sbp_cfg):
    stock = small_swin()
    ours = SBPSwinTransformer(**SMALL, sbp_cfg=sbp_cfg).double().to(DEVICE).train()
    ours.load_state_dict(stock.state_dict())
    names = list(stock.state_dict())
    report = apply_sbp(stock, sbp_cfg)
    assert list(stock.state_dict()) == names
    assert report.changed['stages.0.blocks.0'].startswith('gradients from 0.5 of the positions')
    assert report.changed['stages.3.blocks.0'].startswith('exact')
    x = image(2, 37, 52)
    assert_alike(gradients(stock, x), gradients(ours, x))


def test_exact_and_back():
    stock, x = small_swin(), image(2, 37, 52)
    before, kind = gradients(stock, x), type(stock.stages[0].blocks[0])
    changed = copy.deepcopy(stock)
    apply_sbp(changed, dict(keep_ratio=1.0, recompute=True))
    assert_alike(gradients(changed, x), before)
    apply_sbp(changed, dict(keep_ratio=0.5))  # by new settings
    assert not torch.equal(
        gradients(changed, x)[1]['patch_embed.projection.weight'], before[1]['patch_embed.projection.weight']
    )
    remove_sbp(changed)
    assert type(changed.stages[0].blocks[0]) is kind
    assert not changed._forward_pre_hooks and not changed._forward_hooks
    assert_alike(gradients(changed, x), before)


def test_what_the_hook_says():
    model = Mean(small_swin())
    text = SBPHook(keep_ratio=0.5, recompute=True).apply(model)
    assert '13 layers changed' in text and 'stages.0.blocks.0' in text
    assert [SBPHook(keep_ratio=r).exact for r in (1.0, 0.5, [1, 1])] == [True, False, True]
    assert not SBPHook(keep_ratio=1.0, storage='int8').exact and not SBPHook.exact


def test_averages_copy_a_model_that_was_changed():
    model, x = small_swin(), image(2, 37, 52)
    apply_sbp(model, {})
    average = ExponentialMovingAverage(model)
    gradients(model, x)
    average.update_parameters(model)
    with torch.no_grad():
        average.eval()
        average.module(x)
    assert average.module.stages[0].blocks[0]._sbp_place.draws is not model.stages[0].blocks[0]._sbp_place.draws


def test_two_passes_and_checkpointing():
    plain, checkpointed = (small_swin(with_cp=with_cp) for with_cp in (False, True))
    grads = []
    for model in (plain, checkpointed):
        apply_sbp(model, dict(sampler='random'))
        torch.manual_seed(0)
        sum(out.cos().sum() for seed in (0, 1) for out in model(image(2, 37, 52, seed=seed))).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def by_hook(model):
    checkpoint_modules(model, ['stages'])


def by_somebody_else(model):
    for stage in model.stages:
        stage.forward = functools.partial(cp.checkpoint, stage.forward, use_reentrant=False)


@pytest.mark.parametrize('checkpointed', [by_hook, by_somebody_else])
@pytest.mark.parametrize('together', [True, False])
def test_two_passes_under_checkpoints_from_outside(checkpointed, together):
    """Two images of a semi-supervised step: each pass runs again with its own masks, whichever backward comes first."""
    grads = []
    for change in (None, checkpointed):
        model = small_swin()
        apply_sbp(model, dict(sampler='random'))
        if change:
            change(model)
        torch.manual_seed(0)
        losses = [sum(out.cos().sum() for out in model(image(2, 37, 52, seed=seed))) for seed in (0, 1)]
        for loss in [sum(losses)] if together else losses:
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('with_cp', [False, True])
def test_distributed_data_parallel(tmp_path, with_cp):
    """One process of gloo: every parameter gets its gradient, with images left out and blocks that run again."""
    cfg = dict(skip_dropped_images=True, sampler='random')
    x, found = image(2, 37, 52), []
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        for wrap in (lambda model: model, nn.parallel.DistributedDataParallel):
            model = small_swin(with_cp=with_cp, drop_path_rate=0.8)
            apply_sbp(model, cfg)
            torch.manual_seed(0)
            sum(out.cos().sum() for out in wrap(model)(x)).backward()
            found.append([p.grad for p in model.parameters()])
    finally:
        torch.distributed.destroy_process_group()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_resnet_is_refused_with_its_reason():
    with pytest.raises(ValueError, match=r'no block of ResNet.*batch norm looks at all positions.*register_block'):
        apply_sbp(Mean(ResNet(18)))


def test_dropout_is_refused_and_nothing_is_changed():
    model = small_swin(drop_rate=0.1)
    with pytest.raises(ValueError, match='its attention has dropout'):
        apply_sbp(model)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ('sbp_cfg', 'text'),
    [
        (dict(keep_ration=0.5), "did you mean 'keep_ratio'"),
        (dict(attention='query'), 'attention'),
        (dict(recompute='block'), "recompute='block' is there for ConvNeXt only"),
    ],
)
def test_settings_are_checked(sbp_cfg, text):
    with pytest.raises(ValueError, match=text):
        apply_sbp(small_swin(), sbp_cfg)


def test_a_backbone_with_settings_of_its_own():
    with pytest.raises(ValueError, match='SBPConvNeXt has sbp_cfg of its own'):
        apply_sbp(Mean(SBPConvNeXt('atto', sbp_cfg={})))
    with pytest.raises(ValueError, match='SBPConvNeXt takes sbp_cfg of its own: set that'):
        apply_sbp(Mean(SBPConvNeXt('atto')))


def test_it_comes_before_fsdp():
    model = small_swin()
    wrapper = nn.Module()
    wrapper._fsdp_wrapped_module = model.stages[0].blocks[0]  # as FSDP holds what it wraps
    model.stages[0].blocks[0] = wrapper
    with pytest.raises(ValueError, match=r'in FSDP already.*before it is wrapped'):
        apply_sbp(model)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x):
        return x + self.mlp(self.spatial(x))


class Net(BaseModule):
    def __init__(self, stride=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, stride, stride=stride)
        self.stages = nn.ModuleList(nn.Sequential(Block(4), Block(4)) for _ in range(2))
        self.shrink = nn.Conv2d(4, 4, 2, stride=2)

    def forward(self, x):
        x = self.stages[0](self.stem(x))
        return x, self.stages[1](self.shrink(x))


@pytest.fixture
def own_block():
    @register_block(Block)
    class ThinBlock(Thin):
        def thin_forward(self, x):
            return x + self.on_position(self.mlp, self.spatial(x))

    yield
    del BLOCKS[f'{Block.__module__}.Block']


def test_a_block_of_ones_own(own_block):
    model = Net().double().train()
    report = apply_sbp(model, dict(keep_ratio=0.5))
    assert list(report.changed) == ['stages.0.0', 'stages.0.1', 'stages.1.0', 'stages.1.1']
    assert report.left == dict.fromkeys(('stem', 'shrink'), 'it has no blocks that SBP is known for')
    x = image(2, 32, 24)
    found = gradients(model, x)
    keep = model.stages[0][0]._sbp_place.draws.of((0, 0)).keep
    remove_sbp(model)
    for block in model.stages[0]:
        inner = block.mlp.forward
        block.mlp.forward = lambda x, inner=inner: where_sbp(inner, x, mask_of(keep, 8, 6))
    assert_alike(found, gradients(model, x))


def test_a_block_of_ones_own_pools(own_block):
    model, x = Net().double().train(), image(2, 32, 24)
    apply_sbp(model, dict(dropped='pool'))
    found = gradients(model, x)
    keep = model.stages[0][0]._sbp_place.draws.of((0, 0))
    remove_sbp(model)
    for block in model.stages[0]:

        def pools(x, inner=block.mlp.forward):
            f = lambda rows: inner(rows.mT[..., None])[..., 0].mT  # noqa: E731
            return where_pooled(f, x.flatten(2).mT, keep).mT.view(x.shape)

        block.mlp.forward = pools
    assert_alike(found, gradients(model, x))


@pytest.mark.parametrize(
    'key',
    [dict(recompute=True), dict(storage='int8'), dict(skip_dropped_images=True), dict(dropped='nearest')],
    ids=str,
)
def test_keys_that_a_block_of_ones_own_does_not_carry_out_are_refused(own_block, key):
    ((name, value),) = key.items()
    with pytest.raises(ValueError, match=f'{name}={value!r} means nothing for this backbone'):
        apply_sbp(Net(), key)


def test_a_map_of_another_size_is_an_error(own_block):
    model = Net(stride=8)
    apply_sbp(model, {})
    with pytest.raises(ValueError, match=r'has a map of 12 positions, and 48 were expected.*stride=4'):
        model(image(2, 32, 24).float())


def test_what_may_be_registered():
    with pytest.raises(ValueError, match='Block must derive from sbp_mmdet.apply.Thin'):
        register_block('a.B')(Block)


# mmpretrain's models, where it is installed.


def pretrain_model(name, **options):
    backbones = pytest.importorskip('mmpretrain.models.backbones')
    torch.manual_seed(0)
    model = getattr(backbones, name)(**options).double().to(DEVICE)
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
    model.train()
    return model


PRETRAIN = {
    'ConvNeXt': dict(
        arch=dict(depths=[1, 1, 2, 1], channels=[4, 8, 12, 16]),
        out_indices=(0, 1, 2, 3),
        gap_before_final_norm=False,
        drop_path_rate=0.3,
        layer_scale_init_value=0.5,
    ),
    'SwinTransformer': dict(
        arch=dict(embed_dims=8, depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4]),
        window_size=3,
        out_indices=(0, 1, 2, 3),
        pad_small_map=True,
        drop_path_rate=0.3,
    ),
    'VisionTransformer': dict(
        arch=dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32),
        img_size=(48, 64),
        out_type='featmap',
        drop_path_rate=0.3,
        layer_scale_init_value=0.5,
    ),
}


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize('name', PRETRAIN)
def test_mmpretrain_exact(name, with_cp):
    if with_cp and name == 'VisionTransformer':
        pytest.skip('it has no with_cp')
    model = pretrain_model(name, **PRETRAIN[name], **dict(with_cp=True) if with_cp else {})
    x = image(2, 48, 64)
    before = gradients(model, x)
    for cfg in (dict(recompute=True), dict(implementation='reference')):
        apply_sbp(model, dict(keep_ratio=1.0, **cfg))
        assert_alike(gradients(model, x), before)
    model.eval()
    changed = [out for out in model(x)]
    remove_sbp(model)
    for a, b in zip(changed, model(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize('name', PRETRAIN)
def test_mmpretrain_fused_is_algorithm_1(name):
    model = pretrain_model(name, **PRETRAIN[name])
    x, found = image(2, 48, 64), {}
    before = gradients(model, x)
    for cfg in (dict(), dict(implementation='reference'), dict(recompute=True)):
        apply_sbp(model, cfg)
        found[str(cfg)] = gradients(model, x)
        apply_sbp(model, cfg)
    first, *others = found.values()
    assert any(not torch.allclose(first[1][n], g) for n, g in before[1].items() if g is not None)
    for other in others:
        assert_alike(other, first)


def test_mmpretrain_vit_thins_out_its_last_blocks():
    model = pretrain_model('VisionTransformer', **PRETRAIN['VisionTransformer'])
    changed = apply_sbp(model, {}).changed
    assert changed['layers.0'].startswith('exact')
    assert all(changed[f'layers.{i}'].startswith('gradients from 0.5') for i in (1, 2))
    with pytest.raises(ValueError, match='attention'):
        apply_sbp(model, dict(attention='head'))


def test_mmpretrain_convnext_is_ours():
    options = PRETRAIN['ConvNeXt']
    stock = pretrain_model('ConvNeXt', **options)
    ours = SBPConvNeXt(**options, sbp_cfg=dict(keep_ratio=0.5)).double().to(DEVICE).train()
    ours.load_state_dict(stock.state_dict())
    apply_sbp(stock, dict(keep_ratio=0.5))
    x = image(2, 48, 64)
    assert_alike(gradients(stock, x), gradients(ours, x))


def test_grn_is_exact_or_refused():
    model = pretrain_model('ConvNeXt', **PRETRAIN['ConvNeXt'] | dict(use_grn=True, layer_scale_init_value=0.0))
    x = image(2, 48, 64)
    before = gradients(model, x)
    apply_sbp(model, dict(keep_ratio=1.0, recompute=True))
    assert_alike(gradients(model, x), before)
    remove_sbp(model)
    with pytest.raises(ValueError, match='GRN normalises over all positions'):
        apply_sbp(model)
