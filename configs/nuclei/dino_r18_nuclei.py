# A small DINO, trained from scratch on microscope images of cell nuclei: 64 channels, three layers each. The subject of
# research/loss_curves.py. It needs onedl-mmdetection: mmdet 3.3 has DINOs of 256 channels only.
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)

c, hidden, gn = 64, 256, dict(type='GN', num_groups=8)
attention, ffn = dict(embed_dims=c), dict(embed_dims=c, feedforward_channels=hidden)
model = dict(
    num_queries=200,
    test_cfg=dict(max_per_img=100),
    backbone=dict(
        depth=18, base_channels=32, frozen_stages=-1, norm_eval=False, norm_cfg=dict(requires_grad=True), init_cfg=None
    ),
    neck=dict(in_channels=[64, 128, 256], out_channels=c, norm_cfg=gn),
    encoder=dict(num_layers=3, layer_cfg=dict(self_attn_cfg=attention, ffn_cfg=ffn)),
    decoder=dict(num_layers=3, layer_cfg=dict(self_attn_cfg=attention, cross_attn_cfg=attention, ffn_cfg=ffn)),
    positional_encoding=dict(num_feats=c // 2),
    bbox_head=dict(num_classes=1, embed_dims=c),
)
nuclei = dict(
    data_root='{{$NUCLEI:../shared/data/nuclei}}/',
    metainfo=dict(classes=('nucleus',)),
    ann_file='train.json',
    data_prefix=dict(img='images/'),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomCrop', crop_size=(192, 192)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(**nuclei, filter_cfg=dict(min_size=2), pipeline=train_pipeline),
)
optim_wrapper = dict(optimizer=dict(lr=5e-4), paramwise_cfg=dict(_delete_=True))
param_scheduler = [dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50)]
