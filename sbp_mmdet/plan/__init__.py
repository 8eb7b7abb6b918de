"""Bytes of a training step, counted without a GPU, and the planner: ``sbp-mmdet plan CONFIG --budget 8GiB``."""
