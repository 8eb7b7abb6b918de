# The same small Mask R-CNN with a stock ResNet-18 of half the width, its batch norms in training mode: the subject of
# the study of convolutional detectors.
_base_ = './mask-rcnn_convnext-atto_fpn_nuclei.py'

norm_cfg = dict(_delete_=True, type='BN')
model = dict(
    backbone=dict(
        _delete_=True,
        type='ResNet',
        depth=18,
        base_channels=32,
        out_indices=[0, 1, 2, 3],
        frozen_stages=-1,
        norm_eval=False,
    ),
    neck=dict(in_channels=[32, 64, 128, 256], norm_cfg=norm_cfg),
    roi_head=dict(mask_head=dict(norm_cfg=norm_cfg)),
)
