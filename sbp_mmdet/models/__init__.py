"""What mmdet registers: backbones with SBP, and SBP in neck and heads."""
