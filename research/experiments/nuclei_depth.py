# Stochastic depth: the paper lowers it where SBP is used. Leaving dropped images out changes no gradient on average.
_base_ = './nuclei.py'
options = {'model.backbone.drop_path_rate': 0.2}
settings = dict(_delete_=True, none=None, sbp=dict(preset='sbp'), skip=dict(preset='exact'))
