"""Small models for the tests of verification."""

import copy

import torch
from cases import build
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import ResNet
from mmdet.models.layers import CSPLayer, DeformableDetrTransformerEncoder
from mmdet.models.utils.vlfuse_helper import SingleScaleBiAttentionBlock
from mmengine.logging import MMLogger
from oracles import random_images
from test_adapters_outside import Block, Blocks
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters import LeanModule


def resnet(depth=18, **options):
    """Return a ResNet of a stage with one block and a stage with two or three, of which the first halves the map."""
    torch.manual_seed(1)
    stages = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
    model = ResNet(depth, base_channels=8, **stages, **options)
    del model.layer1[1:], model.layer2[3:]
    model.train()
    return model


# As few blocks as have all operations: a downsampling layer and, of Swin, a block with shifted windows.
CONVNEXT = dict(arch=dict(depths=[1, 1], channels=[8, 12]), out_indices=[0, 1])
SWIN = dict(depths=(1, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1))


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
    """Model that feeds an encoder of one level with an image."""

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
    """A model of deformable attention alone."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(MultiScaleDeformableAttention(16, 2, num_levels=1, dropout=0.0, batch_first=True))

    padded = None

    def forward(self, x):
        x = self.patches(x)
        n, _, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        points = torch.rand(n, h * w, 1, 2, generator=torch.Generator().manual_seed(0))
        sizes = dict(spatial_shapes=torch.tensor([[h, w]]), level_start_index=torch.tensor([0]))
        return (self.encoder(tokens, reference_points=points, key_padding_mask=self.padded, **sizes),)


class Fused(Tokens):
    """A model that fuses an image with a text."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(SingleScaleBiAttentionBlock(16, 16, 32, 4))

    def forward(self, x):
        image = self.patches(x).flatten(2).transpose(1, 2)
        text = torch.randn(len(x), 7, 16, generator=torch.Generator().manual_seed(0))
        hidden = torch.tensor([[1, 1, 1, 0, 0, 1, 1]]).expand(len(x), -1)
        return self.encoder(image, text, attention_mask_l=hidden)


class OnTokens(Tokens):
    """Model that applies a module to tokens or to a map."""

    def __init__(self, encoder, as_map=False):
        super().__init__(encoder)
        self.as_map = as_map

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        return (self.encoder(x if self.as_map else x.flatten(1, 2)),)


def ffn(dropout=0.0):
    torch.manual_seed(1)
    return OnTokens(FFN(16, 32, act_cfg=dict(type='GELU'), ffn_drop=dropout))


def padded_attention():
    model = Attends()
    model.padded = torch.zeros(2, 96, dtype=torch.bool)
    model.padded[1, 40:] = True
    return model


def conv_modules():
    torch.manual_seed(1)
    options = dict(padding=1, norm_cfg=dict(type='GN', num_groups=4), act_cfg=dict(type='SiLU'))
    return nn.Sequential(*(nn.Sequential(ConvModule(n, 16, 3, **options)) for n in (3, 16)), InTuple())


def biased_conv_modules():
    torch.manual_seed(1)
    options = dict(padding=1, bias=True, norm_cfg=dict(type='BN'), act_cfg=dict(type='ReLU6'))
    return nn.Sequential(ConvModule(3, 16, 3, **options), ConvModule(16, 16, 3, **options), InTuple())


def csp_layer(**options):
    torch.manual_seed(1)
    options = dict(dict(use_cspnext_block=True, channel_attention=True, act_cfg=dict(type='SiLU')), **options)
    layer = CSPLayer(16, 16, num_blocks=2, **options)
    return nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), layer, InTuple())


class InTuple(nn.Module):
    """Module that returns its input in a tuple, as a backbone returns its maps."""

    def forward(self, x):
        return (x,)


def shrink_variances(model):
    model.layer2[1].bn1.running_var.fill_(1e-4)
    return model


MODELS = {
    'ConvNeXt': lambda: build('stock ConvNeXt', **CONVNEXT),
    'ConvNeXt V2': lambda: build('stock ConvNeXt', use_grn=True, layer_scale_init_value=0.0),
    'Swin': lambda: build('stock Swin', **SWIN),
    'ViT': lambda: build('stock ViT'),
    'ViTDet': lambda: OnTokens(Blocks(Block(drop_path=0.0, window=3, size=(8, 8))), as_map=True),
    'ResNet': resnet,
    'ResNet in training mode': lambda: resnet(norm_eval=False),
    'ResNet with group norm': lambda: resnet(norm_cfg=dict(type='GN', num_groups=4)),
    'ResNet with small variances': lambda: shrink_variances(resnet()),
    'ResNet-50': lambda: resnet(50),
    'ResNet-50 in training mode': lambda: resnet(50, norm_eval=False),
    'ConvModules': conv_modules,
    'ConvModules with biases in front of batch norms': biased_conv_modules,
    'CSP layer': csp_layer,
    'CSP layer with LeakyReLU': lambda: csp_layer(act_cfg=dict(type='LeakyReLU')),
    'encoder': encoder,
    'encoder with dropout': lambda: encoder(0.1),
    'attention': Attends,
    'padded attention': padded_attention,
    'FFN': ffn,
    'FFN with dropout': lambda: ffn(0.1),
    'fusion': Fused,
}


def apply_and_get_log(model, caplog, amp=None, **keys):
    """Apply a preset and run one step; return the report and the log records of the verification."""
    logger = MMLogger.get_current_instance()
    monitored = [*logger.handlers]
    logger.addHandler(caplog.handler)
    try:
        report = apply_lean(model, **keys)
        with torch.autocast('cpu', amp or torch.bfloat16, enabled=amp is not None):
            outs = model(random_images(2, 64, 96, dtype=torch.float32))
        sum(out.float().square().mean() for out in outs).backward()
    finally:
        logger.handlers[:] = monitored
    return report, [r for r in caplog.records if 'verif' in r.message or 'disagrees' in r.message]


def build_in_training(name):
    """Build a model of ``MODELS`` in fp32 and training mode."""
    model = MODELS[name]().float()
    model.train()
    return model


def assert_fallback(name, caplog, **keys):
    model = build_in_training(name)
    plain = copy.deepcopy(model)
    report, records = apply_and_get_log(model, caplog, **keys)
    assert_plain_training(model, plain, report, records)


def assert_plain_training(model, plain, report, records, tolerance=2e-3):
    """Assert that a warning has figures, that failed modules run their own code, and that all gradients are exact."""
    assert any(r.levelname == 'WARNING' and 'off' in r.message for r in records)
    failed = [name for name, reason in report.left.items() if 'verification' in reason]
    assert failed and not set(failed) & set(report.changed)
    assert not any(isinstance(model.get_submodule(name), LeanModule) for name in failed)
    plain.load_state_dict(model.state_dict())
    actual, expected = get_gradients(model), get_gradients(plain)
    for name, grad in expected.items():
        assert grad is None or (actual[name] - grad).norm() <= tolerance * grad.norm().clamp_min(1e-3), name


def get_gradients(model):
    torch.manual_seed(5)
    outs = model(random_images(2, 64, 96, dtype=torch.float32))
    loss = sum(out.float().square().mean() for out in outs)
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, [*wanted.values()], allow_unused=True), strict=True))
