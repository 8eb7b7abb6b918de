# Pooled gradients, and masks that know where the objects are: near the exact gradients at SBP's cost.
_base_ = './mask-rcnn_sbp-convnext-atto_fpn_nuclei.py'

model = dict(backbone=dict(sbp_cfg=dict(keep_ratio=0.5, dropped='pool', sampler='objects')))
custom_hooks = [dict(type='ObjectMasksHook')]  # hands the boxes of the ground truth to the backbone
