# A second _base_ for two-stage detectors with masks: checkpointing outside of the backbone, with exact gradients.
# Without a mask head, leave out 'roi_head.mask_head'. The config needs custom_imports = dict(imports=['sbp_mmdet']).
custom_hooks = [
    dict(
        type='CheckpointModulesHook',
        modules=['neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'],
    ),
    # Computes mask targets and IoUs in chunks, without a copy of each positive sample's mask at image size.
    dict(type='TargetsInChunksHook'),
]
# With several GPUs, gradients are views of DDP's communication buckets instead of copies.
model_wrapper_cfg = dict(type='MMDistributedDataParallel', broadcast_buffers=False, gradient_as_bucket_view=True)
