"""Backbones that are registered with mmdet: plain networks that apply adapters to themselves with ``sbp_cfg``."""
