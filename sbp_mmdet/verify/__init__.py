"""Verification: each kind of changed module is compared with its own code on the user's device, batch and precision."""
