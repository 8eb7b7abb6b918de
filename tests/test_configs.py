"""Every config builds and trains as its name says; a config of each kind runs a step."""

import ast
import copy
from functools import cache
from pathlib import Path

import mmdet
import numpy as np
import pytest
import torch
import yaml
from helpers import CONFIGS
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData

from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.apply import keep_ratios
from sbp_mmdet.presets import PRESETS
from sbp_mmdet.surgery import model_hooks

import preflight  # isort: skip  (helpers puts tools/ on the path)

ALL = [path for path in sorted(CONFIGS.glob('*/*.py')) if path.parent.name not in ('_base_', 'classification')]
CASCADE = '{}-mask-rcnn_{}convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'
SBP_AND_PARENT = [
    ('mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco', 'mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco'),
    (CASCADE.format('cascade', 'sbp-'), CASCADE.format('cascade', '')),
]
STEPPED = [
    'custom_dataset/mask-rcnn_convnext-t_fpn_custom',
    'lean/rtmdet_s_lean-8xb32-300e_coco',
    'nuclei/mask-rcnn_convnext-atto_fpn_lean-15e_nuclei',
    'nuclei/mask-rcnn_r18_fpn_nuclei',
    'nuclei/mask-rcnn_sbp-vit-t_fpn_nuclei',
    'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes',
    'sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco',
    'sbp_swin/mask-rcnn_sbp-swin-t_fpn_amp-ms-crop-3x_coco',
]
VIT = [(f'mask-rcnn_sbp-vit-{a}_fpn_amp-ms-crop-3x_coco', f'mask-rcnn_vit-{a}_fpn_amp-ms-crop-3x_coco') for a in 'tb']


def family(name: str) -> Path:
    return CONFIGS / f'sbp_{"vit" if "vit" in name else "convnext"}/{name}.py'


@cache
def load(path: Path) -> Config:
    return Config.fromfile(path)


def build(path: Path):
    """Return the detector of a config without downloads and with fewer proposals, and its number of classes."""
    init_default_scope('mmdet')
    config = copy.deepcopy(load(path))
    model = config.model
    model.backbone.init_cfg = None
    if 'roi_head' in model:
        model.train_cfg.rpn_proposal.update(nms_pre=30, max_per_img=12)
        model.test_cfg.rpn.update(nms_pre=30, max_per_img=12)
        model.test_cfg.rcnn.max_per_img = 5
    heads = model.get('roi_head', model).bbox_head
    classes = (heads[0] if isinstance(heads, list) else heads).num_classes
    model = MODELS.build(model)
    model.init_weights()  # DINO leaves its level_embed in memory that nobody has written
    return revert_sync_batchnorm(model), classes


def batch(classes: int, masked: bool = True, height: int = 64, width: int = 96) -> dict:
    """Return one image with two objects of the last class, as a dataloader does."""
    sample = DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1, 1)))
    boxes = torch.tensor([[8.0, 8, 48, 40], [50, 30, 90, 60]])
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.full((2,), classes - 1))
    if masked:
        masks = np.zeros((2, height, width), np.uint8)
        masks[0, 8:40, 8:48] = masks[1, 30:60, 50:90] = 1
        sample.gt_instances.masks = BitmapMasks(masks, height, width)
    image = torch.randint(0, 255, (3, height, width), dtype=torch.uint8)
    return dict(inputs=[image], data_samples=[sample])


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_config_trains_by_the_method_of_its_name(path):
    """``sbp`` in the name stands for dropped positions, ``lean`` for exact gradients by LeanHook."""
    config = load(path)
    assert config.custom_imports == dict(imports=['sbp_mmdet'], allow_failed_imports=False)
    preflight.check_config(config, splits=())
    model = preflight.build_on_meta(config)
    for hook in model_hooks(config.get('custom_hooks')):
        hook.apply(model)
    assert bool(keep_ratios(model)) == ('_sbp-' in path.stem)
    hooks = [hook for hook in config.get('custom_hooks', []) if hook.type == 'LeanHook']
    assert len(hooks) == ('_lean-' in path.stem or path.parent.name == 'custom_dataset')
    assert all(PRESETS[hook.preset].gradients == 'exact' for hook in hooks)
    assert not hooks or sum(isinstance(module, LeanModule) for module in model.modules()) > 5


@pytest.mark.parametrize(
    'path',
    [*(path for path in ALL if path.parent.name != 'custom_dataset'), *CONFIGS.glob('_base_/*/*.py')],
    ids=lambda path: path.stem,
)
def test_config_repeats_nothing_of_its_parents(path, tmp_path):
    tree = ast.parse(path.read_text())
    (line,) = (node for node in tree.body if ast.unparse(node).startswith('_base_ = '))
    tree.body.remove(line)
    bases = ast.literal_eval(line.value)
    bases = [
        base if '::' in base else str(path.parent / base) for base in ([bases] if isinstance(bases, str) else bases)
    ]
    (tmp_path / 'parents.py').write_text(f'_base_ = {bases}\n')
    parents = Config.fromfile(tmp_path / 'parents.py', import_custom_modules=False)
    exec(compile(tree, str(path), 'exec'), own := {'_base_': parents})
    assert [*_repeated(own, parents, '')] == []


