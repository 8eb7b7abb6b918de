"""``python -m sbp_mmdet.plan`` is the command ``sbp-mmdet``."""

from .command import main

main()
