# Optimizer states in 8 bits instead of 32: gradients stay, updates are rounded. Needs bitsandbytes.
_base_ = './cascade-mask-rcnn_sbp-convnext-b_lean.py'

optim_wrapper = dict(optimizer=dict(type='AdamW8bit'))