def _repeated(own, parents, name):
    for key, value in own.items():
        if key not in parents or key in ('type', '_base_', 'custom_imports') or isinstance(parents[key], (list, tuple)):
            continue
        if isinstance(value, dict) and isinstance(parents[key], dict):
            yield from () if '_delete_' in value else _repeated(value, parents[key], f'{name}{key}.')
        elif value == parents[key]:
            yield name + key


@pytest.mark.parametrize('name', STEPPED)
def test_config_steps_and_predicts(name):
    path = CONFIGS / f'{name}.py'
    torch.manual_seed(0)
    model, classes = build(path)
    for hook in model_hooks(load(path).get('custom_hooks')):
        hook.apply(model)
    data = model.data_preprocessor(batch(classes, hasattr(model, 'roi_head')), training=True)
    losses, _ = model.train().parse_losses(model(**data, mode='loss'))
    losses.backward()
    stem = next(p for p in model.backbone.parameters() if p.dim() == 4)
    assert losses.isfinite() and (not stem.requires_grad or stem.grad.isfinite().all() and stem.grad.any())
    data = model.data_preprocessor(batch(classes, hasattr(model, 'roi_head')), training=False)
    with torch.no_grad():
        (result,) = model.eval()(**data, mode='predict')
    predictions = result.pred_instances
    assert predictions.masks.shape[1:] == (64, 96) if hasattr(model, 'roi_head') else len(predictions.bboxes) > 0


@pytest.mark.parametrize(('child', 'parent'), SBP_AND_PARENT + VIT)
def test_sbp_child_differs_in_sbp_cfg_only(child, parent):
    child, parent = load(family(child)).to_dict(), load(family(parent)).to_dict()
    assert 'sbp_cfg' not in parent['model']['backbone']
    assert child['model']['backbone'].pop('sbp_cfg') == dict(preset='sbp')
    assert child == parent


def test_plain_config_differs_from_the_stock_one_in_the_backbone_type_only():
    ours = load(family(SBP_AND_PARENT[0][1])).to_dict()
    stock = _stock('mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco').to_dict()
    assert ours['model']['backbone'].pop('type') == 'SBPConvNeXt'
    assert stock['model']['backbone'].pop('type') == 'mmpretrain.ConvNeXt'
    ours.pop('custom_imports'), stock.pop('custom_imports')
    assert _without_scopes(ours) == _without_scopes(stock)


def test_base_recipe_is_the_official_one():
    config = load(family(SBP_AND_PARENT[1][1]))
    backbone, heads = config.model.backbone, config.model.roi_head.bbox_head
    assert (backbone.arch, backbone.drop_path_rate, backbone.layer_scale_init_value) == ('base', 0.7, 1.0)
    assert backbone.init_cfg.prefix == 'backbone.' and 'convnext-base' in backbone.init_cfg.checkpoint
    assert config.model.neck.in_channels == [128, 256, 512, 1024]
    assert [(h.type, h.num_shared_convs, h.num_shared_fcs) for h in heads] == [('ConvFCBBoxHead', 4, 1)] * 3
    assert [(h.loss_bbox.type, h.loss_bbox.loss_weight) for h in heads] == [('GIoULoss', 10.0)] * 3
    assert config.optim_wrapper.type == 'AmpOptimWrapper'
    assert config.optim_wrapper.optimizer == dict(type='AdamW', lr=2e-4, betas=(0.9, 0.999), weight_decay=0.05)
    assert config.optim_wrapper.paramwise_cfg == dict(decay_rate=0.8, decay_type='layer_wise', num_layers=12)
    assert config.train_cfg.max_epochs == 36 and config.train_dataloader.batch_size == 2


@pytest.mark.parametrize(('child', 'depth_of_last_stage'), [(SBP_AND_PARENT[0][0], 6), (SBP_AND_PARENT[1][0], 12)])
def test_layer_decay_reaches_the_backbone(child, depth_of_last_stage):
    config = copy.deepcopy(load(family(child)))
    config.optim_wrapper.type = 'OptimWrapper'  # the AMP one refuses to be built without a GPU
    model = preflight.build_on_meta(config)
    groups = build_optim_wrapper(model, config.optim_wrapper).optimizer.param_groups
    lr, decay = config.optim_wrapper.optimizer.lr, config.optim_wrapper.paramwise_cfg.decay_rate
    rate = {name: group['lr'] for group in groups for name in group['param_names']}
    rate = {name.removeprefix('module.'): value for name, value in rate.items()}
    # The stem is layer 0, the last stage layer 6 or 12, everything behind the backbone undecayed.
    assert rate['backbone.downsample_layers.0.0.weight'] == pytest.approx(lr * decay ** (depth_of_last_stage + 1))
    assert rate['backbone.stages.0.0.pointwise_conv1.weight'] == pytest.approx(lr * decay**depth_of_last_stage)
    assert rate['backbone.stages.3.2.pointwise_conv1.weight'] == pytest.approx(lr * decay)
    assert rate['neck.fpn_convs.0.conv.weight'] == lr


