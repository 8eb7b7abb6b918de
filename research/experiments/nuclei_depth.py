# Stochastic depth: the paper lowers it where SBP is used. Leaving dropped images out changes no gradient on average.
_base_ = './nuclei.py'
options = {'model.backbone.drop_path_rate': 0.2}
configs = dict(_delete_=True)
settings = dict(
    _delete_=True,
    none=None,
    zero=dict(keep_ratio=0.5),
    skip=dict(keep_ratio=1.0, recompute=True, skip_dropped_images=True),
)
