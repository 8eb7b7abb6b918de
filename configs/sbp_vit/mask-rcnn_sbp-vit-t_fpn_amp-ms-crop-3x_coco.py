_base_ = './mask-rcnn_vit-t_fpn_amp-ms-crop-3x_coco.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
