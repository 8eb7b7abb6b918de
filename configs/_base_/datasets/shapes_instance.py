# Rendered shapes, written by tools/make_synthetic_coco.py --out data/shapes.
_base_ = 'mmdet::_base_/datasets/coco_instance.py'

data_root = 'data/shapes/'
shapes = dict(data_root=data_root, metainfo=dict(classes=('ellipse', 'rectangle', 'triangle', 'star')))
resize = dict(type='Resize', scale=(128, 128), keep_ratio=True)
train_pipeline = [*_base_.train_pipeline[:2], resize, *_base_.train_pipeline[3:]]
train = dict(ann_file='annotations/instances_train.json', data_prefix=dict(img='images/train/'))
val = dict(ann_file='annotations/instances_val.json', data_prefix=dict(img='images/val/'))
loader = dict(batch_size=8, num_workers=1)
train_dataloader = dict(dataset=dict(**shapes, **train, filter_cfg=dict(min_size=2), pipeline=train_pipeline), **loader)
test_pipeline = [_base_.test_pipeline[0], resize, _base_.test_pipeline[-1]]
val_dataloader = dict(dataset=dict(**shapes, **val, pipeline=test_pipeline), **loader)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
