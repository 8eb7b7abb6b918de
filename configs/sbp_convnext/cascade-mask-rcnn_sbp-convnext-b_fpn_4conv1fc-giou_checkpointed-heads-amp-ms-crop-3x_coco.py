_base_ = [
    './cascade-mask-rcnn_sbp-convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py',
    '../_base_/checkpointed_two_stage.py',
]
