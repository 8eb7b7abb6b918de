# The same detector, fine-tuned with the backbone's batch norms in evaluation mode, their affine part, the stem and the
# first stage frozen, as stock configs train. NUCLEI_R18 names the checkpoint it starts from.
_base_ = './nuclei_r18.py'
options = {
    'load_from': '{{$NUCLEI_R18:work_dirs/nuclei_r18/none-0/epoch_4.pth}}',
    'model.backbone.norm_eval': True,
    'model.backbone.norm_cfg': dict(type='BN', requires_grad=False),
    'model.backbone.frozen_stages': 1,
    'optim_wrapper.optimizer.lr': 4e-4,
    'train_cfg.max_epochs': 2,
    'train_cfg.val_interval': 2,
    'param_scheduler.1.T_max': 2,
}
