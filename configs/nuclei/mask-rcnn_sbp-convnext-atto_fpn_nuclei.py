_base_ = './mask-rcnn_convnext-atto_fpn_nuclei.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
