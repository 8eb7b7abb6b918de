"""Verification: planted faults are found and fall back, and a training with it is bit for bit the one without."""

import contextlib
import copy

import pytest
import torch
from cases import build
from helpers import ROOT
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import ResNet
from mmdet.models.layers import DeformableDetrTransformerEncoder
from mmengine.logging import MMLogger
from oracles import image

from sbp_mmdet import LeanHook, apply_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.ops import (
    attention,
    channel_mlp,
    conv_norm_act,
    deformable_attention,
    deformable_encoder_layer,
    downsample,
    layer_norm,
    window_attention,
)
from sbp_mmdet.ops.common.autograd_function import Operation
from sbp_mmdet.plan.command import main

VERIFIES = True


def resnet(**options):
    torch.manual_seed(1)
    model = ResNet(18, base_channels=8, **options)
    model.train()
    return model


def grn():
    return build('stock ConvNeXt', use_grn=True, layer_scale_init_value=0.0)


def encoder(dropout=0.0):
    torch.manual_seed(1)
    layer = dict(
        self_attn_cfg=dict(embed_dims=16, num_heads=2, num_levels=1, dropout=dropout, batch_first=True),
        ffn_cfg=dict(embed_dims=16, feedforward_channels=32, num_fcs=2, ffn_drop=dropout),
    )
    model = Tokens(DeformableDetrTransformerEncoder(num_layers=1, layer_cfg=layer))
    with torch.no_grad():  # as made, offsets are whole pixels, where interpolation has kinks
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    return model


class Tokens(torch.nn.Module):
    """Feeds an encoder of one level from an image."""

    def __init__(self, encoder):
        super().__init__()
        self.patches, self.encoder = torch.nn.Conv2d(3, 16, 8, stride=8), encoder

    def forward(self, x):
        x = self.patches(x)
        n, _, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        sizes = torch.tensor([[h, w]])
        padded = torch.zeros(n, h * w, dtype=torch.bool)
        ratios = x.new_ones(n, 1, 2)
        return (self.encoder(tokens, 0.1 * tokens.detach(), padded, sizes, torch.tensor([0]), ratios),)


class Attends(Tokens):
    """Deformable attention alone."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(MultiScaleDeformableAttention(16, 2, num_levels=1, dropout=0.0, batch_first=True))

    def forward(self, x):
        x = self.patches(x)
        n, _, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        points = torch.rand(n, h * w, 1, 2, generator=torch.Generator().manual_seed(0))
        sizes = dict(spatial_shapes=torch.tensor([[h, w]]), level_start_index=torch.tensor([0]))
        return (self.encoder(tokens, reference_points=points, **sizes),)


MODELS = {
    'ConvNeXt': lambda: build('stock ConvNeXt'),
    'Swin': lambda: build('stock Swin'),
    'ViT': lambda: build('stock ViT'),
    'ResNet': resnet,
    'ResNet in training mode': lambda: resnet(norm_eval=False),
    'ResNet with group norm': lambda: resnet(norm_cfg=dict(type='GN', num_groups=4)),
    'encoder': encoder,
    'encoder with dropout': lambda: encoder(0.1),
    'attention': Attends,
}
# Operation, and a model that runs it.
OPERATIONS = {
    'MLP of ConvNeXt': (channel_mlp, 'ConvNeXt'),
    'MLP of ViT': (channel_mlp, 'ViT'),
    'downsample': (downsample, 'Swin'),
    'attention': (attention, 'ViT'),
    'window attention': (window_attention, 'Swin'),
    'layer norm': (layer_norm, 'Swin'),
    'conv, norm, act': (conv_norm_act, 'ResNet'),
    'with batch statistics': (conv_norm_act, 'ResNet in training mode'),
    'with group norm': (conv_norm_act, 'ResNet with group norm'),
    'deformable attention': (deformable_attention, 'attention'),
    'encoder layer': (deformable_encoder_layer, 'encoder'),
}


def operation_in(module):
    return next(value for value in vars(module).values() if isinstance(value, Operation))


def said(model, caplog, steps=1, **keys):
    logger = MMLogger.get_current_instance()
    monitored = [*logger.handlers]
    logger.addHandler(caplog.handler)
    try:
        report = apply_lean(model, **keys)
        for _ in range(steps):
            outs = model(image(2, 64, 64, dtype=torch.float32))
            sum(out.float().square().mean() for out in outs).backward()
    finally:
        logger.handlers[:] = monitored
    return report, [r for r in caplog.records if 'verif' in r.message or 'disagrees' in r.message]


def trained(name):
    model = MODELS[name]().float()
    model.train()
    return model


@pytest.mark.parametrize('name', MODELS)
def test_no_false_alarm(name, caplog):
    _, records = said(trained(name), caplog)
    assert [r.levelname for r in records] == ['INFO']
    assert 'against their own code' in records[0].message and 'not be compared' not in records[0].message


def faulty_forward(operation, monkeypatch):
    original = operation.forward

    def forward(*args):
        out, saved = original(*args)
        return out * 1.1, saved

    monkeypatch.setattr(operation, 'forward', forward)


def faulty_gradient(operation, monkeypatch, number):
    original = operation.backward

    def backward(*args):
        found = [*original(*args)]
        found[number] = None if found[number] is None else found[number] * 1.2
        return operation.gradients(*found)

    monkeypatch.setattr(operation, 'backward', backward)


def is_plain(model, names):
    return not any(isinstance(model.get_submodule(name), LeanModule) for name in names)


@pytest.mark.parametrize('case', OPERATIONS)
def test_a_fault_in_the_forward_pass(case, monkeypatch, caplog):
    module, name = OPERATIONS[case]
    faulty_forward(operation_in(module), monkeypatch)
    check_fallback(name, caplog)


FIELDS = [
    (case, i, field)
    for case, (module, _) in OPERATIONS.items()
    for i, field in enumerate(operation_in(module).gradients._fields)
    if field not in ('factor', 'residual')
]


@pytest.mark.parametrize(('case', 'number'), [f[:2] for f in FIELDS], ids=[f'{f[0]}-{f[2]}' for f in FIELDS])
def test_a_fault_in_a_gradient(case, number, monkeypatch, caplog):
    module, name = OPERATIONS[case]
    operation = operation_in(module)
    original, seen = operation.backward, []

    def backward(*args):
        found = [*original(*args)]
        if args[3][number] and float(found[number].abs().max()):
            seen.append(1)
            found[number] = found[number] * 1.2
        return operation.gradients(*found)

    monkeypatch.setattr(operation, 'backward', backward)
    model = trained(name)
    report, records = said(model, caplog)
    if not seen:
        pytest.skip('this model does not ask for it')
    check_plain(name, model, report, records)


def check_fallback(name, caplog, **keys):
    model = trained(name)
    report, records = said(model, caplog, **keys)
    check_plain(name, model, report, records)


def check_plain(name, model, report, records):
    """A warning, and from then on the plain model's gradients."""
    assert any(r.levelname == 'WARNING' and 'off' in r.message for r in records)
    failed = [n for n, reason in report.left.items() if 'verification' in reason]
    assert failed and is_plain(model, failed) and not set(failed) & set(report.changed)


