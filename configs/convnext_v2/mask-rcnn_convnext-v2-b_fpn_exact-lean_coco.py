# ConvNeXt V2-B with the stock recipe of ConvNeXt-T. GRN looks at all positions, so all are kept: exact, but lean.
_base_ = '../sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'

folder = 'https://download.openmmlab.com/mmclassification/v0/convnext-v2/'
checkpoint = dict(checkpoint=folder + 'convnext-v2-base_3rdparty-fcmae_in1k_20230104-8a798eaf.pth')
backbone = dict(arch='base', use_grn=True, layer_scale_init_value=0.0, sbp_cfg=dict(preset='exact'))
model = dict(backbone=dict(init_cfg=checkpoint, **backbone), neck=dict(in_channels=[128, 256, 512, 1024]))
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.95, num_layers=12), optimizer=dict(lr=1e-4))
