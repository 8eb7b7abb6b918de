# A small Mask R-CNN for training from scratch on images of at most 320 pixels.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

c, norm_cfg = 64, dict(type='GN', num_groups=8)
model = dict(
    backbone=dict(
        _delete_=True,
        type='SBPConvNeXt',
        arch='atto',
        layer_scale_init_value=1.0,  # the default, 1e-6, takes longer than such a training to grow
        out_indices=[0, 1, 2, 3],
        gap_before_final_norm=False,
        init_cfg=[  # ConvNeXt's own initialisation, std 0.02, is meant for long training
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
