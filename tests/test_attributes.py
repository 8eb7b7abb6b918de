"""Every attribute of a bypassed module that decides what its own code computes is seen, also if it changes later.

Each number, flag, name and tuple of each class of modules in small models is changed after ``apply_lean``, to another
value or to a tensor or list. Where the plain model still runs, the lean one has to give its outputs and gradients in
fp64.
"""

import copy

import mmcv.cnn
import pytest
import torch
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import ResNeSt, ResNet
from mmdet.models.backbones.resnet import Bottleneck
from mmdet.models.backbones.swin import SwinTransformer
from mmdet.models.dense_heads import RPNHead
from mmdet.models.layers import CSPLayer, ResLayer
from mmdet.models.layers.se_layer import ChannelAttention, SELayer
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmengine.logging import MMLogger
from test_accepted_calls import (
    MAPS,
    assert_alike,
    build_fpn,
    build_padded,
    deformable_arguments,
    encoder_layer,
    first,
    fusion,
    normal,
    run,
)
from torch import nn

from sbp_mmdet import SBPConvNeXt, SBPViT, apply_lean
from sbp_mmdet.adapters import LeanModule, modules_bypassed_in
from sbp_mmdet.surgery import stock_class


@pytest.fixture(autouse=True, scope='module')
def quiet():
    MMLogger.get_current_instance().setLevel('ERROR')
    yield
    MMLogger.get_current_instance().setLevel('INFO')


PLACES = deformable_arguments()
ARCH = dict(embed_dims=8, num_layers=1, num_heads=2, feedforward_channels=8)


def conv(**options):
    return ConvModule(3, 4, 3, padding=1, **options)


def levels(module, *maps):
    return module(maps)


# Builder, call and shapes of the inputs.
MODELS = {
    'stage': (lambda: ResLayer(Bottleneck, 8, 2, 1, stride=2), first, [(2, 8, 6, 6)]),
    'CSP layer': (lambda: CSPLayer(4, 4, use_cspnext_block=True, channel_attention=True), first, [(2, 4, 6, 6)]),
    'SELayer': (lambda: SELayer(16), first, [(2, 16, 3, 3)]),
    'ChannelAttention': (lambda: ChannelAttention(4), first, [(2, 4, 3, 3)]),
    'VGG': (lambda: mmcv.cnn.VGG(11, num_stages=2, dilations=(1, 1), out_indices=(0, 1)), first, [(1, 3, 8, 8)]),
    'mask head': (
        lambda: FCNMaskHead(num_convs=0, in_channels=3, conv_out_channels=3, num_classes=2),
        first,
        [(70, 3, 2, 2)],
    ),
    'FPN': (build_fpn, levels, MAPS),
    'RPN': (lambda: RPNHead(in_channels=3, feat_channels=3), levels, [(1, 3, 6, 5), (1, 3, 3, 3)]),
    'image and text': (fusion, first, [(2, 6, 8), (2, 3, 8)]),
    'attention': (lambda: MultiheadAttention(8, 2, batch_first=True), first, [(2, 5, 8)]),
    'deformable attention': (
        lambda: MultiScaleDeformableAttention(8, 2, 2, 2, batch_first=True, dropout=0.0),
        lambda m, x: m(x, **PLACES),
        [(2, 20, 8)],
    ),
    'encoder layer': (
        encoder_layer,
        lambda m, x, pos: m(query=x, query_pos=pos, key_padding_mask=None, **PLACES),
        [(2, 20, 8), (2, 20, 8)],
    ),
    'FFN': (lambda: FFN(8, 16, ffn_drop=0.0), first, [(2, 5, 8)]),
    'Swin': (
        lambda: SwinTransformer(
            embed_dims=4, depths=(1, 2), num_heads=(2, 2), window_size=3, mlp_ratio=1, strides=(4, 2),
            out_indices=(0, 1), drop_path_rate=0.0,
        ),
        first,
        [(1, 3, 20, 24)],
    ),
    'ConvNeXt': (lambda: SBPConvNeXt(dict(depths=[1, 1], channels=[4, 6]), out_indices=0), first, [(1, 3, 16, 16)]),
    'ViT': (lambda: SBPViT(ARCH, img_size=32, patch_size=8), first, [(1, 3, 32, 32)]),
    'batch norm': (lambda: conv(norm_cfg=dict(type='BN')), first, [(2, 3, 5, 5)]),
    'group norm': (
        lambda: conv(norm_cfg=dict(type='GN', num_groups=2), act_cfg=dict(type='LeakyReLU')), first, [(2, 3, 5, 5)],
    ),
    'no norm': (lambda: conv(act_cfg=dict(type='SiLU')), first, [(2, 3, 5, 5)]),
    'ConvWS': (lambda: conv(conv_cfg=dict(type='ConvWS')), first, [(2, 3, 5, 5)]),
    'ConvAWS': (lambda: conv(conv_cfg=dict(type='ConvAWS')), first, [(2, 3, 5, 5)]),
    'adaptive padding': (build_padded, first, [(2, 3, 7, 7)]),
    'max pool': (lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 3, 1)), first, [(2, 3, 6, 6)]),
    'ResNet': (
        lambda: ResNet(18, stem_channels=4, base_channels=4, num_stages=1, strides=(1,), dilations=(1,),
                       out_indices=(0,), norm_eval=False),
        first,
        [(2, 3, 12, 12)],
    ),
    'ResNeSt': (
        lambda: ResNeSt(depth=50, stem_channels=4, base_channels=4, num_stages=1, strides=(1,), dilations=(1,),
                        out_indices=(0,), norm_eval=True, reduction_factor=4),
        first,
        [(1, 3, 12, 12)],
    ),
}  # fmt: skip
# Dropout of the fusion is drawn in chunks, so that another rate gives other values than plain's with the same seed.
DRAWN = {('BiMultiHeadAttention', 'dropout')}


