# Does the loss shrink with longer training? Twice the epochs; at first it grew, so `nearest` is asked as well.
_base_ = './nuclei.py'
options = {
    'train_cfg.max_epochs': 24,
    'param_scheduler.1.T_max': 24,
    'train_cfg.val_interval': 2,
}
configs = dict(_delete_=True)
settings = dict(_delete_=True, none=None, zero=dict(keep_ratio=0.5), nearest=dict(keep_ratio=0.5, dropped='nearest'))
