# Without SBP: mmdet's Swin-T config with a plain ViT-T in its place, DeiT's ImageNet-1K weights.
_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
checkpoint = 'https://dl.fbaipublicfiles.com/deit/deit_tiny_patch16_224-a1311bcf.pth'

model = dict(
    backbone=dict(_delete_=True, type='SBPViT', arch='tiny', init_cfg=dict(type='Pretrained', checkpoint=checkpoint)),
    neck=dict(in_channels=[48, 96, 192, 192]),
)
no_decay = dict(decay_mult=0.0)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(pos_embed=no_decay, cls_token=no_decay)))
