"""What mmdet registers: backbones with SBP and their records, and SBP in neck and heads."""

from . import convnext_family, swin_family, vit_family  # noqa: F401  register their records
