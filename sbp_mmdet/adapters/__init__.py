"""Adapters: which parts of the forward pass of a module are which operations; one file a family of modules."""

from . import conv_module, convnext, detr, resnet, resnet_chain, swin, vit  # noqa: F401  register their adapters
from .base import ADAPTERS, Block, Lean, Place, adapter, adapter_of
from .bindings import MLP, Attention, Norm, NormLinear, Part, PatchNorm, Windows, ffn_part

__all__ = [
    'ADAPTERS',
    'Attention',
    'Block',
    'Lean',
    'MLP',
    'Norm',
    'NormLinear',
    'Part',
    'PatchNorm',
    'Place',
    'Windows',
    'adapter',
    'adapter_of',
    'ffn_part',
]
