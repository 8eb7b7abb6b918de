"""Weight files in public layouts load into the backbones, and missing weights are reported."""

import logging
import sys

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.runner.checkpoint import load_checkpoint
from torch import nn

from sbp_mmdet import SBPConvNeXt, SBPViT
from sbp_mmdet.models.weights import rename_weights

ARCH = dict(depths=[1, 1, 2, 1], channels=[4, 8, 16, 32])
# What the four layouts call: stem; layer into stage i; block j of stage i; its parts; last norm; classifier; GRN.
PLACES = ('stem', 'down', 'block', 'parts', 'last', 'head', 'grn')
NAMES = {
    'original': (
        'downsample_layers.0.{k}',
        'downsample_layers.{i}.{k}',
        'stages.{i}.{j}.',
        ('dwconv', 'norm', 'pwconv1', 'pwconv2', 'gamma'),
        *('norm', 'head', ('grn.gamma', 'grn.beta')),
    ),
    'timm': (
        'stem.{k}',
        'stages.{i}.downsample.{k}',
        'stages.{i}.blocks.{j}.',
        ('conv_dw', 'norm', 'mlp.fc1', 'mlp.fc2', 'gamma'),
        *('head.norm', 'head.fc', ('mlp.grn.weight', 'mlp.grn.bias')),
    ),
    'Hugging Face': (
        ('convnext.embeddings.patch_embeddings', 'convnext.embeddings.layernorm'),
        'convnext.encoder.stages.{i}.downsampling_layer.{k}',
        'convnext.encoder.stages.{i}.layers.{j}.',
        ('dwconv', 'layernorm', 'pwconv1', 'pwconv2', 'layer_scale_parameter'),
        *('convnext.layernorm', 'classifier', ('grn.weight', 'grn.bias')),
    ),
    'Hugging Face, DINOv3': (
        'stages.0.downsample_layers.{k}',
        'stages.{i}.downsample_layers.{k}',
        'stages.{i}.layers.{j}.',
        ('depthwise_conv', 'layer_norm', 'pointwise_conv1', 'pointwise_conv2', 'gamma'),
        *('layer_norm', 'head', ('grn.weight', 'grn.bias')),
    ),
}
NAMES = {layout: dict(zip(PLACES, names, strict=True)) for layout, names in NAMES.items()}


def build_backbone(**options) -> SBPConvNeXt:
    """Return a backbone with random values in all parameters."""
    model = SBPConvNeXt(arch=ARCH, gap_before_final_norm=False, **{'out_indices': [0, 3], **options})
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def convert_to_layout(model: SBPConvNeXt, layout: str) -> dict:
    """Return the weights of a model and of a classifier under the names of a layout."""
    names, file = NAMES[layout], {}

    def put(name, module):
        file.update({f'{name}.{key}': value for key, value in module.state_dict().items()})

    for i, (layer, stage) in enumerate(zip(model.downsample_layers, model.stages, strict=True)):
        for k, part in enumerate(layer):
            name = names['down' if i else 'stem']
            put((name if isinstance(name, str) else name[k]).format(i=i, k=k), part)
        for j, block in enumerate(stage):
            prefix = names['block'].format(i=i, j=j)
            parts = (block.depthwise_conv, block.norm, block.pointwise_conv1, block.pointwise_conv2)
            for name, part in zip(names['parts'], parts, strict=False):
                put(prefix + name, part)
            file[prefix + names['parts'][4]] = block.gamma.detach()
            if getattr(block, 'grn', None) is not None:
                for name, value in zip(names['grn'], (block.grn.gamma, block.grn.beta), strict=True):
                    file[prefix + name] = value.detach().reshape(1, 1, 1, -1)
    put(names['last'], model.norm3)
    put(names['head'], nn.Linear(32, 10))
    return file


