# Without SBP: the stock config on this package's backbone.
_base_ = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

model = dict(backbone=dict(type='SBPConvNeXt'))