def other_values(value):
    """Return other values, and the same in another form that torch takes too; none for what is no setting."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        other = torch.tensor(value / 2 + 0.1, dtype=torch.float64)
        return [other.item(), other, other * torch.tensor([[[1.0]], [[2.0]]])]  # one for each of two heads
    if value == 'zeros':
        return ['reflect']
    if isinstance(value, tuple) and value and all(type(number) is int for number in value):
        return [tuple(number + 1 for number in value), [*value], value[0]]
    return []


def find_settings(model):
    """Yield settings of the first module of each class that is bypassed: its name, the attribute, another value."""
    seen, bypassed = set(DRAWN), modules_bypassed_in(model)
    for name, module in model.named_modules():
        if module not in bypassed and not isinstance(module, LeanModule):
            continue
        for attribute, value in vars(module).items():
            known = stock_class(type(module)).__name__, attribute
            if known in seen or attribute.startswith('_') or attribute in ('training', 'call_super_init'):
                continue
            seen.add(known)
            yield from ((name, attribute, other) for other in other_values(value))


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('name', MODELS)
def test_each_attribute(name, preset):
    build, call, shapes = MODELS[name]
    torch.manual_seed(0)
    plain = nn.ModuleList([build()]).double().train()
    inputs = [normal(*shape) for shape in shapes]
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    assert_alike(plain[0], lean[0], call, *inputs)
    number = 0
    for place, attribute, value in find_settings(lean):
        modules = [model.get_submodule(place) for model in (plain, lean)]
        if not hasattr(modules[0], attribute):  # of a class of this package
            continue
        before = getattr(modules[0], attribute)
        for module in modules:
            setattr(module, attribute, value)
        if not isinstance(run(copy.deepcopy(plain)[0], call, *inputs), type):  # otherwise plain refuses the value
            number += 1
            assert_alike(plain[0], lean[0], call, *inputs)
        for module in modules:
            setattr(module, attribute, before)
    assert number >= 2
