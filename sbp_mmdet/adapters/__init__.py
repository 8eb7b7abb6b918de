"""Adapters: which parts of the forward pass of a module are which operations; one file a family of modules."""

from . import conv_module, convnext, detr, resnet, resnet_chain, swin, vit  # noqa: F401  register their adapters
from .base import (
    ADAPTERS,
    Bound,
    LeanBlock,
    LeanModule,
    Place,
    adapter,
    adapter_of,
    bind,
    bypassed_modules,
    release,
    take_over,
)
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
from .predicate import know

__all__ = [
    'ADAPTERS',
    'Binding',
    'Bound',
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
    'bind',
    'bypassed_modules',
    'know',
    'mlp_of_ffn',
    'release',
    'take_over',
]
