"""Pieces for pure Python configs: ``with read_base(): from sbp_mmdet.configs.exact import *``."""
