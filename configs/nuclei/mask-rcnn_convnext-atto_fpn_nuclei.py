# Without SBP: a small Mask R-CNN on cell nuclei, from scratch.
_base_ = [
    '../_base_/models/mask-rcnn_convnext-atto_fpn.py',
    '../_base_/datasets/nuclei_instance.py',
    '../_base_/schedules/adamw_6e.py',
    '../_base_/small_runtime.py',
]

model = dict(
    # Crops are not padded in training, nor images in evaluation: boxes were found in padding, which training never had.
    data_preprocessor=dict(pad_size_divisor=8),
    # Nuclei are about 20 pixels large: anchors of 12 pixels upwards. The finest map of the pyramid has a stride of 4.
    rpn_head=dict(anchor_generator=dict(scales=[3])),
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1)),
    train_cfg=dict(rpn_proposal=dict(nms_pre=400, max_per_img=200), rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=400, max_per_img=200), rcnn=dict(max_per_img=150)),
)
train_cfg = dict(val_interval=1)
