"""Whatever is not computed by an operation is the module's own code: values and gradients are those of plain."""

import copy
from fractions import Fraction

import pytest
import torch
from helpers import needs_fp16
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models import ResNet
from mmdet.models.backbones import SwinTransformer
from mmdet.models.layers import CSPLayer
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from mmdet.models.necks import ChannelMapper
from torch import nn

from sbp_mmdet import SBPConvNeXt, apply_lean, remove_lean
from sbp_mmdet.ops.activation import ActivationSettings, ActivationTensors, activate
from sbp_mmdet.ops.channel_mlp import MLPSettings, MLPTensors, channel_mlp
from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.common.folding import normalise, normalise_backward
from sbp_mmdet.ops.common.kept_maps import KeptMap
from sbp_mmdet.ops.common.shared_maps import Scope, share_map
from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.variants import load_config, with_variant
from sbp_mmdet.verify import comparison
from sbp_mmdet.verify.module_run import Run

PRESETS = 'exact', 'exact_min'


def run(model, *inputs):
    """Run a step, and return the output and all gradients by name."""
    out = model(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).mul(99).sin().view_as(out)
    (out * weights).sum().backward()
    return dict(out=out.detach()) | {name: p.grad for name, p in model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f'{n}: {text}')


class IgnoresResult(nn.Module):
    """Net that calls an in-place activation and ignores its result."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.act, self.out = nn.SiLU(inplace=True), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = self.norm(self.conv(x))
        self.act(x)
        return self.out(x)


class PreActivation(nn.Module):
    """Net whose first activation writes to the tensor that the shortcut adds."""

    def __init__(self, act=nn.LeakyReLU):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.body = nn.Sequential(act(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

    def forward(self, x):
        x = self.norm(self.stem(x))
        return x + self.body(x)


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('act', [nn.LeakyReLU, nn.SiLU, nn.ReLU6, nn.Hardswish, None])
def test_an_activation_that_works_in_place(act, preset):
    plain = (IgnoresResult() if act is None else PreActivation(act)).double().train()
    lean, x = copy.deepcopy(plain), torch.randn(2, 3, 12, 12).double()
    report = apply_lean(lean, preset)
    assert ('act' if act is None else 'body.0') in report.changed
    for _ in range(2):
        plain.zero_grad()
        lean.zero_grad()
        assert_equal(run(lean, x), run(plain, x))


def test_an_activation_that_works_in_place_later():
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.SiLU(), nn.Conv2d(8, 8, 3))).double().train()
    lean, x = copy.deepcopy(plain), torch.randn(2, 3, 12, 12).double()
    apply_lean(lean)
    for model in (plain, lean):
        model[1][0].inplace = True
    assert_equal(run(lean, x), run(plain, x))
    y = [torch.randn(2, 8, 5, 5).double()] * 2
    for model, z in zip((plain, lean), map(torch.clone, y), strict=True):
        model[1](z)
        torch.testing.assert_close(z, nn.functional.silu(y[0]))


class Hyper(nn.Module):
    """A layer one of whose weights is computed anew in each pass."""

    def __init__(self, layer, name, call):
        super().__init__()
        inner, _, self.key = name.rpartition('.')
        self.backbone, self.neck, self.inner, self.call = nn.Conv2d(8, 8, 1), layer, inner, call
        self.w = nn.Parameter(layer.get_submodule(inner)._parameters.pop(self.key).detach().clone())

    def forward(self, x, factor):
        setattr(self.neck.get_submodule(self.inner), self.key, self.w * factor)
        return self.call(self.neck, self.backbone(x))


def tokens(x):
    return x.flatten(2).transpose(1, 2)


HYPER = {
    'attention': lambda: (
        MultiheadAttention(8, 2, attn_drop=0.1, batch_first=True),
        'attn.in_proj_weight',
        lambda layer, x: layer(tokens(x)),
    ),
    'FFN': lambda: (FFN(8, 16, act_cfg=dict(type='Tanh')), 'layers.0.0.weight', lambda layer, x: layer(tokens(x))),
    'neck': lambda: (
        ChannelMapper([8], 8, kernel_size=3, norm_cfg=dict(type='BN'), num_outs=1, init_cfg=None),
        'convs.0.conv.weight',
        lambda layer, x: layer((x,))[0],
    ),
}


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('name', HYPER)
def test_weights_of_a_pass(name, preset):
    """Recomputation uses the weights of its own pass, not those of the latest one."""
    plain = Hyper(*HYPER[name]()).double().train()
    lean, inputs = copy.deepcopy(plain), torch.randn(2, 2, 8, 4, 4).double()
    apply_lean(lean, preset)
    for model in (plain, lean):
        model(inputs[0], 1.0)
        model.zero_grad()

    found = []
    for model in (lean, plain):
        torch.manual_seed(1)
        outs = model(inputs[0], 1.0), model(inputs[1], 2.0)
        weights = torch.linspace(-1, 1, outs[0].numel()).double().mul(99).sin().view_as(outs[0])
        sum((out * weights).sum() for out in outs).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    assert_equal(*found)


@pytest.mark.parametrize('when', ['before', 'after the first step'])
def test_bounds_of_relu6(when):
    layers = (ConvModule(c, 8, 3, norm_cfg=dict(type='BN'), act_cfg=dict(type='ReLU6')) for c in (3, 8))
    plain, x = nn.Sequential(*layers).double().train(), torch.randn(2, 3, 12, 12).double()

    def lower(model):
        for layer in model:
            layer.activate.max_val = 0.5

    if when == 'before':
        lower(plain)
    lean = copy.deepcopy(plain)
    apply_lean(lean)
    for model in (plain, lean):
        if when != 'before':
            run(model, x)
            lower(model)
            model.zero_grad()
    assert_equal(run(lean, x), run(plain, x))


class WithResidual(nn.Module):
    """A layer that gets its identity by a keyword."""

    def __init__(self, layer, more=None):
        super().__init__()
        self.layer, self.linear, self.more = layer, nn.Linear(8, 8), more or {}

    def forward(self, x, y, keyword):
        return self.layer(x, **{keyword: self.linear(y)}, **self.more)


SIZES = dict(spatial_shapes=torch.tensor([[2, 2], [1, 1]]), level_start_index=torch.tensor([0, 4]))
RESIDUAL = {
    'attention': lambda: (MultiheadAttention(8, 2, batch_first=True),),
    'FFN': lambda: (FFN(8, 16),),
    'deformable attention': lambda: (
        MultiScaleDeformableAttention(8, 2, 2, 2, dropout=0.0, batch_first=True),
        dict(SIZES, reference_points=torch.rand(2, 5, 2, 2).double()),
    ),
}


@pytest.mark.parametrize('name', RESIDUAL)
def test_arguments_by_a_former_name(name):
    """mmcv still takes ``residual=`` for ``identity=``."""
    plain = WithResidual(*RESIDUAL[name]()).double().train()
    lean, (x, y) = copy.deepcopy(plain), torch.randn(2, 2, 5, 8).double()
    apply_lean(lean)
    for keyword in ('identity', 'residual', 'identity'):
        plain.zero_grad()
        lean.zero_grad()
        assert_equal(run(lean, x, y, keyword), run(plain, x, y, keyword))


def test_keywords_that_a_layer_hands_on():
    attention = dict(embed_dims=16, num_heads=2, num_levels=2, num_points=2, dropout=0.0, batch_first=True)
    ffn = dict(embed_dims=16, feedforward_channels=32, ffn_drop=0.0)
    plain = nn.ModuleList([DeformableDetrTransformerEncoderLayer(attention, ffn_cfg=ffn)]).double().train()
    lean, (x, pos, identity) = copy.deepcopy(plain), torch.randn(3, 2, 5, 16).double()
    apply_lean(lean)
    given = dict(SIZES, reference_points=torch.rand(2, 5, 2, 2).double())
    for value in (identity, None):
        found, expected = (model[0](x, pos, None, **given, identity=value) for model in (lean, plain))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('more', [{}, dict(add_zero_attn=True), dict(add_bias_kv=True)], ids=str)
def test_images_without_keys(more):
    """Images whose keys are all masked give NaN, as in the module's own code, unless the attention adds keys."""
    plain = nn.ModuleList([MultiheadAttention(8, 2, batch_first=True, **more)]).double().train()
    lean, x = copy.deepcopy(plain), torch.randn(2, 5, 8).double()
    apply_lean(lean)
    mask = torch.tensor([[False] * 5, [True] * 5])
    found, expected = (model[0](x, key_padding_mask=mask) for model in (lean, plain))
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert expected[1].isnan().all() == (not more)


