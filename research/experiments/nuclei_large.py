# Do larger objects suffer less? The same images twice as large, and the anchors: nuclei are about 40 pixels then.
_base_ = './nuclei.py'
options = {
    'model.rpn_head.anchor_generator.scales': [6],
    'train_dataloader.dataset.pipeline': [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        dict(type='Resize', scale_factor=2.0),
        dict(type='RandomCrop', crop_size=(256, 256)),
        dict(type='RandomFlip', prob=[0.3, 0.3], direction=['horizontal', 'vertical']),
        dict(type='PackDetInputs'),
    ],
    'val_dataloader.dataset.pipeline.1.scale_factor': 2.0,
    'test_dataloader.dataset.pipeline.1.scale_factor': 2.0,
    'train_cfg.val_interval': 3,  # four times the pixels
}
settings = dict(_delete_=True, none=None, sbp=dict(preset='sbp'))
