_base_ = './vit-tiny_in1k.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
