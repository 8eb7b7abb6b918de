"""The planner: counts of a training step without a GPU, a rehearsal with one, and the command ``sbp-mmdet``."""

import contextlib
import io

# onedl-mmdetection prints lines to stdout when its data sets are imported, and --json writes to stdout for scripts.
with contextlib.redirect_stdout(io.StringIO()):
    import mmdet.datasets  # noqa: F401
