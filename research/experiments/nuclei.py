# What presets cost in AP where objects are small: a small Mask R-CNN with ConvNeXt, from scratch on microscope images
# of nuclei. docs/research/accuracy.md shows what came out. A setting is an sbp_cfg; None is the plain backbone.
config = '../../configs/nuclei/mask-rcnn_sbp-convnext-atto_fpn_nuclei.py'
options = {'train_cfg.max_epochs': 12, 'param_scheduler.1.T_max': 12, 'default_hooks.checkpoint.max_keep_ckpts': 2}
settings = dict(
    none=None,
    exact=dict(preset='exact'),
    exact_min=dict(preset='exact_min'),
    int8=dict(preset='int8'),
    sampled=dict(preset='sampled'),
    eighth=dict(preset='sampled', keep_ratio=0.125),
    half=dict(preset='sampled', keep_ratio=0.5),
    sbp=dict(preset='sbp'),
    random=dict(preset='sbp', sampler='random'),
    quarter=dict(preset='sbp', keep_ratio=0.25),
)
seeds = [0, 1, 2, 3, 4]
