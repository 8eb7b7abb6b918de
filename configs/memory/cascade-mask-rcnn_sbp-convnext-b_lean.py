_base_ = [
    '../sbp_convnext/cascade-mask-rcnn_sbp-convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py',
    './lean_two_stage.py',
]
