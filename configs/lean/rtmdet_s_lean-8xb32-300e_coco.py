_base_ = 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
auto_scale_lr = dict(base_batch_size=256)  # the stock config inherits 16, but its rate is for 8 x 32 images
custom_hooks = [*_base_.custom_hooks, dict(type='LeanHook', preset='exact')]
