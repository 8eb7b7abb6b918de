# Every gradient exact, none dropped.
_base_ = './cascade-mask-rcnn_sbp-convnext-b_lean.py'

model = dict(backbone=dict(sbp_cfg=dict(preset='exact')))
