"""The planner: counts of a training step without a GPU, a rehearsal with one, and the command ``sbp-mmdet``."""

import contextlib
import io
import warnings

# onedl-mmdetection prints lines to stdout when its data sets are imported, and --json writes to stdout for scripts. Its
# metrics warn that faster_coco_eval, which is optional, is missing.
with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'faster_coco_eval is not installed')
    import mmdet.datasets
    import mmdet.evaluation  # noqa: F401
