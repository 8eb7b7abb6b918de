# The training of tools/quickstart.sh.
_base_ = './mask-rcnn_convnext-atto_fpn_nuclei.py'

custom_hooks = [dict(type='LeanHook', preset='exact_min')]

max_epochs = 15
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=30),
    dict(type='CosineAnnealingLR', eta_min=1e-5, T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=max_epochs), logger=dict(interval=1))
# Its pictures show the ground truth as well.
pipeline = [*_base_.test_pipeline[:-1], dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]
test_dataloader = dict(dataset=dict(pipeline=[*pipeline, _base_.test_pipeline[-1]]))
