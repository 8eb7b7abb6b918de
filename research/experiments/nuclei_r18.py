# What exact and eight-bit convolutions cost in AP: a small Mask R-CNN with a stock ResNet-18, from scratch, its batch
# norms in training mode. Short, so that two CPU cores train it. A setting is what LeanHook is given; None is stock.
config = '../../configs/nuclei/mask-rcnn_r18_fpn_nuclei.py'
options = {
    'train_cfg.max_epochs': 4,
    'train_cfg.val_interval': 4,
    'param_scheduler.1.T_max': 4,
    'train_dataloader.dataset.pipeline.2.crop_size': (128, 128),
    'default_hooks.checkpoint.interval': 1,
    'default_hooks.checkpoint.max_keep_ckpts': 2,
}
settings = dict(none=None, exact=dict(preset='exact'), int8=dict(preset='int8'))
seeds = [0, 1, 2]
