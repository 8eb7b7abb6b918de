# A small Mask R-CNN that trains from scratch on rendered shapes, in a few minutes on two CPU cores.
_base_ = [
    '../_base_/models/mask-rcnn_convnext-atto_fpn.py',
    '../_base_/datasets/shapes_instance.py',
    '../_base_/schedules/adamw_6e.py',
    '../_base_/small_runtime.py',
]

model = dict(backbone=dict(sbp_cfg=dict(preset='sbp')))
