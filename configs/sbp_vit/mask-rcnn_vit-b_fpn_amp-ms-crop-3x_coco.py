# Without SBP: ViT-B, weights of MAE's pretraining on ImageNet-1K.
_base_ = './mask-rcnn_vit-t_fpn_amp-ms-crop-3x_coco.py'
checkpoint = 'https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base.pth'

model = dict(
    backbone=dict(arch='base', drop_path_rate=0.1, init_cfg=dict(checkpoint=checkpoint)),
    neck=dict(in_channels=[192, 384, 768, 768]),
)
