"""Operations of transformer detectors agree with mmcv's and mmdet's own layers in fp64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import count_stored_bytes
from mmcv.cnn.bricks.transformer import FFN
from mmcv.ops import MultiScaleDeformableAttention, multi_scale_deform_attn
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from oracles import DEVICE
from torch import nn

import sbp_mmdet.ops.deformable_attention as deformable_module
from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.common.shared_maps import Scope
from sbp_mmdet.ops.deformable_attention import DeformableSettings, DeformableTensors, deformable_attention
from sbp_mmdet.ops.deformable_encoder_layer import EncoderSettings, EncoderTensors, deformable_encoder_layer
from sbp_mmdet.ops.ffn import FFNSettings, FFNTensors, feed_forward
from sbp_mmdet.stochastic_backprop.masks import Positions

TOKENS = 42


def randomize(module, std=0.3, dtype=torch.float64):
    """Fill a module on ``DEVICE`` with weights that look trained: no zeros, and no norms that are identities."""
    for name, p in module.named_parameters():
        p.data.normal_(0, std / max(p.shape[-1], 1) ** 0.5 if p.dim() > 1 else 0.1)
        if 'norms' in name and name.endswith('weight'):
            p.data.add_(1)
    if hasattr(module, 'self_attn'):
        module.self_attn.sampling_offsets.bias.data.normal_(0, 2)
    return module.to(DEVICE, dtype).train()


def normal(*shape, dtype=torch.float64, requires_grad=True):
    return torch.randn(shape, dtype=dtype).to(DEVICE).requires_grad_(requires_grad)


def levels():
    sizes, starts = torch.tensor([[6, 5], [3, 3], [2, 1], [1, 1]]), torch.tensor([0, 30, 39, 41])
    return dict(spatial_shapes=sizes.to(DEVICE), level_start_index=starts.to(DEVICE))


def compute_gradients(run, leaves, seed=0, zeros=False):
    """Return output and gradients of all leaves. ``zeros``: leaves without a gradient have a gradient of zeros."""
    torch.manual_seed(seed)
    out = run()
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    leaves = {k: v for k, v in leaves.items() if v is not None and v.requires_grad}
    return [out, *torch.autograd.grad(out, list(leaves.values()), weight.to(out), materialize_grads=zeros)]


def assert_same(actual, expected, tolerance=1e-10):
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * max(b.abs().max(), 1)


def ffn_tensors(module, x):
    first, last = module.layers[0][0], module.layers[1]
    return FFNTensors(x, first.weight, first.bias, last.weight, last.bias)


@pytest.mark.parametrize('chunk', [None, 64, 1])
@pytest.mark.parametrize('act', ['ReLU', 'GELU'])
@pytest.mark.parametrize('frozen', ['', 'x', 'weights', 'all but bias2'])
def test_ffn(chunk, act, frozen):
    module = randomize(FFN(8, 32, act_cfg=dict(type=act), add_identity=False))
    x = normal(2, 5, 8, requires_grad='x' not in frozen)
    module.requires_grad_(frozen != 'weights' and 'all' not in frozen)
    if 'all' in frozen:
        x.requires_grad_(False)
        module.layers[1].bias.requires_grad_()
    leaves = dict(module.named_parameters(), x=x)
    settings = FFNSettings(activation=Activation(act.lower()), chunk=chunk)
    gradients = compute_gradients(lambda: feed_forward(settings, ffn_tensors(module, x)), leaves)
    assert_same(gradients, compute_gradients(lambda: module(x), leaves))


@pytest.mark.parametrize('rates', [(0.1, 0.3), (0.5, 0.0), (0.0, 0.5)])
def test_ffn_draws_dropout_as_torch_does_and_replays_it(rates):
    module = randomize(FFN(8, 32, add_identity=False))
    module.layers[0][2].p, module.layers[2].p = rates
    x = normal(2, 5, 8)
    leaves = dict(module.named_parameters(), x=x)
    settings = FFNSettings(dropout=rates)
    gradients = compute_gradients(lambda: feed_forward(settings, ffn_tensors(module, x)), leaves)
    assert_same(gradients, compute_gradients(lambda: module(x), leaves))


def test_dropout_in_chunks_replays_its_masks_and_leaves_the_generator_alone():
    module = randomize(FFN(8, 32, add_identity=False))
    x = normal(2, 5, 8)
    settings = FFNSettings(dropout=(0.5, 0.5), chunk=1)
    out = feed_forward(settings, ffn_tensors(module, x))
    before = generator_states()
    out.sum().backward()
    assert all(map(torch.equal, before, generator_states()))


def generator_states():
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def test_replayed_masks_are_those_of_the_forward_pass():
    """A dropped number has no gradient; the gradient of the last bias counts the others."""
    module = randomize(FFN(8, 32, add_identity=False))
    x = normal(2, 5, 8)
    out = feed_forward(FFNSettings(dropout=(0.5, 0.5), chunk=64), ffn_tensors(module, x))
    (gradient,) = torch.autograd.grad(out.sum(), module.layers[1].bias)
    assert torch.equal(gradient, (out != 0).double().sum((0, 1)) / 0.5)


@pytest.mark.parametrize('chunk', [None, 64])
def test_masks_are_replayed_whatever_the_strides_of_the_gradient_are(chunk):
    module = randomize(FFN(8, 32, add_identity=False))
    x = normal(2, 5, 8)
    out = feed_forward(FFNSettings(dropout=(0.0, 0.5), chunk=chunk), ffn_tensors(module, x))
    for weight in (torch.ones(2, 8, 5).mT, torch.ones(8, 5, 2).permute(2, 1, 0), torch.ones(1, 1, 1).expand(2, 5, 8)):
        (gradient,) = torch.autograd.grad(out, module.layers[1].bias, weight.to(out), retain_graph=True)
        assert torch.equal(gradient, (out != 0).double().sum((0, 1)) / 0.5)


def test_no_images():
    """With a batch of no images, the gradients of parameters are zero."""
    module, x, reference = layer(0.2), normal(0, TOKENS, 16), normal(0, TOKENS, 4, 2)
    leaves = dict(module.named_parameters(), x=x, reference=reference)
    given = DeformableTensors(x, None, x, reference, None, **levels(), **attention_weights(module.self_attn))

    for run in (
        lambda: deformable_encoder_layer(settings_of(0.2), layer_tensors(module, x, None, reference, None)),
        lambda: feed_forward(FFNSettings(), ffn_tensors(module.ffn, x)),
        lambda: deformable_attention(DeformableSettings(2, 4, 4), given),
    ):
        out, *grads = compute_gradients(run, leaves, zeros=True)
        assert out.shape == x.shape
        for gradient, leaf in zip(grads, leaves.values(), strict=True):
            assert torch.equal(gradient, torch.zeros_like(leaf))


def attention_weights(module):
    weights = {}
    for name, layer in (
        ('offset', module.sampling_offsets),
        ('attention', module.attention_weights),
        ('value', module.value_proj),
        ('output', module.output_proj),
    ):
        weights |= {f'{name}_weight': layer.weight, f'{name}_bias': layer.bias}
    return weights


def places(numbers, queries, dtype=torch.float64):
    return torch.rand(2, queries, 4, numbers, dtype=dtype).to(DEVICE).requires_grad_()


def padding(on):
    return (torch.arange(TOKENS) % 7 == torch.tensor([[3], [5]])).to(DEVICE) if on else None


@pytest.mark.parametrize('numbers', [2, 4])
@pytest.mark.parametrize('mask', [False, True])
@pytest.mark.parametrize('own_values', [False, True])
@pytest.mark.parametrize('threads', [1, 3])
def test_deformable_attention(numbers, mask, own_values, threads, monkeypatch):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)  # so many of the four heads at a time
    module = randomize(MultiScaleDeformableAttention(16, 4, dropout=0.0, batch_first=True))
    module.sampling_offsets.bias.data.normal_(0, 2)
    x, pos = (normal(2, 7 if own_values else TOKENS, 16) for _ in range(2))
    value, reference = normal(2, TOKENS, 16) if own_values else None, places(numbers, x.shape[1])
    leaves = dict(module.named_parameters(), x=x, pos=pos, value=value, reference=reference)
    given = dict(levels(), key_padding_mask=padding(mask))

    def run():
        tensors = DeformableTensors(
            x, pos, x if value is None else value, reference, **given, **attention_weights(module)
        )
        return x + deformable_attention(DeformableSettings(4, 4, 4), tensors)

    def stock():
        return module(x, value=value, query_pos=pos, reference_points=reference, **given)

    assert_same(compute_gradients(run, leaves), compute_gradients(stock, leaves))


def layer(dropout=0.0, act='ReLU', channels=16, dtype=torch.float64, hidden=32):
    attention = dict(embed_dims=channels, num_heads=2, num_levels=4, dropout=dropout, batch_first=True)
    ffn = dict(embed_dims=channels, feedforward_channels=hidden, ffn_drop=dropout, act_cfg=dict(type=act))
    return randomize(DeformableDetrTransformerEncoderLayer(attention, ffn), dtype=dtype)


def layer_tensors(module, x, pos, reference, mask):
    norms = {
        f'norm{i}_{kind}': getattr(norm, kind) for i, norm in enumerate(module.norms, 1) for kind in ('weight', 'bias')
    }
    feed = ffn_tensors(module.ffn, None)._asdict()
    del feed['x']
    return EncoderTensors(x, pos, reference, mask, **levels(), **attention_weights(module.self_attn), **norms, **feed)


def settings_of(dropout=0.0, act='relu', chunk=None, storage='native'):
    ffn = FFNSettings(activation=Activation(act), dropout=(dropout, dropout), chunk=chunk)
    return EncoderSettings(DeformableSettings(2, 4, 4, Form(storage=storage)), ffn, dropout)


@pytest.mark.parametrize('numbers', [2, 4])
@pytest.mark.parametrize('mask', [False, True])
@pytest.mark.parametrize(
    'options',
    [{}, dict(chunk=100), dict(act='gelu'), dict(dropout=0.2), dict(images=1)],
    ids=['', 'chunks', 'gelu', 'dropout', 'images'],
)
def test_two_encoder_layers(numbers, mask, options, monkeypatch):
    """The second layer reads its input from the tensor that the first one saved."""
    if 'images' in options:  # one at a time
        monkeypatch.setattr(deformable_module, '_AT_A_TIME', 1)
    rate, act = options.get('dropout', 0.0), options.get('act', 'relu')
    modules = nn.ModuleList(layer(rate, dict(relu='ReLU', gelu='GELU')[act]) for _ in range(2))
    x, pos = (normal(2, TOKENS, 16) for _ in range(2))
    reference, mask = places(numbers, TOKENS), padding(mask)
    leaves = dict(modules.named_parameters(), x=x, pos=pos, reference=reference)

    def run(out=x):
        for module in modules:
            tensors = layer_tensors(module, out, pos, reference, mask)
            out = deformable_encoder_layer(settings_of(rate, act, options.get('chunk')), tensors)
        return out

    def stock(out=x):
        given = dict(levels(), reference_points=reference)
        for module in modules:
            out = module(out, pos, mask, **given)
        return out

    assert_same(compute_gradients(run, leaves), compute_gradients(stock, leaves))


def run_thinned_oracle(module, x, pos, given, kept, rate):
    """Run Algorithm 1 in plain autograd: both branches backpropagate through the kept tokens.

    Dropout is drawn for the kept tokens of the first image, then for those of the second, then for the others.
    """
    attention, ffn = module.self_attn, module.ffn.layers
    factors = [x.new_ones(2, TOKENS, width) for width in (16, 32, 16)]
    for index in (kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]):
        for image in range(2) if rate else ():
            for factor in factors:
                factor[image, index] = F.dropout(torch.ones_like(factor[image, index]), rate)

    def of_kept(out):
        return torch.where(kept[:, None], out, out.detach())

    out = attention(x, query_pos=pos, identity=torch.zeros_like(x), **given) * factors[0]
    y = module.norms[0](x + of_kept(out))
    hidden = ffn[0][1](ffn[0][0](y)) * factors[1]
    return module.norms[1](y + of_kept(ffn[1](hidden) * factors[2]))


@pytest.mark.parametrize('numbers, mask', [(2, False), (4, True)])
@pytest.mark.parametrize(
    'number, rate, chunk', [(0, 0.0, None), (12, 0.0, None), (12, 0.0, 100), (21, 0.2, 21 * 32), (TOKENS, 0.0, None)]
)
def test_dropped_tokens_send_nothing(numbers, mask, number, rate, chunk):
    module = layer(rate)
    x, pos = (normal(2, TOKENS, 16) for _ in range(2))
    reference = places(numbers, TOKENS)
    leaves = dict(module.named_parameters(), x=x, pos=pos, reference=reference)
    kept = (torch.randperm(TOKENS) < number).to(DEVICE)
    positions = Positions(*(mask.nonzero()[:, 0] for mask in (kept, ~kept)))
    tensors = layer_tensors(module, x, pos, reference, padding(mask))._replace(positions=positions)
    gradients = compute_gradients(lambda: deformable_encoder_layer(settings_of(rate, chunk=chunk), tensors), leaves)
    given = dict(levels(), reference_points=reference)
    module.self_attn.dropout.p = 0.0  # the factors stand for it
    given['key_padding_mask'] = padding(mask)
    assert_same(
        gradients, compute_gradients(lambda: run_thinned_oracle(module, x, pos, given, kept, rate), leaves, zeros=True)
    )


@pytest.mark.parametrize('frozen', ['x', 'norms', 'self_attn', 'ffn', 'pos'])
def test_frozen_parts(frozen):
    module = layer()
    for name, p in module.named_parameters():
        p.requires_grad_(frozen not in name)
    x, pos = (normal(2, TOKENS, 16, requires_grad=name != frozen) for name in ('x', 'pos'))
    reference = places(2, TOKENS).detach()
    leaves = dict(module.named_parameters(), x=x, pos=pos)
    tensors = layer_tensors(module, x, pos, reference, None)
    given = dict(levels(), reference_points=reference)
    gradients = compute_gradients(lambda: deformable_encoder_layer(settings_of(), tensors), leaves)
    assert_same(gradients, compute_gradients(lambda: module(x, pos, None, **given), leaves))


@pytest.mark.parametrize('storage, share', [('native', 0.13), ('int8', 0.07)])
def test_stored_bytes_beside_cuda(storage, share):
    """An inner layer reads its input from the tensor that the layer before saved.

    CUDA's plain layer stores input, query, values, places, half as many weights, the kernel's output, two sums, y and
    eight maps of hidden numbers.
    """
    modules = [layer(channels=32, hidden=256, dtype=torch.float32) for _ in range(3)]
    for module in modules:  # as many numbers of places as channels in the models that people train
        assert module.self_attn.sampling_offsets.out_features == 64
    x, pos = (normal(2, TOKENS, 32, dtype=torch.float32, requires_grad=False) for _ in range(2))
    reference = places(2, TOKENS, torch.float32).detach()
    parameters = [p for module in modules for p in module.parameters()]

    def run(number, out=x):
        with Scope():  # as within the encoder
            for module in modules[:number]:
                tensors = layer_tensors(module, out, pos, reference, None)
                out = deformable_encoder_layer(settings_of(storage=storage), tensors)
        return out

    counts = [count_stored_bytes(lambda n=n: run(n), parameters) for n in (2, 3)]
    plain = 16.5 * x.numel() * 4
    assert counts[1] - counts[0] <= share * plain


def test_eight_bits():
    """The layer has weights as after training; the gradient of each parameter is compared with that in fp32."""
    module = layer(channels=32, hidden=256, dtype=torch.float32)
    x, pos = (normal(2, TOKENS, 32, dtype=torch.float32) for _ in range(2))
    leaves = dict(module.named_parameters(), x=x, pos=pos)
    tensors = layer_tensors(module, x, pos, places(2, TOKENS, torch.float32).detach(), None)
    results = [
        compute_gradients(lambda s=s: deformable_encoder_layer(settings_of(storage=s), tensors), leaves)
        for s in ('native', 'int8')
    ]
    assert torch.equal(results[0][0], results[1][0])
    for exact, found in zip(*results, strict=True):
        assert (found - exact).norm() <= 0.01 * exact.norm()


def test_nothing_is_read_from_what_was_written_to():
    modules = [layer(), layer()]
    x, pos = (normal(2, TOKENS, 16) for _ in range(2))
    reference = places(2, TOKENS).detach()
    given = dict(levels(), reference_points=reference)

    def run(lean):
        first, second = modules
        out = (
            deformable_encoder_layer(settings_of(), layer_tensors(first, x, pos, reference, None))
            if lean
            else first(x, pos, None, **given)
        )
        out.mul_(2)
        return (
            deformable_encoder_layer(settings_of(), layer_tensors(second, out, pos, reference, None))
            if lean
            else second(out, pos, None, **given)
        )

    leaves = dict(x=x, pos=pos, **copy.copy(dict(modules[0].named_parameters())))
    assert_same(compute_gradients(lambda: run(True), leaves), compute_gradients(lambda: run(False), leaves))


class Kernel:
    """Replacement of mmcv's compiled module, with the same signatures and torch's own operations."""

    def __init__(self):
        self.calls = []

    def ms_deform_attn_forward(self, value, shapes, starts, places, weights, im2col_step):
        self.calls.append('forward')
        self._check(value, shapes, starts, places, weights)
        return multi_scale_deform_attn.multi_scale_deformable_attn_pytorch(value, shapes, places, weights)

    def ms_deform_attn_backward(self, value, shapes, starts, places, weights, grad, *grads, im2col_step):
        self.calls.append('backward')
        self._check(value, shapes, starts, places, weights, grad)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (value, places, weights)]
            out = multi_scale_deform_attn.multi_scale_deformable_attn_pytorch(leaves[0], shapes, *leaves[1:])
        for place, gradients in zip(grads, torch.autograd.grad(out, leaves, grad), strict=True):
            place.copy_(gradients)

    @staticmethod
    def _check(*tensors):
        assert all(t.is_contiguous() for t in tensors)
        assert len({t.dtype for t in tensors if t.is_floating_point()}) == 1


def test_the_kernel_of_cuda_is_called_once_in_each_pass(monkeypatch):
    kernel, module = Kernel(), layer()
    x, pos = (normal(2, TOKENS, 16) for _ in range(2))
    reference = places(2, TOKENS)
    leaves = dict(module.named_parameters(), x=x, pos=pos, reference=reference)

    def run():
        return deformable_encoder_layer(settings_of(), layer_tensors(module, x, pos, reference, padding(True)))

    expected = compute_gradients(run, leaves)
    monkeypatch.setattr(multi_scale_deform_attn, 'ext_module', kernel)
    monkeypatch.setattr(deformable_module, 'has_kernel', lambda value: True)
    assert_same(compute_gradients(run, leaves), expected)
    assert kernel.calls == ['forward', 'backward']
