"""Calls and settings that operations do not compute: the module's own code runs, with its results or its error."""

import copy
import math

import mmcv.cnn
import pytest
import torch
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.conv2d_adaptive_padding import Conv2dAdaptivePadding
from mmcv.cnn.bricks.transformer import BaseTransformerLayer, MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.resnet import BasicBlock, Bottleneck
from mmdet.models.backbones.swin import SwinBlock, SwinTransformer
from mmdet.models.dense_heads import RPNHead
from mmdet.models.layers import CSPLayer, ResLayer
from mmdet.models.layers.se_layer import ChannelAttention, SELayer
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from mmdet.models.losses import VarifocalLoss
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.utils.vlfuse_helper import SingleScaleBiAttentionBlock
from mmengine.logging import MMLogger
from torch import nn

from sbp_mmdet import SBPConvNeXt, apply_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.chunked_targets.dense_losses import losses_in_chunks


@pytest.fixture(autouse=True, scope='module')
def quiet():
    MMLogger.get_current_instance().setLevel('ERROR')
    yield
    MMLogger.get_current_instance().setLevel('INFO')


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def flat(value):
    """Return the tensors of nested lists and tuples."""
    return [value] if isinstance(value, torch.Tensor) else [x for part in value for x in flat(part)]


def run(model, call, *inputs):
    """Return outputs and gradients of a step with random weights of the outputs, or the class of its error."""
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    torch.manual_seed(1)
    try:
        outs = flat(call(model, *inputs))
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outs]
        sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
    except Exception as error:
        return type(error)
    given = [x.grad for x in inputs] + [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return [out.detach() for out in outs], given


def assert_alike(plain, lean, call, *inputs, nan=False):
    """Assert that both models give the same outputs and gradients, or errors of the same class."""
    expected, actual = run(plain, call, *inputs), run(lean, call, *inputs)
    if isinstance(expected, type):
        assert actual is expected
        return
    assert not isinstance(actual, type), actual
    for own, found in zip([*expected[0], *expected[1]], [*actual[0], *actual[1]], strict=True):
        assert (own is None) == (found is None)
        if own is not None:
            assert own.isfinite().all() or nan
            torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-11, equal_nan=nan)


def changed(module, preset='exact'):
    plain = nn.Sequential(module).double().train()
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    return plain[0], lean[0]


def first(module, *inputs):
    return module(*inputs)


# A single image (C, H, W). Batch norms in training mode raise an error; torch's kernel would write to other memory.
NORMED = dict(norm_cfg=dict(type='BN'))
GROUPED = dict(norm_cfg=dict(type='GN', num_groups=2))
SINGLE = {
    'stage': (lambda: ResLayer(Bottleneck, 8, 2, 2), 8),
    'stage, GN': (lambda: ResLayer(Bottleneck, 8, 2, 2, **GROUPED), 8),
    'basic block': (lambda: BasicBlock(4, 4), 4),
    'bottleneck': (lambda: Bottleneck(8, 2), 8),
    'CSP layer': (lambda: CSPLayer(4, 4, **NORMED), 4),
    'squeeze and excitation': (lambda: SELayer(16), 16),
    'channel attention': (lambda: ChannelAttention(4), 4),
    'VGG': (lambda: mmcv.cnn.VGG(11, out_indices=(0, 1)), 3),
    'mask head': (lambda: FCNMaskHead(num_convs=0, in_channels=70, conv_out_channels=70, num_classes=2), 70),
}


@pytest.mark.parametrize('name', SINGLE)
def test_a_single_image(name):
    build, channels = SINGLE[name]
    torch.manual_seed(0)
    plain, lean = changed(build())
    assert_alike(plain, lean, first, normal(channels, 32, 32))


def test_a_call_without_its_argument_is_plains_error():
    plain, lean = changed(ResLayer(BasicBlock, 4, 4, 1))
    for call in (lambda m, x: m(), lambda m, x: m(x=x)):
        assert_alike(plain, lean, call, normal(2, 4, 6, 6))


def test_a_single_image_in_an_rpn_head():
    plain, lean = changed(RPNHead(in_channels=4, feat_channels=4))
    assert_alike(plain, lean, lambda m, *x: m(x), normal(4, 6, 5), normal(4, 3, 3))


