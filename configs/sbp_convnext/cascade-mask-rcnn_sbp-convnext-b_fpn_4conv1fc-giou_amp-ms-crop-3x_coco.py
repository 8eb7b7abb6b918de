_base_ = './cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
