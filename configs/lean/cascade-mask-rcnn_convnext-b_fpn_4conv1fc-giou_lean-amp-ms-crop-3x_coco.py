_base_ = '../sbp_convnext/cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
custom_hooks = [dict(type='LeanHook', preset='exact')]
