# What SBP costs in AP where objects are small: a small Mask R-CNN with ConvNeXt, from scratch on microscope images of
# nuclei. docs/accuracy.md shows what came out. A setting is an sbp_cfg; None is no SBP.
config = '../configs/nuclei/mask-rcnn_sbp-convnext-atto_fpn_nuclei.py'
options = {'train_cfg.max_epochs': 12, 'param_scheduler.1.T_max': 12, 'default_hooks.checkpoint.max_keep_ckpts': 2}
settings = dict(
    none=None,
    zero=dict(keep_ratio=0.5),
    nearest=dict(keep_ratio=0.5, dropped='nearest'),
    pool=dict(keep_ratio=0.5, dropped='pool'),
    random=dict(keep_ratio=0.5, sampler='random'),
    quarter=dict(keep_ratio=0.25),
    exact=dict(keep_ratio=1.0, recompute=True),
    int8=dict(keep_ratio=1.0, recompute=True, storage='int8'),
)
settings['pool-objects'] = dict(keep_ratio=0.5, dropped='pool', sampler='objects')
settings['nearest-objects'] = dict(keep_ratio=0.5, dropped='nearest', sampler='objects')
settings['pool-objects-quarter'] = dict(keep_ratio=0.25, dropped='pool', sampler='objects')
configs = dict.fromkeys(
    [label for label in settings if 'objects' in label],
    '../configs/nuclei/mask-rcnn_sbp-convnext-atto_fpn_nuclei-objects.py',
)
seeds = [0, 1, 2, 3, 4]
reach = {'box AP': 0.35, 'box AP medium': 0.2}
