# Mask R-CNN with a ConvNeXt-T on a data set of your own, in COCO format, with exact gradients in less memory. Copy this
# file into your project and edit the five numbered parts; it needs mmdet and sbp_mmdet, and no other file from here.
_base_ = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)  # registers SBPConvNeXt and LeanHook

# 1. Data: category names as the annotation file spells them, and paths. This small set has no separate validation part.
metainfo = dict(classes=('date', 'fig', 'hazelnut'))
data_root = 'data/fruits_nuts/'
train = dict(ann_file='trainval.json', data_prefix=dict(img='images/'))
val = dict(ann_file='trainval.json', data_prefix=dict(img='images/'))
scale = (640, 640)  # longer and shorter side at most

# 2. Model: the number of classes, and the preset.
num_classes = len(metainfo['classes'])
model = dict(
    backbone=dict(type='SBPConvNeXt'),  # mmpretrain's ConvNeXt, which need not be installed
    roi_head=dict(bbox_head=dict(num_classes=num_classes), mask_head=dict(num_classes=num_classes)),
)
custom_hooks = [dict(type='LeanHook', preset='exact')]

# 3. Weights: the backbone starts from the stock config's ImageNet weights, which are downloaded. To start from a whole
# detector, the stock one too, set load_from = 'checkpoint.pth'; from random weights, model.backbone.init_cfg = None.

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

# 5. Schedule: a short one. The learning rate is for 16 images a step; --auto-scale-lr of tools/train.py scales it.
max_epochs = 12
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, T_max=max_epochs, eta_min_ratio=0.01, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=2, save_best='coco/segm_mAP'))
