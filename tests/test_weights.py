"""Files in the layouts that people have load into the backbone, and what they lack is said."""

import json
import logging
import struct

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.runner.checkpoint import load_checkpoint
from torch import nn

from sbp_mmdet import SBPConvNeXt
from sbp_mmdet.models.weights import read_safetensors, rename_weights

ARCH = dict(depths=[1, 1, 2, 1], channels=[4, 8, 16, 32])
# What the four layouts call: stem; layer into stage i; block j of stage i; its parts; the last norm; the classifier.
NAMES = {
    'original': dict(
        stem='downsample_layers.0.{k}',
        down='downsample_layers.{i}.{k}',
        block='stages.{i}.{j}.',
        parts=('dwconv', 'norm', 'pwconv1', 'pwconv2', 'gamma'),
        last='norm',
        head='head',
        grn=('grn.gamma', 'grn.beta'),
    ),
    'timm': dict(
        stem='stem.{k}',
        down='stages.{i}.downsample.{k}',
        block='stages.{i}.blocks.{j}.',
        parts=('conv_dw', 'norm', 'mlp.fc1', 'mlp.fc2', 'gamma'),
        last='head.norm',
        head='head.fc',
        grn=('mlp.grn.weight', 'mlp.grn.bias'),
    ),
    'Hugging Face': dict(
        stem=('convnext.embeddings.patch_embeddings', 'convnext.embeddings.layernorm'),
        down='convnext.encoder.stages.{i}.downsampling_layer.{k}',
        block='convnext.encoder.stages.{i}.layers.{j}.',
        parts=('dwconv', 'layernorm', 'pwconv1', 'pwconv2', 'layer_scale_parameter'),
        last='convnext.layernorm',
        head='classifier',
        grn=('grn.weight', 'grn.bias'),
    ),
    'Hugging Face, DINOv3': dict(
        stem='stages.0.downsample_layers.{k}',
        down='stages.{i}.downsample_layers.{k}',
        block='stages.{i}.layers.{j}.',
        parts=('depthwise_conv', 'layer_norm', 'pointwise_conv1', 'pointwise_conv2', 'gamma'),
        last='layer_norm',
        head='head',
        grn=('grn.weight', 'grn.bias'),
    ),
}


def backbone(**options) -> SBPConvNeXt:
    """With random weights in all parameters, so that none is like another."""
    model = SBPConvNeXt(arch=ARCH, gap_before_final_norm=False, **{'out_indices': [0, 3], **options})
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def in_layout(model: SBPConvNeXt, layout: str) -> dict:
    """The weights of a model, and of a classifier, as a file of this layout names them."""
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


def write_safetensors(tensors: dict, path) -> None:
    """By the format's description, independently of what reads it."""
    header, blob = {'__metadata__': {'format': 'pt'}}, b''
    codes = {torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16', torch.int64: 'I64'}
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        header[name] = dict(dtype=codes[tensor.dtype], shape=list(tensor.shape))
        header[name]['data_offsets'] = [len(blob), len(blob) + len(raw)]
        blob += raw
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    path.write_bytes(struct.pack('<Q', len(text)) + text + blob)


@pytest.fixture
def log(caplog):
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith('SBPConvNeXt: ')]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize('layout', NAMES)
def test_pretrained_file_of_any_layout(layout, suffix, tmp_path, log):
    source = backbone()
    path = tmp_path / f'weights.{suffix}'
    if suffix == 'pth':
        nested = layout == 'original'  # as ConvNeXt's and DINO's scripts save it
        file = in_layout(source, layout)
        torch.save(dict(model=file) if nested else file, path)
    else:
        write_safetensors(in_layout(source, layout), path)
    model = backbone(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    model.init_weights()
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value) == (not name.startswith('norm0')), name
    found, missing, left_over = log()
    total = len(source.state_dict())
    assert f'the names of {layout}: {total - 2} of {total} found' in found
    assert missing.endswith('missing in the file: norm0.weight, norm0.bias')
    head = NAMES[layout]['head']
    assert left_over.endswith(f'left over in the file: {head}.weight, {head}.bias')


def test_classifier_of_mmpretrain_without_a_prefix(tmp_path):
    source, model = backbone(), backbone()
    file = {f'backbone.{name}': value for name, value in source.state_dict().items()}
    torch.save(dict(state_dict={**file, 'head.fc.weight': torch.ones(2)}), tmp_path / 'x.pth')
    load_checkpoint(model, str(tmp_path / 'x.pth'))
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize('layout', NAMES)
def test_backbone_of_a_detector(layout, tmp_path):
    source = backbone(out_indices=[3])
    file = {f'backbone.{name}': value for name, value in in_layout(source, layout).items()}
    detector = nn.ModuleDict(dict(backbone=backbone(out_indices=[3]), neck=nn.Linear(2, 2)))
    torch.save({**file, 'neck.weight': torch.eye(2), 'neck.bias': torch.ones(2)}, tmp_path / 'x.pth')
    load_checkpoint(detector, str(tmp_path / 'x.pth'))
    for name, value in source.state_dict().items():
        assert torch.equal(detector.backbone.state_dict()[name], value), name
    assert torch.equal(detector.neck.weight, torch.eye(2))


