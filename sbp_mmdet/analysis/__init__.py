"""What the tools measure."""

from .cuda_rules import autocast
from .memory import peak_bytes, saved_bytes

__all__ = ['autocast', 'peak_bytes', 'saved_bytes']
