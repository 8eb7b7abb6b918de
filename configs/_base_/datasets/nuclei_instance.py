# Microscope images of cell nuclei: small objects, many in an image. examples/nuclei has 80 of them; the environment
# variable NUCLEI names the folder of another copy, with the same layout.
_base_ = 'mmdet::_base_/datasets/coco_instance.py'

data_root = '{{$NUCLEI:examples/nuclei}}/'
nuclei = dict(data_root=data_root, metainfo=dict(classes=('nucleus',)), data_prefix=dict(img='images/'))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomCrop', crop_size=(256, 256)),
    dict(type='RandomFlip', prob=[0.3, 0.3], direction=['horizontal', 'vertical']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale_factor=1.0),  # keeps the size; the heads need the scale factor
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
# Small images load quickly, so the loaders need no processes of their own.
loader = dict(num_workers=0, persistent_workers=False)
train = dict(**nuclei, ann_file='train.json', filter_cfg=dict(min_size=2), pipeline=train_pipeline)
train_dataloader = dict(**loader, batch_size=4, dataset=train)
# One image at a time, as in the parent: a batch of different sizes would be padded to the largest.
val_dataloader = dict(**loader, dataset=dict(**nuclei, ann_file='val.json', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'val.json')
test_evaluator = val_evaluator
