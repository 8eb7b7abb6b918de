# Without SBP: the official ConvNeXt-B recipe, ImageNet-1K weights, as its differences from the stock ConvNeXt-S config.
_base_ = 'mmdet::convnext/cascade-mask-rcnn_convnext-s-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
checkpoint_file = 'https://download.openmmlab.com/mmclassification/v0/convnext/downstream/convnext-base_3rdparty_32xb128-noema_in1k_20220301-2a0ee547.pth'  # noqa: E501

model = dict(
    backbone=dict(
        type='SBPConvNeXt',
        arch='base',
        drop_path_rate=0.7,
        init_cfg=dict(checkpoint=checkpoint_file),
    ),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.8))
