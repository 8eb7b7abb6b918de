# A small Mask R-CNN, trained from scratch on microscope images of cell nuclei: small objects, many in an image. It is
# the subject of the study of accuracy (docs/research/accuracy.md). The environment variable NUCLEI names the folder of
# the set.
_base_ = '../sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'

model = dict(
    # Crops are not padded in training, nor images in evaluation: boxes were found in padding that no training had seen.
    data_preprocessor=dict(pad_size_divisor=8),
    # Nuclei are about 20 pixels large: anchors of 12 pixels upwards. The finest map of the pyramid has a stride of 4.
    rpn_head=dict(anchor_generator=dict(scales=[3])),
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1)),
    train_cfg=dict(rpn_proposal=dict(nms_pre=400, max_per_img=200), rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=400, max_per_img=200), rcnn=dict(max_per_img=150)),
)

data_root = '{{$NUCLEI:../shared/data/nuclei}}/'
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
    dict(type='Resize', scale_factor=1.0),  # as they are; the heads want to know the factor
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
# Small images are read in no time: no processes beside the training's own.
loader = dict(batch_size=4, num_workers=0, persistent_workers=False)
train_dataloader = dict(
    **loader, dataset=dict(**nuclei, ann_file='train.json', filter_cfg=dict(min_size=2), pipeline=train_pipeline)
)
val_dataloader = dict(**loader, dataset=dict(**nuclei, ann_file='val.json', pipeline=test_pipeline))
val_dataloader['batch_size'] = 1  # images of several sizes would be padded to the largest
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'val.json')
test_evaluator = val_evaluator
train_cfg = dict(val_interval=1)
