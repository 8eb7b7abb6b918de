# The subject of the study of gradients on photographs (docs/vit.md); FRUITS_NUTS names the folder of the set.
_base_ = '../nuclei/mask-rcnn_sbp-vit-s14_fpn_nuclei.py'

classes = ('date', 'fig', 'hazelnut')
data = dict(data_root='{{$FRUITS_NUTS:../shared/data/fruits_nuts}}/', metainfo=dict(classes=classes))
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(448, 448), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
model = dict(roi_head=dict(bbox_head=dict(num_classes=3), mask_head=dict(num_classes=3)))
train_dataloader = dict(dataset=dict(ann_file='trainval.json', pipeline=pipeline, **data))
