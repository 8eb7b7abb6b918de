# Without SBP: ViT by ConvNeXt's recipe, as the paper trains it (appendix "Experimental Settings").
_base_ = 'mmpretrain::convnext/convnext-base_32xb128_in1k.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

model = dict(
    backbone=dict(_delete_=True, type='mmdet.SBPViT', arch='base', out_type='cls_token', drop_path_rate=0.5),
    head=dict(in_channels=768),
)
train_dataloader = dict(batch_size=64)  # the paper's, a GPU
no_decay = dict(decay_mult=0.0)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(pos_embed=no_decay, cls_token=no_decay)))
