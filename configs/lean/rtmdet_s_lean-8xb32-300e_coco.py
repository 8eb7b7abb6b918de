_base_ = 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
custom_hooks = [*_base_.custom_hooks, dict(type='LeanHook', preset='exact')]
