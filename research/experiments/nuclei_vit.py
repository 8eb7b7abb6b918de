# What SBP costs in AP where attention is thinned out as well: a Mask R-CNN with a plain ViT-T, from scratch.
_base_ = './nuclei.py'
config = '../../configs/nuclei/mask-rcnn_sbp-vit-t_fpn_nuclei.py'
settings = dict(
    _delete_=True,
    none=None,
    exact=dict(preset='exact'),
    sbp=dict(preset='sbp'),
    sampled=dict(preset='sampled'),
)
seeds = [0, 1, 2]
