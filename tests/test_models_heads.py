"""SBP in neck and heads, against its definition in plain torch."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import RPNHead
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.mask_heads import FCNMaskHead, FeatureRelayHead
from mmdet.registry import HOOKS
from mmengine.model import BaseModule
from oracles import SMALL, assert_near, image, loss_of, oracle_convnext, relative_error, small_backbone, where_sbp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sbp_mmdet import draws, shared_draws
from sbp_mmdet.analysis import saved_bytes
from sbp_mmdet.masks import mask_generator, positions, sample_mask, stage_masks
from sbp_mmdet.models import heads
from sbp_mmdet.models.heads import sbp_map, sbp_modules
from sbp_mmdet.savings import checkpoint_modules

FLOAT = 4
SIZE = (72, 104)  # maps of 18 x 26, 9 x 13, 4 x 6, 2 x 3 and 1 x 2
MODULES = ['neck.lateral_convs', 'rpn_head', 'mask_heads']
HALF = dict(keep_ratio=0.5, sampler='grid')
RANDOM = dict(keep_ratio=0.4, sampler='random')


class Detector(BaseModule):
    """Backbone, neck, RPN and two mask heads, on a crop that stands for RoIs."""

    def __init__(self, sbp_cfg=None, dtype=torch.float64):
        super().__init__()
        self.backbone = small_backbone(sbp_cfg, dtype=dtype)
        self.neck = FPN(SMALL['channels'], 6, 5)
        self.rpn_head = RPNHead(in_channels=6, feat_channels=5)
        self.mask_heads = nn.ModuleList(
            [
                FCNMaskHead(num_convs=1, in_channels=6, conv_out_channels=4, num_classes=3),
                FCNMaskHead(
                    num_convs=1, in_channels=6, conv_out_channels=4, num_classes=3, upsample_cfg=dict(type=None)
                ),
            ]
        )
        generator = torch.Generator().manual_seed(1)
        for p in [*self.neck.parameters(), *self.rpn_head.parameters(), *self.mask_heads.parameters()]:
            p.data.normal_(std=0.4, generator=generator)
        self.to(dtype).train()

    def forward(self, x):
        maps = self.neck(self.backbone(x))
        scores, boxes = self.rpn_head(maps)
        return [*maps, *scores, *boxes, *(head(maps[0][..., 3:9, 5:12]) for head in self.mask_heads)]


def oracle(state, x, mask_of, backbone_masks, lateral_mask_of=None):
    """The same in plain torch. ``mask_of`` gives the mask for a (height, width), ``lateral_mask_of`` that of the
    lateral convolutions if they have others."""

    def conv(x, name, **kwargs):
        return F.conv2d(x, state[f'{name}.weight'], state[f'{name}.bias'], **kwargs)

    def thin(f, x, scale=1, mask_of=mask_of):
        mask = mask_of(x.shape[2:])
        if mask.all() or not mask.any():
            return f(x)
        return where_sbp(f, x, mask.repeat_interleave(scale, 0).repeat_interleave(scale, 1))

    backbone = {name.removeprefix('backbone.'): p for name, p in state.items() if name.startswith('backbone.')}
    maps = [
        thin(lambda x: conv(x, f'neck.lateral_convs.{i}.conv'), x, mask_of=lateral_mask_of or mask_of)  # noqa: B023
        for i, x in enumerate(oracle_convnext(backbone, x, SMALL['depths'], backbone_masks))
    ]
    for i in (2, 1, 0):
        maps[i] = maps[i] + F.interpolate(maps[i + 1], size=maps[i].shape[2:])
    maps = [conv(x, f'neck.fpn_convs.{i}.conv', padding=1) for i, x in enumerate(maps)]
    maps.append(maps[-1][..., ::2, ::2])

    def rpn(x):
        x = x.relu()
        return torch.cat([conv(x, 'rpn_head.rpn_cls'), conv(x, 'rpn_head.rpn_reg')], 1)

    predicted = [thin(rpn, conv(x, 'rpn_head.rpn_conv', padding=1)).split([9, 36], 1) for x in maps]
    masks = []
    for i in range(2):
        name = f'mask_heads.{i}'

        def tail(x, name=name, upsample=i == 0):
            if upsample:
                up = [state[f'{name}.upsample.{key}'] for key in ('weight', 'bias')]
                x = F.conv_transpose2d(x, *up, stride=2).relu()
            return conv(x, f'{name}.conv_logits')

        x = conv(maps[0][..., 3:9, 5:12], f'{name}.convs.0.conv', padding=1).relu()
        masks.append(thin(tail, x, 1 if i else 2))
    return [*maps, *(scores for scores, _ in predicted), *(boxes for _, boxes in predicted), *masks]


def gradients(model, x, forward=None):
    parameters = dict(model.named_parameters())
    loss = loss_of((forward or model)(x))
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def masks_of_step(options, *step, stages=()):
    """Size to mask; ``stages`` are sizes that share one base mask, as those of the backbone do."""

    def mask_of(size):
        generator = mask_generator(torch.initial_seed(), 0, *step)
        if tuple(size) in stages:
            return stage_masks(list(stages), *options.values(), generator)[stages.index(tuple(size))]
        return sample_mask(*size, *options.values(), generator)

    return mask_of


@pytest.mark.parametrize('options', [HALF, RANDOM])
@pytest.mark.parametrize('checkpointed', ['no', 'before', 'after', 'whole'])
def test_gradients_are_those_of_the_definition(options, checkpointed, iteration):
    model = Detector()
    state = dict(copy.deepcopy(model).named_parameters())
    replayed = ['neck', 'rpn_head', 'mask_heads', 'neck.lateral_convs.0.conv']
    if checkpointed == 'before':
        checkpoint_modules(model, replayed)
    assert sbp_modules(model, MODULES, **options)[-2:] == ['mask_heads.0', 'mask_heads.1']
    if checkpointed == 'after':
        checkpoint_modules(model, replayed)
    x = image(2, *SIZE)
    exact = masks_of_step(dict(keep_ratio=1, sampler='grid'), 0)
    for step, repeat in ((7, 0), (7, 1), (8, 0)):  # a second pass of the same iteration draws again
        iteration(step)
        whole = functools.partial(cp.checkpoint, model, use_reentrant=False) if checkpointed == 'whole' else None
        found = gradients(model, x, whole)
        loss = loss_of(oracle(state, x, masks_of_step(options, step, repeat), {}))
        expected = dict(zip(state, torch.autograd.grad(loss, list(state.values())), strict=True))
        assert_near(found, expected, 1e-10)
    loss = loss_of(oracle(state, x, exact, {}))
    plain = dict(zip(state, torch.autograd.grad(loss, list(state.values())), strict=True))
    for name in ('neck.lateral_convs.1.conv.weight', 'rpn_head.rpn_cls.weight', 'mask_heads.0.conv_logits.weight'):
        assert relative_error(found[name], plain[name]) > 0.05, name
    with torch.no_grad():
        for out, right in zip(model(x), oracle(state, x, exact, {}), strict=True):
            assert relative_error(out, right) < 1e-12


def test_lateral_convolutions_use_the_backbones_masks_where_sizes_agree(iteration):
    """All others have masks of their own size."""
    iteration(3)
    model = Detector(dict(HALF))
    state = dict(copy.deepcopy(model).named_parameters())
    sbp_modules(model, MODULES, **HALF)
    sizes = [(18, 26), (9, 13), (4, 6)]
    stages = dict(enumerate(stage_masks(sizes, *HALF.values(), mask_generator(torch.initial_seed(), 0, 3))))
    backbone_masks = {key: stages[key[0]] for key in model.backbone.keep_ratios()}
    x = image(1, *SIZE)
    lateral = masks_of_step(HALF, 3, stages=sizes)
    loss = loss_of(oracle(state, x, masks_of_step(HALF, 3), backbone_masks, lateral))
    expected = dict(zip(state, torch.autograd.grad(loss, list(state.values())), strict=True))
    assert_near(gradients(model, x), expected, 1e-10)


@pytest.mark.parametrize('dropped', ['zero', 'nearest', 'pool'])
def test_lateral_convolutions_follow_backbones_that_draw_each_stage_for_itself(dropped, iteration):
    iteration(3)
    model = Detector(dict(HALF, dropped=dropped))
    sbp_modules(model, MODULES, **HALF)
    sizes = [(18, 26), (9, 13), (4, 6)]
    generator = mask_generator(torch.initial_seed(), 0, 3)
    expected = stage_masks(sizes, *HALF.values(), generator, aligned=dropped == 'zero')
    model(image(1, *SIZE))
    draws = model.neck.lateral_convs[0].conv._sbp_draws
    for size, mask in zip(sizes, expected, strict=True):
        kept = draws.of(torch.empty(1, 1, *size), as_backbone=True).keep
        assert torch.equal(kept, mask.flatten().nonzero().flatten())


def test_evaluation_and_passes_without_gradients_stay_plain(monkeypatch):
    plain = Detector()
    thin = copy.deepcopy(plain)
    sbp_modules(thin, MODULES)
    monkeypatch.setattr(heads, 'sbp_map', None)  # would fail
    x = image(1, *SIZE)
    assert_near(gradients(thin.eval(), x), gradients(plain.eval(), x), 0)
    with torch.no_grad():
        thin.train()(x)


def test_ranks_draw_masks_of_their_own(monkeypatch):
    model = Detector()
    sbp_modules(model, MODULES, **RANDOM)
    seen = []
    monkeypatch.setattr(shared_draws, 'positions', lambda mask, device: (seen[-1].append(mask), positions(mask))[1])
    for rank in (0, 0, 1):
        monkeypatch.setattr(draws, 'get_rank', lambda rank=rank: rank)
        seen.append([])
        copy.deepcopy(model)(image(1, *SIZE))
    first, again, other = seen
    assert len(first) == 6  # one for each level of the pyramid, and one for the RoIs
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, other))


@pytest.mark.parametrize('frozen', [False, True])
def test_each_pass_draws_whether_or_not_the_backbone_trains(frozen):
    model, x = Detector(), image(1, *SIZE)
    sbp_modules(model, MODULES, **RANDOM)
    model.backbone.train(not frozen)
    head, maps = model.mask_heads[0], torch.zeros(1, 1, 9, 13)
    kept = []
    for _ in range(2):
        model(x)
        kept.append(head._sbp_draws.of(maps).keep)
    assert not torch.equal(*kept)


@pytest.mark.parametrize('sizes', [(SIZE, SIZE), (SIZE, (96, 64))])
def test_two_passes_of_a_checkpointed_neck(sizes):
    """Images of two sizes too, where the masks of the backbone's stages have others."""
    grads = []
    for change in (False, True):
        torch.manual_seed(0)
        model = Detector(dict(RANDOM))
        sbp_modules(model, MODULES, **RANDOM)
        if change:
            checkpoint_modules(model, ['neck', 'rpn_head', 'mask_heads'])
        losses = [loss_of(model(image(1, *size, seed=seed))) for seed, size in enumerate(sizes)]
        grads.append(torch.autograd.grad(sum(losses), list(model.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


class Alone(nn.Module):
    """A module whose own passes draw its masks."""

    def __init__(self, module, method='forward'):
        super().__init__()
        self.module, self.method = module.train(), method

    def forward(self, x):
        return getattr(self.module, self.method)(x)


def test_what_is_stored():
    """By hand, in fp32. H x W positions, of which half are kept."""
    x = torch.randn(2, 6, 8, 8, requires_grad=True)
    kept = 2 * 32
    index = 32 * 2 * 8  # kept and dropped positions, int64

    def stored(module, method='forward'):
        model = Alone(module, method)
        plain = saved_bytes(lambda: model(x), [x, *module.parameters()])
        sbp_modules(model, ['module'])
        thin = saved_bytes(lambda: model(x), [x, *module.parameters()])
        return plain, thin

    conv = ConvModule(6, 5, 1, act_cfg=None)
    # Without what follows, a convolution stores its input, which is x; the kept half of it is a copy.
    plain, thin = stored(conv)
    assert plain == 0 and 0 <= thin - kept * 6 * FLOAT <= index
    # The RPN stores the ReLU's output: all of it, or the kept half.
    rpn = RPNHead(in_channels=6, feat_channels=5)
    plain, thin = stored(rpn, 'forward_single')
    assert plain == 2 * kept * 5 * FLOAT and 0 <= thin - kept * 5 * FLOAT <= index
    # The mask head stores the 3x3 convolution's and the upsampling's output; now the former and its kept half.
    head = FCNMaskHead(num_convs=1, in_channels=6, conv_out_channels=4, num_classes=3)
    plain, thin = stored(head)
    assert plain == 2 * kept * (4 + 4 * 4) * FLOAT
    assert 0 <= thin - (2 * kept + kept) * 4 * FLOAT <= index
    # Checkpointed, in either order, it stores its input only.
    for order in ((sbp_modules, checkpoint_modules), (checkpoint_modules, sbp_modules)):
        model = Alone(FCNMaskHead(num_convs=1, in_channels=6, conv_out_channels=4, num_classes=3))
        for change in order:
            change(model, ['module'])
        assert saved_bytes(lambda: model(x), [x, *model.parameters()]) == 0  # noqa: B023


def test_under_autocast():
    """The kept positions' pass comes first, or autocast's cache of cast weights would cut the gradients off."""
    plain = Detector(dtype=torch.float32)
    thin = copy.deepcopy(plain)
    sbp_modules(thin, MODULES)
    x = image(1, *SIZE, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        outs = thin(x)
        for out, right in zip(outs, plain(x), strict=True):
            assert out.dtype == right.dtype and relative_error(out.detach(), right.detach()) < 0.05
        grads = torch.autograd.grad(loss_of(outs), list(thin.parameters()))
    full = Detector(dtype=torch.float32)
    sbp_modules(full, MODULES)
    expected = gradients(full, x)
    # Rounding to eight bits may take a ReLU to its other side, elsewhere on each kind of CPU: that is some percent of
    # all, and more of a small bias. A gradient that is cut off lacks as much as it has.
    expected = {name: right for name, right in expected.items() if name != 'image'}
    off = {name: (grad - right).norm() for (name, right), grad in zip(expected.items(), grads, strict=True)}
    for name, right in expected.items():
        assert off[name] < 0.5 * right.norm(), name
    length = torch.stack([right.norm() for right in expected.values()]).norm()
    assert torch.stack(list(off.values())).norm() < 0.1 * length


def test_in_a_distributed_wrapper(tmp_path):
    model = Detector()
    sbp_modules(model, MODULES)
    alone = copy.deepcopy(model)
    x = image(1, *SIZE)
    dist.init_process_group('gloo', store=dist.FileStore(str(tmp_path / 'store'), 1), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        loss_of(wrapped(x)).backward()
    finally:
        dist.destroy_process_group()
    assert_near({name: p.grad for name, p in model.named_parameters()}, gradients(alone, x), 1e-12)


def test_a_copy_runs_its_own_parameters():
    """As EMA makes one."""
    model = Detector()
    sbp_modules(model, MODULES)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.rpn_head.rpn_cls.weight), nn.init.zeros_(other.rpn_head.rpn_cls.bias)
    scores = [net(image(1, *SIZE))[5] for net in (other, model)]
    assert not scores[0].any() and scores[1].all()
    assert type(model.rpn_head).__name__ == 'RPNHead' and isinstance(model.rpn_head, RPNHead)
    assert model.state_dict().keys() == Detector().state_dict().keys()


def test_no_rois_and_maps_of_one_position():
    head = Alone(FCNMaskHead(num_convs=1, in_channels=6, conv_out_channels=4, num_classes=3))
    sbp_modules(head, ['module'])
    out = head(torch.zeros(0, 6, 14, 14))
    assert out.shape == (0, 3, 28, 28)
    out.sum().backward()
    assert all(not p.grad.any() for p in head.parameters())
    x, conv = torch.randn(2, 3, 1, 1), nn.Conv2d(3, 4, 1)
    for kept in (True, False):
        out = sbp_map(conv, x, positions(torch.tensor([[kept]])))
        assert torch.equal(out, conv(x)) and out.requires_grad


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_the_layout_stays(layout):
    x = torch.randn(2, 3, 4, 6).contiguous(memory_format=layout)
    kept = positions(sample_mask(4, 6, 0.5, 'grid', mask_generator(0, 0, 0)))
    out = sbp_map(lambda x: F.interpolate(x.cos(), scale_factor=2), x, kept, upsampling=2)
    assert torch.equal(out, F.interpolate(x.cos(), scale_factor=2)) and out.is_contiguous(memory_format=layout)


class OwnRPN(RPNHead):
    def forward_single(self, x):
        return super().forward_single(x * 2)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(modules='neck.lateral_conv'), r"no 'neck.lateral_conv'.*'backbone', 'neck'"),
        (dict(modules=['rpn_head', 'neck.fpn_convs']), r'neck.fpn_convs.0 is a convolution with kernel_size=\(3, 3\)'),
        (dict(modules='strided'), r'strided is a convolution with stride=\(2, 2\)'),
        (dict(modules='neck'), 'neck is a FPN; SBP needs operations on each position for itself'),
        (dict(modules='own'), 'own is a OwnRPN'),
        (dict(modules='relay'), 'relay is a FeatureRelayHead'),
        (dict(modules='bilinear'), "bilinear upsamples by 'bilinear'"),
        (dict(modules='rpn_head', keep_ratio=1.5), r'keep_ratio=1.5'),
        (dict(modules='rpn_head', sampler='best'), "sampler='best'"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(options, message):
    model = Detector()
    model.strided, model.own, model.relay = nn.Conv2d(3, 3, 1, stride=2), OwnRPN(6), FeatureRelayHead(4, 4, 3)
    model.bilinear = FCNMaskHead(num_convs=1, conv_out_channels=4, upsample_cfg=dict(type='bilinear', scale_factor=2))
    with pytest.raises(ValueError, match=message):
        HOOKS.build(dict(type='SBPModulesHook', **options)).apply(model)
    assert type(model.rpn_head) is RPNHead
