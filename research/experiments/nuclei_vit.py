# What SBP costs in AP where attention is thinned out as well: a Mask R-CNN with a plain ViT-T, from scratch.
_base_ = './nuclei.py'
config = '../configs/nuclei/mask-rcnn_sbp-vit-t_fpn_nuclei.py'
configs = dict(_delete_=True)
settings = dict(_delete_=True, none=None, zero=dict(keep_ratio=0.5), pool=dict(keep_ratio=0.5, dropped='pool'))
seeds = [0, 1]
