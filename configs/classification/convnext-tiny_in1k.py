# Without SBP: mmpretrain's config on this package's backbone.
_base_ = 'mmpretrain::convnext/convnext-tiny_32xb128_in1k.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

model = dict(backbone=dict(type='mmdet.SBPConvNeXt'))
