_base_ = './convnext-tiny_in1k.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