def test_a_fault_that_raises(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError('no kernel image')

    monkeypatch.setattr(operation_in(layer_norm), 'forward', broken)
    model = trained('Swin')
    report, records = said(model, caplog)
    assert any('no kernel image' in r.message for r in records if r.levelname == 'WARNING')
    assert is_plain(model, [n for n, reason in report.left.items() if 'no kernel image' in reason])


def test_raise_stops(monkeypatch):
    faulty_forward(operation_in(layer_norm), monkeypatch)
    model = trained('Swin')
    apply_lean(model, verify='raise')
    with pytest.raises(RuntimeError, match="verify='raise'.*patch_embed.*modules="):
        model(image(2, 64, 64, dtype=torch.float32))


def test_a_dropout_mask_that_is_not_the_forward_passes(monkeypatch, caplog):
    """Chunk by chunk the draws are no longer the plain module's: the derivative of the forward pass tells."""
    monkeypatch.setattr(deformable_encoder_layer, 'replayed', lambda device, state: contextlib.nullcontext())
    check_fallback('encoder with dropout', caplog)


@pytest.mark.parametrize('preset', ['exact', 'int8', 'sampled', 'sbp'])
@pytest.mark.parametrize('name', ['ConvNeXt', 'Swin', 'ViT'])
@pytest.mark.parametrize('amp', [False, True], ids=['fp32', 'bf16'])
def test_training_is_bit_for_bit_that_without(name, preset, amp):
    found = []
    for verify in (False, 'raise'):
        torch.manual_seed(3)
        model = trained(name)
        kept = []
        next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d)).register_forward_hook(
            lambda module, args, out, kept=kept: kept.append(out.shape)
        )
        apply_lean(model, preset, verify=verify)
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(4):
            with torch.autocast('cpu', torch.bfloat16, enabled=amp):
                outs = model(image(2, 64, 64, dtype=torch.float32, seed=step))
            sum(out.float().square().mean() for out in outs).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                for a, b in zip(average.parameters(), model.parameters(), strict=True):
                    a.data.lerp_(b.data, 0.1)
        found.append(
            [*model.state_dict().values(), *average.state_dict().values(), torch.rand(3), torch.tensor(len(kept))]
        )
    for plain, verified in zip(*found, strict=True):
        assert torch.equal(plain, verified)


@pytest.mark.parametrize('value', ['yes', 2, None])
def test_another_value_is_refused(value):
    with pytest.raises(ValueError, match=f'verify={value!r}.*raise'):
        LeanHook(verify=value)


@pytest.mark.parametrize('broken', [False, True])
def test_the_command(broken, monkeypatch, capsys):
    """A table by kind; status 1 where one disagrees."""
    if broken:
        faulty_forward(operation_in(conv_norm_act), monkeypatch)
    config = ROOT / 'configs/sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
    options = ['verify', str(config), '--batch', '1', '--size', '64x64']
    with pytest.raises(SystemExit, match='1') if broken else contextlib.nullcontext():
        main(options)
    out = capsys.readouterr().out
    assert 'against their own code' in out and ('off' in out.split('verified')[0]) == broken
