"""Every config loads, builds and steps; a child states its difference and nothing else."""

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
from mmengine.utils import digit_version

import preflight  # isort: skip  (helpers puts tools/ on the path)

# Without _base_ it is no detector but a part for the _base_ of one.
FILES = [path for path in sorted(CONFIGS.glob('*/*.py')) if path.parent.name != 'classification']
ALL = [path for path in FILES if '_base_ = ' in path.read_text()]
CASCADE = '{}-mask-rcnn_{}convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'
SBP_AND_PARENT = [
    ('mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco', 'mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco'),
    (CASCADE.format('cascade', 'sbp-'), CASCADE.format('cascade', '')),
]
VIT = [(f'mask-rcnn_sbp-vit-{a}_fpn_amp-ms-crop-3x_coco', f'mask-rcnn_vit-{a}_fpn_amp-ms-crop-3x_coco') for a in 'tb']


def family(name: str) -> Path:
    return CONFIGS / f'sbp_{"vit" if "vit" in name else "convnext"}/{name}.py'


@cache
def load(path: Path) -> Config:
    return Config.fromfile(path)


def build(path: Path):
    """The detector of a config, without downloads, with fewer proposals; and the number of its classes."""
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


def batch(classes: int, height: int = 64, width: int = 96) -> dict:
    """One image with two objects of the last class, as a dataloader gives it."""
    masks = np.zeros((2, height, width), np.uint8)
    masks[0, 8:40, 8:48] = masks[1, 30:60, 50:90] = 1
    sample = DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1, 1)))
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[8.0, 8, 48, 40], [50, 30, 90, 60]]),
        labels=torch.full((2,), classes - 1),
        masks=BitmapMasks(masks, height, width),
    )
    image = torch.randint(0, 255, (3, height, width), dtype=torch.uint8)
    return dict(inputs=[image], data_samples=[sample])


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_config_builds_and_steps(path):
    if path.stem.startswith('dino') and digit_version(mmdet.__version__) < digit_version('3.5'):
        pytest.skip('mmdet 3.3 has DINOs of 256 channels only')
    torch.manual_seed(0)
    model, classes = build(path)
    size = (64, 96) if hasattr(model, 'roi_head') else (192, 192)  # as many tokens as a DINO has queries
    data = model.data_preprocessor(batch(classes, *size), training=True)
    losses, _ = model.train().parse_losses(model(**data, mode='loss'))
    losses.backward()
    stem = next(p for p in model.backbone.parameters() if p.dim() == 4)
    assert losses.isfinite() and stem.grad.isfinite().all() and stem.grad.any()
    data = model.data_preprocessor(batch(classes, *size), training=False)
    with torch.no_grad():
        (result,) = model.eval()(**data, mode='predict')
    found = result.pred_instances
    assert found.masks.shape[1:] == size if hasattr(model, 'roi_head') else len(found.bboxes) > 0


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_config_is_a_short_child_that_imports_the_plugin(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith('#')]
    quickstart = path.stem.endswith('quickstart_shapes')
    data = path.parent.name in ('custom_dataset', 'nuclei')
    assert len(lines) <= (62 if quickstart else 50 if data else 15)
    config = load(path)
    assert config.custom_imports == dict(imports=['sbp_mmdet'], allow_failed_imports=False)
    kinds = {'vit-': 'SBPViT', 'swin-': 'SBPSwinTransformer', '_r18_': 'ResNet'}
    kind = next((kind for part, kind in kinds.items() if part in path.stem), 'SBPConvNeXt')
    assert config.model.backbone.type == kind


@pytest.mark.parametrize('path', ALL, ids=lambda path: path.stem)
def test_tools_build_the_backbone_without_memory(path):
    """As train.py does before a run."""
    preflight.check_backbone(load(path))


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
    model, _ = build(family(child))
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


def test_readme_gives_the_papers_figures_and_the_metafile_none():
    """Table 2 of the paper: keep ratio 1 and 0.5 of ConvNeXt-T, then of ConvNeXt-B."""
    paper = [(8.6, 46.2, 41.7), (5.9, 45.5, 41.1), (17.4, 52.7, 45.6), (12.5, 52.5, 45.4)]
    index = yaml.safe_load((CONFIGS.parent / 'model-index.yml').read_text())['Import']
    models = [model for file in index for model in yaml.safe_load((CONFIGS.parent / file).read_text())['Models']]
    assert [model['Name'] for model in models] == [name for child, parent in SBP_AND_PARENT for name in (parent, child)]
    readme = (CONFIGS / 'sbp_convnext/README.md').read_text()
    for model, figures in zip(models, paper, strict=True):
        assert (CONFIGS.parent / model['Config']).is_file() and 'Results' not in model
        (row,) = (line for line in readme.splitlines() if line.startswith('|') and model['Name'] in line)
        cells = [cell.strip() for cell in row.split('|')[2:8]]
        assert cells[::2] == [str(figure) for figure in figures] and not any(cells[1::2])


def _stock(name, folder='convnext'):
    folder = Path(mmdet.__file__).parent / '.mim/configs' / folder
    return Config.fromfile(folder / f'{name}.py', import_custom_modules=False)  # they would import mmpretrain


def _without_scopes(node):
    """``_scope_`` only marks what came from another package's config."""
    if isinstance(node, dict):
        return {key: _without_scopes(value) for key, value in node.items() if key != '_scope_'}
    return [_without_scopes(value) for value in node] if isinstance(node, (list, tuple)) else node


def test_nuclei_lie_where_the_environment_says(monkeypatch):
    path = CONFIGS / 'nuclei/mask-rcnn_sbp-convnext-atto_fpn_nuclei.py'
    monkeypatch.delenv('NUCLEI', raising=False)
    assert Config.fromfile(path).val_evaluator.ann_file == '../shared/data/nuclei/val.json'
    monkeypatch.setenv('NUCLEI', 'my/nuclei')
    config = Config.fromfile(path)
    assert config.train_dataloader.dataset.data_root == 'my/nuclei/'
    assert config.val_evaluator.ann_file == 'my/nuclei/val.json'
