"""What the tools measure."""

from .cuda_rules import autocast
from .memory import peak_bytes, saved_bytes
from .modes import MODES, backbone_options

__all__ = ['MODES', 'autocast', 'backbone_options', 'peak_bytes', 'saved_bytes']