@pytest.mark.parametrize('eval_mode', [False, True])
@pytest.mark.parametrize('size', [1, 4])
def test_a_norm_of_another_size(size, eval_mode):
    """Plain raises an error, and so does a changed model; torch's kernels would read and write other memory."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(8, 8, 3)).train()
    model[1].train(not eval_mode)
    apply_lean(model)
    with pytest.raises(ValueError, match=f'BatchNorm2d of {size} channels follows a convolution of 8'):
        model(torch.randn(2, 3, 12, 12))


def two_uses_in_a_chain():
    model = ResNet(50, base_channels=8, norm_eval=False, init_cfg=None)
    blocks = model.layer2
    blocks[2].bn1, blocks[2].bn2 = blocks[1].bn1, blocks[1].bn2
    return model


def two_uses_in_a_csp_layer():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), CSPLayer(16, 16, 0.5, 2))
    model[1].blocks[1].conv1.bn = model[1].blocks[0].conv1.bn
    return model


@pytest.mark.parametrize('momentum', [None, 0.1])
@pytest.mark.parametrize('make', [two_uses_in_a_chain, two_uses_in_a_csp_layer])
def test_running_statistics_of_a_norm_that_is_used_twice(make, momentum):
    plain = make().double()
    plain.train()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    lean, x = copy.deepcopy(plain), torch.randn(2, 3, 32, 32).double()
    apply_lean(lean)
    for model in (plain, lean):
        for i in range(3):
            model(x * (i + 1))
    assert_equal(dict(lean.named_buffers()), dict(plain.named_buffers()))


def test_complex_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(torch.complex128).train()
    with pytest.raises(ValueError, match='its weight is complex'):
        apply_lean(model)


@pytest.mark.parametrize('qk_scale', [None, 1, True])
@pytest.mark.parametrize('kind', [nn.Parameter, torch.Tensor.requires_grad_])
def test_a_scale_that_becomes_a_tensor(kind, qk_scale):
    """The tensor is equal to the number, an integer too, and has a gradient."""
    sizes = dict(embed_dims=8, depths=(2, 2), num_heads=(2, 2), window_size=4, out_indices=(1,), strides=(4, 2))
    sizes |= dict(drop_path_rate=0.0, init_cfg=None, qk_scale=qk_scale)
    plain = nn.ModuleList([SwinTransformer(**sizes)]).double().train()
    lean, x = copy.deepcopy(plain), torch.randn(2, 3, 32, 32).double()
    apply_lean(lean)
    found = []
    for model in (lean, plain):
        model[0](x)[0].sum().backward()
        attention = model[0].stages[0].blocks[0].attn.w_msa
        scale = attention.scale
        del attention.scale
        attention.scale = kind(torch.tensor(float(scale)).double())
        model.zero_grad()
        (model[0](x)[0] ** 2).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()} | dict(scale=attention.scale.grad))
    assert found[0]['scale'] is not None
    assert_equal(*found)


@pytest.mark.parametrize('model', [None, 'detector', [nn.Sequential(nn.ReLU())]])
def test_what_is_no_model(model):
    for change in (apply_lean, remove_lean):
        with pytest.raises(TypeError, match=r'\A.*nn.Module is needed'):  # in one line
            change(model)


def test_a_fraction_as_keep_ratio():
    arch = dict(depths=[1] * 4, channels=[8] * 4)
    model = SBPConvNeXt(arch, sbp_cfg=dict(keep_ratio=Fraction(1, 2)))
    assert '0.5 of the positions' in str(apply_lean(model, 'sbp', keep_ratio=Fraction(1, 2)))


@needs_fp16
@pytest.mark.parametrize('factor', [1.0, 20.0])
def test_a_channel_without_gradient_in_fp16(factor):
    """A channel whose largest gradient is zero is not divided by it, whatever the factor of stochastic depth is."""
    c, d = 8, 16
    shapes = dict(norm_weight=(c,), norm_bias=(c,), weight1=(d, c), bias1=(d,), weight2=(c, d), bias2=(c,), gamma=(c,))
    weights = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    x = torch.randn(2, 12, c, dtype=torch.float16).requires_grad_()
    tensors = MLPTensors(x, x, **weights, factor=torch.tensor([factor, 0.0]))
    out = channel_mlp(MLPSettings(dtype=torch.float16), tensors)
    out.backward(torch.randn(out.shape).index_fill_(2, torch.tensor([3]), 0).to(out.dtype))
    assert all(p.grad.isfinite().all() for p in (x, *weights.values()))


def test_a_count_leaves_nothing_behind():
    """The planner's steps do no arithmetic; what operations keep from them must not be used afterwards."""
    rows = 2**18
    x, grad = torch.randn(2, rows, 8)
    config = load_config('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py')
    measure_detector(with_variant(config, 'exact'), batch=1, height=512, width=512, boxes=2)
    xhat, rstd = normalise(x, 1e-6, torch.float32)
    found = normalise_backward(grad, xhat, rstd, torch.float32)
    (expected,) = torch.autograd.grad(nn.functional.layer_norm(x.requires_grad_(), (8,), eps=1e-6), x, grad)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_an_infinite_gradient_hides_no_other():
    """Negligible gradients are measured by the largest finite one."""
    gradients = dict(a=torch.tensor([torch.inf]), b=torch.ones(3))
    expected = Run({}, gradients, None)
    lean = Run({}, gradients | dict(b=2 * torch.ones(3)), None)
    assert ('gradients', 'b') in comparison._find_differences(
        (expected, lean), lambda name: True, dict(outputs=1e-5, gradients=1e-3)
    )


