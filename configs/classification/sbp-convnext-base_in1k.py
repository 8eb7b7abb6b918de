_base_ = './convnext-base_in1k.py'

model = dict(backbone=dict(drop_path_rate=0.3, sbp_cfg=dict(preset='sbp')))
