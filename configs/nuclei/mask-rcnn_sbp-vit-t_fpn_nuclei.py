# The detector of this folder with a plain ViT-T in place of the small ConvNeXt, from scratch as well.
_base_ = './mask-rcnn_convnext-atto_fpn_nuclei.py'

model = dict(
    data_preprocessor=dict(pad_size_divisor=16),
    backbone=dict(_delete_=True, type='SBPViT', arch='tiny', img_size=256, sbp_cfg=dict(preset='sbp')),
    neck=dict(in_channels=[48, 96, 192, 192]),
)
optim_wrapper = dict(optimizer=dict(lr=5e-4))
