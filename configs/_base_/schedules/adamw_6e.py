# A short training from scratch, in fp32: mmcv's CPU operators refuse bf16.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

max_epochs = 6
train_cfg = dict(max_epochs=max_epochs, val_interval=3)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-3, weight_decay=0.05), clip_grad=dict(max_norm=10, norm_type=2)
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=100),
    dict(type='CosineAnnealingLR', eta_min=1e-5, T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