def build_fpn(change=lambda fpn: None):
    torch.manual_seed(0)
    fpn = FPN([2, 3, 4], 4, num_outs=4)
    change(fpn)
    return fpn


def widen(fpn):
    conv = fpn.fpn_convs[0].conv
    conv.dilation = conv.padding = (2, 2)


def replace(fpn):
    fpn.fpn_convs[1].conv = nn.Conv2d(4, 4, 5, padding=2)


MAPS = (2, 2, 8, 8), (2, 3, 4, 4), (2, 4, 2, 2)


@pytest.mark.parametrize('change', [widen, replace])
def test_output_convolutions_that_differ(change):
    plain, lean = changed(build_fpn(change))
    assert_alike(plain, lean, lambda m, *x: m(x), *(normal(*shape) for shape in MAPS))
    plain, lean = changed(build_fpn())
    change(plain.double())
    change(lean)
    lean.double().load_state_dict(plain.double().state_dict())
    assert_alike(plain, lean, lambda m, *x: m(x), *(normal(*shape) for shape in MAPS))


def test_levels_of_other_batches():
    """Plain's sum of the levels is broadcast."""
    plain, lean = changed(build_fpn())
    assert_alike(plain, lean, lambda m, *x: m(x), normal(2, 2, 8, 8), normal(1, 3, 4, 4), normal(1, 4, 2, 2))


def fusion():
    return SingleScaleBiAttentionBlock(8, 8, 8, 2, dropout=0.0, drop_path=0.0, init_values=0.5)


@pytest.mark.parametrize('before', [True, False])
def test_scale_of_an_attention_between_image_and_text(before):
    plain = nn.ModuleList([fusion(), nn.Conv2d(2, 2, 1)]).double().train()  # something else can be changed
    lean = copy.deepcopy(plain)
    for model in (plain, lean):
        if before:
            model[0].attn.scale = 0.1
        if model is lean:
            apply_lean(model, verify=False)
        model[0].attn.scale = 0.1
    assert_alike(plain[0], lean[0], first, normal(2, 6, 8), normal(2, 3, 8))


def test_masks_of_image_and_text():
    plain, lean = changed(fusion())
    text = torch.tensor([[True, True, False]])
    for mask in (text, text.expand(2, 3), text.expand(2, 3, 3)):  # plain broadcasts the first and refuses the last
        assert_alike(plain, lean, lambda m, v, t, mask=mask: m(v, t, None, mask), normal(2, 6, 8), normal(2, 3, 8))


HIDDEN = torch.zeros(5, 5, dtype=torch.bool).index_fill_(0, torch.tensor(1), True)
PADDED = torch.tensor([[False] * 5, [True] * 5])
MASKS = {
    'attention': dict(attn_mask=HIDDEN),
    'attention, numbers': dict(attn_mask=torch.zeros(5, 5).masked_fill(HIDDEN, -math.inf).double()),
    'one head': dict(attn_mask=torch.stack([HIDDEN, *[torch.zeros_like(HIDDEN)] * 3])),
    'padding': dict(key_padding_mask=PADDED),
    'padding, numbers': dict(key_padding_mask=torch.zeros(2, 5).masked_fill(PADDED, -math.inf).double()),
    'both': dict(attn_mask=torch.eye(5, dtype=torch.bool).logical_not(), key_padding_mask=PADDED[:, :1] | HIDDEN[:2]),
}


@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('name', MASKS)
def test_rows_without_keys_are_nan(name, batch_first):
    """Gradients of weights are NaN too. That of the bias of the projection behind is one number in plain's code."""
    plain, lean = changed(MultiheadAttention(8, 2, batch_first=batch_first))

    def call(module, x):
        return module(x if batch_first else x.transpose(0, 1), **MASKS[name])

    (outs, grads), (found, lean_grads) = run(plain, call, normal(2, 5, 8)), run(lean, call, normal(2, 5, 8))
    assert torch.equal(outs[0].isnan(), found[0].isnan()) and outs[0].isnan().any() and not outs[0].isnan().all()
    names = ['x', *dict(plain.named_parameters())]
    for name, own, grad in zip(names, grads, lean_grads, strict=True):
        assert grad.isnan().any() == own.isnan().any() or name == 'attn.out_proj.bias', name