@pytest.fixture
def log(caplog):
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith('SBPConvNeXt: ')]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize('layout', NAMES)
def test_pretrained_file_of_any_layout(layout, suffix, tmp_path, log):
    source = build_backbone()
    path = tmp_path / f'weights.{suffix}'
    if suffix == 'pth':
        nested = layout == 'original'  # as ConvNeXt's and DINO's scripts save it
        file = convert_to_layout(source, layout)
        torch.save(dict(model=file) if nested else file, path)
    else:
        safetensors = pytest.importorskip('safetensors.torch')
        safetensors.save_file({name: t.contiguous() for name, t in convert_to_layout(source, layout).items()}, path)
    model = build_backbone(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    model.init_weights()
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value) == (not name.startswith('norm0')), name
    found, missing, left_over = log()
    total = len(source.state_dict())
    assert f'the names of {layout}: {total - 2} of {total} found' in found
    assert missing.endswith('missing in the file: norm0.weight, norm0.bias')
    what, names = left_over.split(': ')[-2:]
    assert what == 'left over in the file'
    assert sorted(names.split(', ')) == [f'{NAMES[layout]["head"]}.{end}' for end in ('bias', 'weight')]


def test_classifier_of_mmpretrain_without_a_prefix(tmp_path):
    source, model = build_backbone(), build_backbone()
    file = {f'backbone.{name}': value for name, value in source.state_dict().items()}
    torch.save(dict(state_dict={**file, 'head.fc.weight': torch.ones(2)}), tmp_path / 'x.pth')
    load_checkpoint(model, str(tmp_path / 'x.pth'))
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize('layout', NAMES)
def test_backbone_of_a_detector(layout, tmp_path):
    source = build_backbone(out_indices=[3])
    file = {f'backbone.{name}': value for name, value in convert_to_layout(source, layout).items()}
    detector = nn.ModuleDict(dict(backbone=build_backbone(out_indices=[3]), neck=nn.Linear(2, 2)))
    torch.save({**file, 'neck.weight': torch.eye(2), 'neck.bias': torch.ones(2)}, tmp_path / 'x.pth')
    load_checkpoint(detector, str(tmp_path / 'x.pth'))
    for name, value in source.state_dict().items():
        assert torch.equal(detector.backbone.state_dict()[name], value), name
    assert torch.equal(detector.neck.weight, torch.eye(2))


@pytest.mark.parametrize('linear', [True, False])
@pytest.mark.parametrize('layout', NAMES)
def test_global_response_norm_and_convolutions_for_linear_layers(layout, linear):
    source, model = (build_backbone(use_grn=True, linear_pw_conv=x, out_indices=[3]) for x in (linear, not linear))
    head = [NAMES[layout]['head'] + end for end in ('.weight', '.bias')]
    model.load_state_dict(
        {name: value for name, value in convert_to_layout(source, layout).items() if name not in head}
    )
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name].flatten(), value.flatten()), name


@pytest.mark.parametrize('linear', [True, False])
@pytest.mark.parametrize('prefix', ['', 'backbone.'])
def test_own_names_with_convolutions_for_linear_layers(prefix, linear):
    source, model = (build_backbone(linear_pw_conv=x) for x in (linear, not linear))
    owner = nn.ModuleDict(dict(backbone=model)) if prefix else model
    owner.load_state_dict({prefix + name: value for name, value in source.state_dict().items()})
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name].flatten(), value.flatten()), name


def test_strict_loading_refuses_what_is_left_over():
    with pytest.raises(RuntimeError, match=r'Unexpected key.*head\.fc\.weight'):
        build_backbone(out_indices=[3]).load_state_dict(convert_to_layout(build_backbone(), 'timm'))


def test_another_shape_is_refused():
    file = convert_to_layout(build_backbone(), 'timm')
    file['stem.0.weight'] = file['stem.0.weight'][:2]
    with pytest.raises(RuntimeError, match=r'size mismatch for downsample_layers\.0\.0\.weight'):
        build_backbone().load_state_dict(file, strict=False)


