# Mask R-CNN with an SBP ConvNeXt on a data set of your own, in COCO format. Copy this file into your project and edit
# the five numbered parts; it needs mmdet and sbp_mmdet installed, and no other file of this repository.
_base_ = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)  # registers SBPConvNeXt

# 1. Data: category names as the annotation file spells them, and where things lie. This small set has one part only.
metainfo = dict(classes=('date', 'fig', 'hazelnut'))
data_root = 'data/fruits_nuts/'
train = dict(ann_file='trainval.json', data_prefix=dict(img='images/'))
val = dict(ann_file='trainval.json', data_prefix=dict(img='images/'))
scale = (640, 640)  # longer and shorter side at most

# 2. Model: the preset by which it trains, and the number of classes.
num_classes = len(metainfo['classes'])
model = dict(
    backbone=dict(type='SBPConvNeXt', sbp_cfg=dict(preset='exact')),
    roi_head=dict(bbox_head=dict(num_classes=num_classes), mask_head=dict(num_classes=num_classes)),
)

# 3. Weights: the backbone starts from ImageNet weights, as the stock config says (downloaded). Without network, put
# model.backbone.init_cfg=None; from a whole COCO detector, of the stock config too: load_from = 'checkpoint.pth'.

# 4. Images.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=scale, ratio_range=(0.8, 1.2), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
common = dict(data_root=data_root, metainfo=metainfo)
train_dataloader = dict(batch_size=2, dataset=dict(pipeline=train_pipeline, **train, **common))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline, **val, **common))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + val['ann_file'])
test_evaluator = val_evaluator

# 5. Schedule: short. The stock learning rate is for 16 images a step; --auto-scale-lr of tools/train.py adapts it.
max_epochs = 12
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, T_max=max_epochs, eta_min_ratio=0.01, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=2, save_best='coco/segm_mAP'))
