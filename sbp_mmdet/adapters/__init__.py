"""Adapters: which parts of the forward pass of a module are which operations; one file a family of modules."""

from . import conv, convnext, resnet, swin, transformer, vit  # noqa: F401  register their adapters
from .adapter import ADAPTERS, Block, Lean, Place, adapter, adapter_of
from .parts import MLP, Attention, Norm, NormLinear, Part, PatchNorm, Windows, ffn_part

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