@pytest.mark.parametrize(
    ('parent', 'arch'), [(parent, arch) for (_, parent), arch in zip(VIT, ('tiny', 'base'), strict=True)]
)
def test_vit_configs_are_swins_but_for_backbone_neck_and_decay(parent, arch):
    ours, stock = (
        load(family(parent)).to_dict(),
        _stock('mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco', 'swin').to_dict(),
    )
    backbone = MODELS.build(ours['model']['backbone'] | dict(init_cfg=None))
    assert ours['model']['backbone']['arch'] == arch
    c = backbone.channels
    assert ours['model']['neck'].pop('in_channels') == [c // 4, c // 2, c, c]
    assert ours['optim_wrapper']['paramwise_cfg'].pop('custom_keys').keys() >= {'pos_embed', 'cls_token', 'norm'}
    for config in (ours, stock):
        for part in ('backbone', 'neck'):
            config['model'].pop(part)
        for key in ('custom_imports', 'checkpoint', 'pretrained', 'no_decay'):
            config.pop(key, None)
        config['optim_wrapper'].pop('paramwise_cfg')
    assert _without_scopes(ours) == _without_scopes(stock)


def test_options_on_the_command_line():
    config = copy.deepcopy(load(family(SBP_AND_PARENT[0][0])))
    config.model.backbone.init_cfg = None
    init_default_scope('mmdet')
    for preset in ('exact', 'sampled'):
        config.merge_from_dict({'model.backbone.sbp_cfg.preset': preset})
        assert MODELS.build(config.model.backbone).sbp.preset.name == preset
    config.merge_from_dict({'model.backbone.sbp_cfg': None})
    assert MODELS.build(config.model.backbone).sbp is None


@cache
def _metafiles():
    """Return the models of the metafile of each folder."""
    index = yaml.safe_load((CONFIGS.parent / 'model-index.yml').read_text())['Import']
    files = {Path(file).parent.name: CONFIGS.parent / file for file in index}
    return {folder: yaml.safe_load(file.read_text())['Models'] for folder, file in files.items()}


@pytest.mark.parametrize('folder', ['lean', 'sbp_convnext', 'sbp_swin', 'sbp_vit'])
def test_metafile_lists_the_configs_of_its_folder_with_their_epochs(folder):
    models = {model['Config']: model for model in _metafiles()[folder]}
    paths = [path for path in ALL if path.parent.name == folder and 'shapes' not in path.stem]
    assert sorted(models) == [str(path.relative_to(CONFIGS.parent)) for path in paths]
    for path, model in zip(paths, (models[key] for key in sorted(models)), strict=True):
        assert model['Name'] == path.stem and 'Results' not in model  # nothing was trained on COCO here
        train_cfg = load(path).train_cfg
        epochs = train_cfg.get('max_epochs') or round(train_cfg.max_iters * 16 / 118_000)  # COCO, 16 images a step
        assert model['Metadata']['Epochs'] == epochs


@pytest.mark.parametrize('folder', sorted({path.parent for path in ALL}), ids=lambda path: path.name)
def test_readme_shows_every_config_of_its_folder(folder):
    text = (folder / 'README.md').read_text()
    assert [path.name for path in folder.glob('*.py') if f']({path.name})' not in text] == []


def test_readme_gives_the_papers_figures():
    """Table 2 of the paper: keep ratio 1 and 0.5 of ConvNeXt-T, then of ConvNeXt-B."""
    paper = [(8.6, 46.2, 41.7), (5.9, 45.5, 41.1), (17.4, 52.7, 45.6), (12.5, 52.5, 45.4)]
    names = [name for child, parent in SBP_AND_PARENT for name in (parent, child)]
    readme = (CONFIGS / 'sbp_convnext/README.md').read_text()
    for name, figures in zip(names, paper, strict=True):
        (row,) = (line for line in readme.splitlines() if line.startswith('|') and f'({name}.py)' in line)
        assert [cell.strip() for cell in row.split('|')[2:-1]] == [str(figure) for figure in figures]


def _stock(name, folder='convnext'):
    folder = Path(mmdet.__file__).parent / '.mim/configs' / folder
    return Config.fromfile(folder / f'{name}.py', import_custom_modules=False)  # they would import mmpretrain


def _without_scopes(node):
    """Remove ``_scope_``, which only marks parts of another package's config."""
    if isinstance(node, dict):
        return {key: _without_scopes(value) for key, value in node.items() if key != '_scope_'}
    return [_without_scopes(value) for value in node] if isinstance(node, (list, tuple)) else node


def test_nuclei_lie_where_the_environment_says(monkeypatch):
    path = CONFIGS / 'nuclei/mask-rcnn_sbp-convnext-atto_fpn_nuclei.py'
    monkeypatch.delenv('NUCLEI', raising=False)
    assert Config.fromfile(path).val_evaluator.ann_file == 'examples/nuclei/val.json'
    monkeypatch.setenv('NUCLEI', 'my/nuclei')
    config = Config.fromfile(path)
    assert config.train_dataloader.dataset.data_root == 'my/nuclei/'
    assert config.val_evaluator.ann_file == 'my/nuclei/val.json'
