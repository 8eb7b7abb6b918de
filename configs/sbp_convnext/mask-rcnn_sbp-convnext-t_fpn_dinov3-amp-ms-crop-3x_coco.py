# Fine-tuning from DINOv3's ConvNeXt-T: download the weights and put their path here, see docs/pretrained.md.
_base_ = './mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py'

checkpoint = 'weights/dinov3_convnext_tiny.safetensors'
model = dict(
    backbone=dict(init_cfg=dict(_delete_=True, type='Pretrained', checkpoint=checkpoint)),
)