@pytest.mark.parametrize('linear', [True, False])
@pytest.mark.parametrize('layout', NAMES)
def test_global_response_norm_and_convolutions_for_linear_layers(layout, linear):
    source, model = (backbone(use_grn=True, linear_pw_conv=x, out_indices=[3]) for x in (linear, not linear))
    head = [NAMES[layout]['head'] + end for end in ('.weight', '.bias')]
    model.load_state_dict({name: value for name, value in in_layout(source, layout).items() if name not in head})
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name].flatten(), value.flatten()), name


@pytest.mark.parametrize('linear', [True, False])
@pytest.mark.parametrize('prefix', ['', 'backbone.'])
def test_own_names_with_convolutions_for_linear_layers(prefix, linear):
    source, model = (backbone(linear_pw_conv=x) for x in (linear, not linear))
    owner = nn.ModuleDict(dict(backbone=model)) if prefix else model
    owner.load_state_dict({prefix + name: value for name, value in source.state_dict().items()})
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name].flatten(), value.flatten()), name


def test_strict_loading_refuses_what_is_left_over():
    with pytest.raises(RuntimeError, match=r'Unexpected key.*head\.fc\.weight'):
        backbone(out_indices=[3]).load_state_dict(in_layout(backbone(), 'timm'))


def test_another_shape_is_refused():
    file = in_layout(backbone(), 'timm')
    file['stem.0.weight'] = file['stem.0.weight'][:2]
    with pytest.raises(RuntimeError, match=r'size mismatch for downsample_layers\.0\.0\.weight'):
        backbone().load_state_dict(file, strict=False)


def test_own_weights_are_left_alone_and_others_are_said(log):
    model = backbone()
    state = model.state_dict()
    assert rename_weights(model, state, '', 'convnext') is None and log() == []
    assert rename_weights(model, {'layer1.0.conv1.weight': torch.ones(1)}, '', 'convnext') is None
    (line,) = log()
    assert "'layer1.0.conv1.weight'" in line and 'no known layout' in line


class NamedAsTimm(nn.Module):
    """Parameters of a ViT with one block, with timm's names."""

    def __init__(self, c=4):
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, c)), nn.Parameter(torch.randn(1, 5, c))
        self.patch_embed = nn.ModuleDict(dict(proj=nn.Conv2d(3, c, 2)))
        attn = nn.ModuleDict(dict(qkv=nn.Linear(c, 3 * c), proj=nn.Linear(c, c)))
        mlp = nn.ModuleDict(dict(fc1=nn.Linear(c, 4 * c), fc2=nn.Linear(4 * c, c)))
        block = nn.ModuleDict(dict(norm1=nn.LayerNorm(c), attn=attn, norm2=nn.LayerNorm(c), mlp=mlp))
        self.blocks, self.norm = nn.ModuleList([block]), nn.LayerNorm(c)


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
    model, file = NamedAsTimm(), {}
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


def test_safetensors_of_all_kinds(tmp_path):
    tensors = {
        'half': torch.randn(3, 2).half(),
        'brain': torch.randn(5).bfloat16(),
        'none': torch.empty(0, 3),
        'one': torch.tensor(7),
        'full': torch.randn(2, 3, 4),
    }
    write_safetensors(tensors, tmp_path / 'x.safetensors')
    read = read_safetensors(tmp_path / 'x.safetensors')
    assert list(read) == list(tensors)
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype and read[name].shape == value.shape and torch.equal(read[name], value)


def test_safetensors_that_cannot_be_read(tmp_path):
    path = tmp_path / 'x.safetensors'
    write_safetensors({'a': torch.ones(4), 'b': torch.ones(4)}, path)
    whole = path.read_bytes()
    for content, message in [
        (b'', 'is not a .safetensors file'),
        (b'\x80\x02}q\x00.' * 20, 'is not a .safetensors file'),
        (whole[:-4], 'b ends at byte'),
        (whole.replace(b'"F32"', b'"F8X"'), 'a is of type F8X'),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_safetensors(path)
    with pytest.raises(FileNotFoundError, match='y.safetensors'):
        load_checkpoint(backbone(), str(tmp_path / 'y.safetensors'))
    with pytest.raises(ValueError, match='download the file'):
        load_checkpoint(backbone(), 'https://example.org/x.safetensors')


def test_log_level_of_what_is_missing(log, caplog):
    backbone().load_state_dict(in_layout(backbone(), 'timm'), strict=False)
    assert len(log()) == 3
    assert [record.levelno for record in caplog.records][-3:] == [logging.INFO, logging.WARNING, logging.WARNING]
