"""Adapters: which parts of the forward pass of a module are which operations; one file a family of modules."""

from . import conv_module, convnext, detr, resnet, swin, vit  # noqa: F401  register their adapters
from .base import ADAPTERS, LeanBlock, LeanModule, Place, adapter, adapter_of, bypassed_modules
from .bindings import (
    Binding,
    ChannelMLPBinding,
    LayerNormBinding,
    NormLinearBinding,
    PatchNormBinding,
    SelfAttentionBinding,
    WindowAttentionBinding,
    mlp_of_ffn,
)

__all__ = [
    'ADAPTERS',
    'Binding',
    'ChannelMLPBinding',
    'LayerNormBinding',
    'LeanBlock',
    'LeanModule',
    'NormLinearBinding',
    'PatchNormBinding',
    'Place',
    'SelfAttentionBinding',
    'WindowAttentionBinding',
    'adapter',
    'adapter_of',
    'bypassed_modules',
    'mlp_of_ffn',
]
