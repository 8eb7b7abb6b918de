# ConvNeXt V2-B with the stock recipe of ConvNeXt-T.
_base_ = '../sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'
custom_hooks = [dict(type='LeanHook', preset='exact')]

folder = 'https://download.openmmlab.com/mmclassification/v0/convnext-v2/'
checkpoint = dict(checkpoint=folder + 'convnext-v2-base_3rdparty-fcmae_in1k_20230104-8a798eaf.pth')
backbone = dict(arch='base', use_grn=True, layer_scale_init_value=0.0)
model = dict(backbone=dict(init_cfg=checkpoint, **backbone), neck=dict(in_channels=[128, 256, 512, 1024]))
optim_wrapper = dict(paramwise_cfg=dict(num_layers=12))