def test_a_map_that_is_handed_on_and_written_to():
    """The saved form of an input may hold the input itself, which an activation in place overwrites."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    with Scope():
        inside = x * 1
        share_map(inside, KeptMap(inside))
        activate(ActivationSettings(Form(), Activation('silu'), inplace=True), ActivationTensors(inside))
        inside.sum().backward()
    (expected,) = torch.autograd.grad(nn.functional.silu(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize(('depth', 'hooked'), [(18, 'conv'), (18, 'norm'), (50, 'conv'), (50, 'norm'), (50, 'plugin')])
def test_a_hook_keeps_the_output_that_the_block_writes_to(depth, hooked, preset):
    """A block adds its shortcut to the output of its last layer in place, and so does its ReLU to the sum.

    Distillation reads features from such hooks after the forward pass.
    """
    last = 2 if depth == 18 else 3
    plugins = [dict(cfg=dict(type='ContextBlock', ratio=1 / 4), stages=(True,), position='after_conv3')]
    torch.manual_seed(0)
    plain = ResNet(
        depth,
        base_channels=4,
        num_stages=1,
        strides=(1,),
        dilations=(1,),
        out_indices=(0,),
        norm_eval=False,
        plugins=plugins if hooked == 'plugin' else None,
    )
    plain.double().train()
    changed = copy.deepcopy(plain)
    apply_lean(changed, preset, verify=False)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = []
    for model in (changed, plain):
        kept = []
        for block in model.layer1:
            name = block.after_conv3_plugin_names[0] if hooked == 'plugin' else f'{hooked}{last}'
            getattr(block, name).register_forward_hook(lambda module, args, out, kept=kept: kept.append(out))
        (out,) = model(images)
        (out.square().sum() + sum(features.pow(3).sum() for features in kept)).backward()
        found.append(dict(enumerate(kept)) | {name: p.grad for name, p in model.named_parameters()})
    assert_equal(*found)
