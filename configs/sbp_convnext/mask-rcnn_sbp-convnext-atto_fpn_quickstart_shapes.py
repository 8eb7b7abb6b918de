# A small Mask R-CNN, trained from scratch on the shapes of tools/make_synthetic_coco.py in a few minutes on two CPU
# cores: for tests, and the parent of the configs in ../nuclei. fp32: mmcv's CPU operators refuse bf16.
_base_ = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

c, norm_cfg = 64, dict(type='GN', num_groups=8)
model = dict(
    backbone=dict(
        _delete_=True,
        type='SBPConvNeXt',
        arch='atto',
        layer_scale_init_value=1.0,  # the default, 1e-6, takes longer than this training to grow
        out_indices=[0, 1, 2, 3],
        gap_before_final_norm=False,
        sbp_cfg=dict(preset='sbp'),
        init_cfg=[  # ConvNeXt's own start, std 0.02, is meant for long training
            dict(type='Kaiming', layer=['Conv2d', 'Linear'], distribution='normal', mode='fan_in'),
            dict(type='Constant', layer=['LayerNorm'], val=1.0),
        ],
    ),
    neck=dict(in_channels=[40, 80, 160, 320], out_channels=c, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=c, feat_channels=c, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=c),
        bbox_head=dict(num_classes=4, in_channels=c, fc_out_channels=256),
        mask_roi_extractor=dict(out_channels=c),
        mask_head=dict(num_convs=2, num_classes=4, in_channels=c, conv_out_channels=c, norm_cfg=norm_cfg),
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
resize = dict(type='Resize', scale=(128, 128), keep_ratio=True)
train_pipeline = [*_base_.train_pipeline[:2], resize, *_base_.train_pipeline[3:]]
train = dict(ann_file='annotations/instances_train.json', data_prefix=dict(img='images/train/'))
val = dict(ann_file='annotations/instances_val.json', data_prefix=dict(img='images/val/'))
loader = dict(batch_size=8, num_workers=1)
train_dataloader = dict(dataset=dict(**shapes, **train, filter_cfg=dict(min_size=2), pipeline=train_pipeline), **loader)
test_pipeline = [_base_.test_pipeline[0], resize, _base_.test_pipeline[-1]]
val_dataloader = dict(dataset=dict(**shapes, **val, pipeline=test_pipeline), **loader)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')

max_epochs = 6
train_cfg = dict(max_epochs=max_epochs, val_interval=3)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-3, weight_decay=0.05), clip_grad=dict(max_norm=10, norm_type=2)
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=100),
    dict(type='CosineAnnealingLR', eta_min=1e-5, T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=max_epochs), logger=dict(interval=20))
randomness = dict(seed=0)
