_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

model = dict(backbone=dict(type='SBPSwinTransformer', sbp_cfg=dict(preset='sbp')))
