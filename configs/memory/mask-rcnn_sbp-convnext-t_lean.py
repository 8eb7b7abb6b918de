_base_ = ['../sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py', './lean_two_stage.py']
