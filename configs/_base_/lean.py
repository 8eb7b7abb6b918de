# A second _base_ for any detector: it trains with exact gradients in less memory. A config whose other _base_ sets
# custom_imports or custom_hooks states these lines itself, because two bases may not set the same key.
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
custom_hooks = [dict(type='LeanHook', preset='exact')]
