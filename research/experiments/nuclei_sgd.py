# Does the length of SBP's gradient matter? AdamW does not see it, SGD does; the parent clips, here nothing is clipped.
_base_ = './nuclei.py'
options = {
    'optim_wrapper.optimizer': dict(_delete_=True, type='SGD', lr=0.02, momentum=0.9, weight_decay=1e-4),
    'optim_wrapper.clip_grad': None,
}
settings = dict(_delete_=True, none=None, sbp=dict(preset='sbp'))
