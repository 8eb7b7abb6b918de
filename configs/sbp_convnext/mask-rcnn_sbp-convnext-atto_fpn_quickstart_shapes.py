# A small Mask R-CNN for the quick start (tools/quickstart.sh): trained from scratch on the set of
# tools/make_synthetic_coco.py, in a few minutes on two CPU cores. fp32: mmcv's CPU operators refuse bf16.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

channels = 64
norm_cfg = dict(type='GN', num_groups=8)
model = dict(
    backbone=dict(
        _delete_=True,
        type='SBPConvNeXt',
        arch='atto',
        drop_path_rate=0.0,
        layer_scale_init_value=1.0,  # the default, 1e-6, takes longer than this training to grow
        out_indices=[0, 1, 2, 3],
        gap_before_final_norm=False,
        sbp_cfg=dict(preset='paper'),
        init_cfg=[  # ConvNeXt's own start, std 0.02, is meant for long training
            dict(type='Kaiming', layer=['Conv2d', 'Linear'], distribution='normal', mode='fan_in'),
            dict(type='Constant', layer=['LayerNorm'], val=1.0),
        ],
    ),
    neck=dict(in_channels=[40, 80, 160, 320], out_channels=channels, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=channels, feat_channels=channels, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=channels),
        bbox_head=dict(num_classes=4, in_channels=channels, fc_out_channels=256),
        mask_roi_extractor=dict(out_channels=channels),
        mask_head=dict(num_convs=2, num_classes=4, in_channels=channels, conv_out_channels=channels, norm_cfg=norm_cfg),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=300, max_per_img=100),
        rcnn=dict(sampler=dict(num=32)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=30)),
)

data_root = 'data/shapes/'
shapes = dict(data_root=data_root, metainfo=dict(classes=('ellipse', 'rectangle', 'triangle', 'star')))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='RandomFlip', prob=[0.3, 0.3], direction=['horizontal', 'vertical']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        **shapes,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='images/train/'),
        filter_cfg=dict(min_size=2),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        **shapes,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='images/val/'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

max_epochs = 6
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=3)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05), clip_grad=dict(max_norm=10, norm_type=2))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=100),
    dict(type='CosineAnnealingLR', eta_min=1e-5, T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=max_epochs), logger=dict(interval=20))
randomness = dict(seed=0)
