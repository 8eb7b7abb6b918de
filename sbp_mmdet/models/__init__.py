"""Backbones that mmdet registers: plain networks that apply adapters to themselves where ``sbp_cfg`` says so."""
