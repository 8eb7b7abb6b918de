"""What the tools measure."""

from .memory import autocast, peak_bytes, saved_bytes
from .modes import MODES, backbone_options

__all__ = ['MODES', 'autocast', 'backbone_options', 'peak_bytes', 'saved_bytes']
