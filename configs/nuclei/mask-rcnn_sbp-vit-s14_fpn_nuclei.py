# The subject of the study of gradients in a pretrained ViT (docs/vit.md): ViT-S/14 as DINOv2 has it.
_base_ = './mask-rcnn_sbp-convnext-atto_fpn_nuclei.py'

strides = [3.5, 7, 14, 28, 56]
model = dict(
    backbone=dict(
        _delete_=True,
        type='SBPViT',
        arch='small',
        patch_size=14,
        img_size=518,
        layer_scale_init_value=1.0,
        sbp_cfg=dict(preset='sbp'),
    ),
    neck=dict(in_channels=[96, 192, 384, 384]),
    rpn_head=dict(anchor_generator=dict(strides=strides)),
    roi_head=dict(
        bbox_roi_extractor=dict(featmap_strides=strides[:4]), mask_roi_extractor=dict(featmap_strides=strides[:4])
    ),
)
