"""Adapters, which bind the modules of a forward pass to operations. Each file has a family of modules."""

from . import (  # noqa: F401  register their adapters
    attention,
    channel_attention,
    codetr,
    conv_module,
    convnext,
    csp,
    dense_head,
    detr,
    feature_pyramid,
    ffn,
    grounding_dino,
    linear,
    mask_head,
    pooling,
    repvgg,
    resnet,
    resnet_chain,
    swin,
    vit,
    vitdet,
)
from .base import ADAPTERS, LeanBlock, LeanModule, adapter, adapter_of
from .bindings import (
    Binding,
    ChannelMLPBinding,
    LayerNormBinding,
    NormLinearBinding,
    PatchNormBinding,
    SelfAttentionBinding,
    mlp_of_ffn,
)
from .bound import Bound, LeanState, bind
from .changes import bypassed_by, modules_bypassed_in, release, take_over
from .roles import add_to_role
from .swin import WindowAttentionBinding

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
    'LeanState',
    'SelfAttentionBinding',
    'WindowAttentionBinding',
    'adapter',
    'adapter_of',
    'add_to_role',
    'bind',
    'bypassed_by',
    'mlp_of_ffn',
    'modules_bypassed_in',
    'release',
    'take_over',
]
