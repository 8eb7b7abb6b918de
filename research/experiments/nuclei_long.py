# Does the loss shrink with longer training? Twice the epochs.
_base_ = './nuclei.py'
options = {
    'train_cfg.max_epochs': 24,
    'param_scheduler.1.T_max': 24,
    'train_cfg.val_interval': 2,
}
settings = dict(
    _delete_=True,
    none=None,
    int8=dict(preset='int8'),
    sbp=dict(preset='sbp'),
    sampled=dict(preset='sampled', keep_ratio=0.25),
    half=dict(preset='sampled', keep_ratio=0.5),
)
