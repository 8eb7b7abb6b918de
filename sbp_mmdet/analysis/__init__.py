"""What the tools measure."""

from .memory import saved_bytes

__all__ = ['saved_bytes']