def test_own_weights_are_left_alone_and_others_are_said(log):
    model = build_backbone()
    state = model.state_dict()
    assert rename_weights(model, state, '', 'convnext') is None and log() == []
    assert rename_weights(model, {'layer1.0.conv1.weight': torch.ones(1)}, '', 'convnext') is None
    (line,) = log()
    assert "'layer1.0.conv1.weight'" in line and 'no known layout' in line


MMPRETRAIN_VIT = {
    'cls_token': 'cls_token',
    'pos_embed': 'pos_embed',
    'patch_embed.proj': 'patch_embed.projection',
    'blocks.0.norm1': 'layers.0.ln1',
    'blocks.0.attn.qkv': 'layers.0.attn.qkv',
    'blocks.0.attn.proj': 'layers.0.attn.proj',
    'blocks.0.norm2': 'layers.0.ln2',
    'blocks.0.mlp.fc1': 'layers.0.ffn.layers.0.0',
    'blocks.0.mlp.fc2': 'layers.0.ffn.layers.1',
    'norm': 'ln1',
}
HUGGING_FACE_VIT = {
    'cls_token': 'embeddings.cls_token',
    'pos_embed': 'embeddings.position_embeddings',
    'patch_embed.proj': 'embeddings.patch_embeddings.projection',
    'blocks.0.norm1': 'encoder.layer.0.layernorm_before',
    'blocks.0.attn.qkv': 'encoder.layer.0.attention.attention.{}',
    'blocks.0.attn.proj': 'encoder.layer.0.attention.output.dense',
    'blocks.0.norm2': 'encoder.layer.0.layernorm_after',
    'blocks.0.mlp.fc1': 'encoder.layer.0.intermediate.dense',
    'blocks.0.mlp.fc2': 'encoder.layer.0.output.dense',
    'norm': 'layernorm',
}


@pytest.mark.parametrize(
    ('names', 'prefix', 'layout'),
    [
        (MMPRETRAIN_VIT, 'backbone.', 'mmpretrain'),
        (HUGGING_FACE_VIT, 'vit.', 'Hugging Face'),
        (None, 'module.', 'timm'),
    ],
)
def test_vit_gets_timms_names(names, prefix, layout):
    arch = dict(num_layers=1, embed_dims=4, num_heads=1)
    model, file = SBPViT(arch, img_size=4, patch_size=2, out_type='cls_token'), {}
    for name, value in model.state_dict().items():
        part, _, leaf = name.rpartition('.') if name not in ('cls_token', 'pos_embed') else (name, '', '')
        new = prefix + (names[part] if names else part) + ('.' + leaf if leaf else '')
        if '{}' in new:
            split = zip(('query', 'key', 'value'), value.chunk(3), strict=True)
            file.update({new.format(kind): rows for kind, rows in split})
        else:
            file[new] = value
    state = {**file, 'mask_token': torch.ones(1)}
    assert rename_weights(model, state, '', 'vit') == layout
    assert set(state) == {*model.state_dict(), 'mask_token'}
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_safetensors_that_cannot_be_read(tmp_path, monkeypatch):
    path, model = tmp_path / 'x.safetensors', build_backbone()
    with pytest.raises(FileNotFoundError, match='x.safetensors does not exist'):
        load_checkpoint(model, str(path))
    with pytest.raises(ValueError, match='download the file and give its path'):
        load_checkpoint(model, 'https://example.org/x.safetensors')
    path.write_bytes(b'\x80\x02}q\x00.' * 20)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, 'safetensors', None)
        with pytest.raises(ValueError, match='x.safetensors: reading it needs the package safetensors: pip install'):
            load_checkpoint(model, str(path))
    pytest.importorskip('safetensors')
    with pytest.raises(ValueError, match='cannot be read, it may be cut off; download it again'):
        load_checkpoint(model, str(path))


def test_log_level_of_what_is_missing(log, caplog):
    build_backbone().load_state_dict(convert_to_layout(build_backbone(), 'timm'), strict=False)
    assert len(log()) == 3
    assert [record.levelno for record in caplog.records][-3:] == [logging.INFO, logging.WARNING, logging.WARNING]