LEAST = torch.finfo(torch.float32).min
ADDED = {
    'in half precision': (torch.bfloat16, dict(attn_mask=torch.zeros(5, 5).masked_fill(HIDDEN, LEAST))),
    'padding in half precision': (torch.bfloat16, dict(key_padding_mask=torch.zeros(2, 5).masked_fill(PADDED, LEAST))),
    'two': (
        torch.float32,
        dict(
            attn_mask=torch.zeros(5, 5).masked_fill(HIDDEN, LEAST),
            key_padding_mask=torch.zeros(2, 5).masked_fill(PADDED, LEAST),
        ),
    ),
    'little': (torch.float32, dict(attn_mask=torch.zeros(5, 5).masked_fill(HIDDEN, LEAST))),
}


@pytest.mark.parametrize('name', ADDED)
def test_masks_of_large_numbers(name):
    """Masks are added in the precision of the attention, in which their sum may be minus infinity."""
    dtype, masks = ADDED[name]
    plain, lean = changed(MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 5, 8)
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16):
        outs = [model.float()(x, **masks) for model in (plain, lean)]
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    assert outs[0].isnan().any() == (name != 'little')


def build_padded(padding=(0, 0)):
    layer = ConvModule(
        3, 4, 3, stride=2, padding=0, conv_cfg=dict(type='Conv2dAdaptivePadding'), norm_cfg=dict(type='BN')
    )
    assert type(layer.conv) is Conv2dAdaptivePadding
    layer.conv.padding = padding
    return layer


def test_padding_by_the_input_and_by_numbers():
    plain, lean = changed(nn.Sequential(build_padded((1, 1)), nn.Conv2d(4, 4, 3)))
    assert_alike(plain, lean, first, normal(2, 3, 9, 9))
    plain, lean = changed(build_padded())
    for layer in (plain, lean):
        torch.manual_seed(0)
        layer.conv.weight = nn.Parameter(normal(4, 3, 5, 5))  # the module reads the size of its weight
    assert_alike(plain, lean, first, normal(2, 3, 9, 9))


@pytest.mark.parametrize('write', [lambda y: y.data.mul_(2), lambda y: y.mul_(2), lambda y: y[:, :1].add_(1)])
@pytest.mark.parametrize('norm', [None, dict(type='BN', requires_grad=False)])
def test_a_write_to_the_output_of_a_relu6(norm, write):
    """The own code saves the activation's input, so its gradients do not change."""
    layer = ConvModule(3, 4, 3, norm_cfg=norm, act_cfg=dict(type='ReLU6'))
    if norm:
        layer.norm.eval()
    plain, lean = changed(layer)
    if norm:
        plain.norm.eval()
        lean.norm.eval()

    def call(module, x):
        y = module(4 * x)
        write(y)
        return y

    assert_alike(plain, lean, call, normal(2, 3, 6, 6))


def test_dropout_in_place_behind_operations():
    torch.manual_seed(0)
    swin = SwinTransformer(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2), window_size=3, mlp_ratio=1,
                           drop_path_rate=0.0)  # fmt: skip
    swin.drop_after_pos = nn.Dropout(0.1, inplace=True)
    assert_alike(*changed(swin), first, normal(1, 3, 44, 52))


