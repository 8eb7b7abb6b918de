# Exact gradients in less memory, for any detector: import it after the detector's own config.
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
custom_hooks = [dict(type='LeanHook', preset='exact')]
