"""Verification: every kind of changed module runs beside its own code, on the user's device, batch and precision."""
