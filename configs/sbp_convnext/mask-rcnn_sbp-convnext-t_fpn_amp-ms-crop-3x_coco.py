_base_ = './mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