class Tokens(nn.Module):
    """Backbone of the user's, of stock blocks that stand in attributes of its own names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (SwinBlock(8, 2, 8, window_size=3, shift=shift) for shift in (False, True))
        self.stages = None

    def forward(self, x):
        return self.second(self.first(x, (5, 4)), (5, 4))


def test_stock_blocks_in_a_backbone_of_ones_own():
    plain, lean = changed(Tokens())
    assert [name for name, m in lean.named_modules() if isinstance(m, LeanModule)] == ['first', 'second']
    assert_alike(plain, lean, first, normal(2, 20, 8))
    blocks = SBPConvNeXt(arch=dict(depths=[2], channels=[4]), out_indices=0, sbp_cfg=dict(preset='none')).stages[0]
    plain, lean = changed(nn.ModuleDict(dict(first=blocks[0], second=blocks[1])))
    assert isinstance(lean['second'], LeanModule)
    call = lambda m, x: m['second'](m['first'](x))  # noqa: E731
    assert_alike(plain, lean, call, normal(2, 4, 6, 6))


SIZES = torch.tensor([[4, 4], [2, 2]])
STARTS = torch.tensor([0, 16])


def deformable_arguments(**more):
    given = dict(reference_points=torch.rand(2, 20, 2, 2).double(), spatial_shapes=SIZES, level_start_index=STARTS)
    return {name: value for name, value in (given | more).items() if value is not None}


ODD_CALLS = {
    'usual': dict(),
    'no start': dict(level_start_index=None),
    'points of three numbers': dict(reference_points=torch.rand(2, 20, 2, 3).double()),
    'points of four numbers': dict(reference_points=torch.rand(2, 20, 2, 4).double()),
    'no points': dict(reference_points=None),
}


def test_dropout_in_place_in_an_attention():
    plain, lean = changed(MultiScaleDeformableAttention(8, 2, 2, 2, batch_first=True, dropout=0.1))
    for module in (plain, lean):
        module.dropout = nn.Dropout(0.1, inplace=True)
    given = deformable_arguments()
    assert_alike(plain, lean, lambda m, x: m(x, **given), normal(2, 20, 8))


@pytest.mark.parametrize('name', ODD_CALLS)
def test_arguments_of_deformable_attention(name):
    given = deformable_arguments(**ODD_CALLS[name])
    plain, lean = changed(MultiScaleDeformableAttention(8, 2, 2, 2, batch_first=True, dropout=0.0))
    assert_alike(plain, lean, lambda m, x: m(x, **given), normal(2, 20, 8))


def encoder_layer():
    attention = dict(embed_dims=8, num_heads=2, num_levels=2, num_points=2, dropout=0.0, batch_first=True)
    ffn = dict(embed_dims=8, feedforward_channels=8, ffn_drop=0.0)
    return DeformableDetrTransformerEncoderLayer(self_attn_cfg=attention, ffn_cfg=ffn)


@pytest.mark.parametrize('name', [*ODD_CALLS, 'value'])
def test_arguments_of_an_encoder_layer(name):
    given = deformable_arguments(**ODD_CALLS.get(name, dict(value=normal(2, 20, 8))))
    plain, lean = changed(encoder_layer())
    call = lambda m, x, pos: m(query=x, query_pos=pos, key_padding_mask=None, **given)  # noqa: E731
    assert_alike(plain, lean, call, normal(2, 20, 8), normal(2, 20, 8))


def layer_of_mmcv():
    attention = dict(type='MultiScaleDeformableAttention', embed_dims=8, num_heads=2, num_levels=2, num_points=2,
                     dropout=0.0, batch_first=True)  # fmt: skip
    ffn = dict(type='FFN', embed_dims=8, feedforward_channels=8, ffn_drop=0.0)
    return BaseTransformerLayer(attention, ffn, ('self_attn', 'norm', 'ffn', 'norm'), batch_first=True)


@pytest.mark.parametrize('name', [*ODD_CALLS, 'identity'])
def test_arguments_of_a_layer_of_mmcv(name):
    """Arguments that the layer does not name go to the attention; it gives the identity itself."""
    given = deformable_arguments(**ODD_CALLS.get(name, dict(identity=normal(2, 20, 8))))
    plain, lean = changed(layer_of_mmcv())
    assert_alike(plain, lean, lambda m, x, pos: m(x, query_pos=pos, **given), normal(2, 20, 8), normal(2, 20, 8))


@pytest.mark.parametrize('before', [True, False])
def test_where_the_norms_of_a_layer_stand(before):
    layer = layer_of_mmcv()
    layer.pre_norm = before
    plain, lean = changed(layer)
    plain.pre_norm = lean.pre_norm = True
    given = deformable_arguments()
    assert_alike(plain, lean, lambda m, x: m(x, **given), normal(2, 20, 8))


def test_weights_of_classes_in_a_varifocal_loss():
    """A weight of one dimension weighs classes; chunks must not take it for one of priors."""
    losses = nn.ModuleList([VarifocalLoss()]).train()
    lean = copy.deepcopy(losses)
    losses_in_chunks(lean, 3)
    target = torch.rand(3, 3, dtype=torch.float64)

    def call(module, x):
        return [module[0](x, target, torch.arange(3.0).double(), avg_factor=2.0)]

    assert_alike(losses, lean, call, normal(3, 3))
