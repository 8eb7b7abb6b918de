_base_ = 'mmdet::_base_/default_runtime.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

default_hooks = dict(checkpoint=dict(interval=6), logger=dict(interval=20))
randomness = dict(seed=0)
