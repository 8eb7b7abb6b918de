# Does SBP cost AP where a training starts from a model that was trained without it? NUCLEI_MODEL names its checkpoint.
_base_ = './nuclei.py'
options = {
    'load_from': '{{$NUCLEI_MODEL:work_dirs/nuclei/none-0/epoch_12.pth}}',
    'optim_wrapper.optimizer.lr': 4e-4,
    'train_cfg.max_epochs': 4,
    'param_scheduler.1.T_max': 4,
}
settings = dict(_delete_=True, none=None, sbp=dict(preset='sbp'))
