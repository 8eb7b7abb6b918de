# Less memory outside of the backbone, gradients exact: a second _base_ for two-stage detectors with masks (without a
# mask head leave out 'roi_head.mask_head'). The config needs custom_imports = dict(imports=['sbp_mmdet']).
custom_hooks = [
    # These run again in the backward pass.
    dict(
        type='CheckpointModulesHook',
        modules=['neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'],
    ),
    # Mask targets and IoUs piece by piece, without a whole-image copy of each positive sample's mask.
    dict(type='TargetsInChunksHook'),
]
# On several GPUs gradients live in the buckets that are sent, and not twice.
model_wrapper_cfg = dict(type='MMDistributedDataParallel', broadcast_buffers=False, gradient_as_bucket_view=True)
