"""``SBPViT``: a plain vision transformer whose last blocks backpropagate through a subset of the tokens or heads.

Names and shapes of the parameters are those of timm's ``VisionTransformer``. There is no dropout.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn.bricks import DropPath
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn

from .layers import LayerNorm2d
from .lean_backbone import TRUNCATED_NORMAL, LeanBackbone
from .position_embedding import fit_positions, interpolate_positions
from .weights import rename_weights

__all__ = ['ARCHS', 'SBPViT', 'ViTBlock']

EPS = 1e-6  # eps of all layer norms, as in timm's ViT, DeiT, MAE and DINOv2
# arch -> (blocks, channels, attention heads)
ARCHS = {
    'tiny': (12, 192, 3),
    'small': (12, 384, 6),
    'base': (12, 768, 12),
    'large': (24, 1024, 16),
}
OUT_TYPES = ('featmap', 'cls_token', 'avg_featmap')


class LayerScale(nn.Module):
    """Layer scale: a product of the channels with a parameter.

    Args:
        channels (int): Number of channels C.
        value (float): Initial value.
    """

    def __init__(self, channels: int, value: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Scale tokens (..., C)."""
        return x * self.gamma


class Holder(nn.Module):
    """Container that gives its modules timm's parameter names. The block around it calls the modules.

    Args:
        **children (nn.Module): The modules by name.
    """

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class ViTBlock(BaseModule):
    """Attention, then the MLP, each after a layer norm and with a residual connection.

    Args:
        channels (int): Number of channels C.
        num_heads (int): Number of attention heads.
        hidden (int): Width of the MLP's hidden layer.
        qkv_bias (bool): Whether queries, keys and values have a bias.
        layer_scale_init_value (float): Initial layer scale. If 0, there is none.
        drop_path_rate (float): Stochastic depth rate of attention and MLP each.
        with_cp (bool): Whether the block is checkpointed.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        hidden: int,
        *,
        qkv_bias: bool,
        layer_scale_init_value: float,
        drop_path_rate: float,
        with_cp: bool,
    ):
        super().__init__()

        def scale():
            return LayerScale(channels, layer_scale_init_value) if layer_scale_init_value else nn.Identity()

        def drop():
            return DropPath(drop_path_rate) if drop_path_rate else nn.Identity()

        self.norm1 = nn.LayerNorm(channels, eps=EPS)
        self.attn = Holder(qkv=nn.Linear(channels, 3 * channels, bias=qkv_bias), proj=nn.Linear(channels, channels))
        self.ls1, self.drop_path1 = scale(), drop()
        self.norm2 = nn.LayerNorm(channels, eps=EPS)
        self.mlp = Holder(fc1=nn.Linear(channels, hidden), fc2=nn.Linear(hidden, channels))
        self.act = nn.GELU()
        self.ls2, self.drop_path2 = scale(), drop()
        self.num_heads, self.with_cp = num_heads, with_cp

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on tokens (N, L, C)."""
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x):
        return self.feed(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        """Run the attention with its residual connection on tokens (N, L, C)."""
        q, k, v = self.attn.qkv(self.norm1(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.drop_path1(self.ls1(y))

    def feed(self, x: Tensor) -> Tensor:
        """Run the MLP with its residual connection on tokens (N, L, C)."""
        return x + self.drop_path2(self.ls2(self.mlp.fc2(self.act(self.mlp.fc1(self.norm2(x))))))


class PatchEmbed(nn.Module):
    """Embedding of image patches as tokens.

    Args:
        in_channels (int): Number of channels of the images.
        channels (int): Number of channels C of the tokens.
        patch_size (int): Side of a patch, in pixels.
    """

    def __init__(self, in_channels: int, channels: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, channels, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C', H, W) to (N, C, ceil(H / patch_size), ceil(W / patch_size)), with zero padding of the image."""
        right, below = -x.shape[3] % self.patch_size, -x.shape[2] % self.patch_size
        # F.pad would copy the image even if there is nothing to pad, and the copy would be saved.
        return self.proj(F.pad(x, (0, right, 0, below)) if right or below else x)


def _scale(index, channels):
    """Build the layer from the map of tokens to one of four scales (ViTDet's simple feature pyramid)."""
    if index == 0:
        return nn.Sequential(
            nn.ConvTranspose2d(channels, channels // 2, 2, stride=2),
            LayerNorm2d(channels // 2, EPS),
            nn.GELU(),
            nn.ConvTranspose2d(channels // 2, channels // 4, 2, stride=2),
        )
    if index == 1:
        return nn.Sequential(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2))
    return nn.Identity() if index == 2 else nn.MaxPool2d(2, ceil_mode=True)


@MODELS.register_module()
class SBPViT(LeanBackbone, BaseModule):
    """Vision transformer (ViT) for memory-efficient training by Stochastic Backpropagation (SBP).

    The forward pass is ViT's. Without ``sbp_cfg`` it is a plain network. With ``sbp_cfg``, its blocks train lean: with
    ``preset='exact'`` they save less memory, and with ``preset='sbp'`` attention and MLP of the last blocks
    backpropagate through a kept subset of the patches, which is redrawn at every step and the same for all blocks.
    Class and register tokens are always kept. The key ``blocks`` is two thirds of the blocks by default, 8 of 12 as in
    the paper (section 5.1).

    Parameter names and shapes are those of timm's ``VisionTransformer`` and of DeiT, MAE and DINOv2 files.

    Args:
        arch (str | dict): 'tiny', 'small', 'base', 'large', or a dict with ``num_layers``, ``embed_dims``,
            ``num_heads``, and ``feedforward_channels`` (default: 4 ``embed_dims``). Default: 'base'.
        img_size (int | tuple[int, int]): Height and width of images for which the position embedding has its size, in
            pixels. It is interpolated to the size of each batch. Default: 224.
        patch_size (int): Side of a patch, in pixels. Images are padded with zeros to whole patches. Default: 16.
        in_channels (int): Number of channels of the images. Default: 3.
        with_cls_token (bool): Whether there is a class token. Default: True.
        register_tokens (int): Number of register tokens, which have no position embedding. Default: 0.
        qkv_bias (bool): Whether queries, keys and values have a bias. Default: True.
        layer_scale_init_value (float): Initial layer scale. If 0, there is none. Default: 0.0.
        drop_path_rate (float): Stochastic depth rate of the last block, growing linearly from 0. Default: 0.0.
        out_type (str): 'featmap' for feature maps (N, C, H, W); for classification 'cls_token' or 'avg_featmap' (the
            average over the patches), shape (N, C). All follow the last norm. Default: 'featmap'.
        out_indices (Sequence[int]): Scales that 'featmap' returns: 0 to 3, for strides of 1/4, 1/2, 1 and 2 patches,
            made from the last map, with C / 4, C / 2, C and C channels. Default: (0, 1, 2, 3).
        frozen_blocks (int): Number of leading blocks that are frozen, with the embedding. Default: 0.
        interpolate_mode (str): Interpolation of the position embedding. Default: 'bicubic'.
        pretrained_grid (tuple[int, int] | None): Rows and columns of patches of the position embedding in a file that
            is loaded. If ``None``, it has the grid of this model if the number of patches is the same, and a square one
            otherwise. Default: None.
        with_cp (bool): Whether every block is checkpointed; ignored for blocks that ``sbp_cfg`` changes. Default:
            False.
        drop_rate, attn_drop_rate (float): Accepted for configs that have them, must be 0: there is no dropout.
            Default: 0.0.
        sbp_cfg (dict | None): ``preset`` and keys of :class:`sbp_mmdet.presets.Settings`. If ``None``, the backbone is
            plain. Default: None.
        init_cfg (dict | list[dict] | None): mmengine's initialisation. If ``None``, weights are drawn from a truncated
            normal distribution. Default: None.

    Raises:
        ValueError: If a value cannot be honoured. The message has the value and the remedy.

    Example:
        ``backbone=dict(_delete_=True, type='SBPViT', arch='base', sbp_cfg=dict(preset='exact'))``
    """

    def __init__(
        self,
        arch: str | dict = 'base',
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        with_cls_token: bool = True,
        register_tokens: int = 0,
        qkv_bias: bool = True,
        layer_scale_init_value: float = 0.0,
        drop_path_rate: float = 0.0,
        out_type: str = 'featmap',
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_blocks: int = 0,
        interpolate_mode: str = 'bicubic',
        pretrained_grid: tuple[int, int] | None = None,
        with_cp: bool = False,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        sbp_cfg: dict | None = None,
        init_cfg: dict | list | None = None,
    ):
        super().__init__(init_cfg=init_cfg or [*TRUNCATED_NORMAL])
        depth, self.channels, self.num_heads, hidden = _parse_arch(arch)
        self.depths = (depth,)
        _check(depth, drop_rate, attn_drop_rate, out_type, out_indices, frozen_blocks)
        self.out_type, self.out_indices, self.frozen_blocks = out_type, tuple(out_indices), frozen_blocks
        self.patch_size, self.interpolate_mode = patch_size, interpolate_mode
        self.pretrained_grid = None if pretrained_grid is None else tuple(pretrained_grid)
        self.patch_embed = PatchEmbed(in_channels, self.channels, patch_size)
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.grid = (height // patch_size, width // patch_size)  # of the position embedding
        if not min(self.grid):
            raise ValueError(f'img_size={img_size!r} holds no patch of patch_size={patch_size}')
        self.prefix = int(with_cls_token) + register_tokens  # tokens in front of the patches'
        self.cls_token = _tokens(1, self.channels) if with_cls_token else None
        self.reg_token = _tokens(register_tokens, self.channels) if register_tokens else None
        self.pos_embed = _tokens(int(with_cls_token) + self.grid[0] * self.grid[1], self.channels)
        options = dict(qkv_bias=qkv_bias, layer_scale_init_value=layer_scale_init_value, with_cp=with_cp)
        rates = torch.linspace(0, drop_path_rate, depth, device='cpu').tolist()
        self.blocks = nn.ModuleList(
            ViTBlock(self.channels, self.num_heads, hidden, drop_path_rate=rate, **options) for rate in rates
        )
        self.norm = LayerNorm2d(self.channels, EPS)
        if out_type == 'featmap':
            for i in self.out_indices:
                self.add_module(f'scale{i}', _scale(i, self.channels))
        self._freeze_blocks()
        self.train_lean(sbp_cfg)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run the backbone.

        Args:
            x (Tensor): Images, shape (N, 3, H, W).

        Returns:
            tuple[Tensor, ...]: For each of ``out_indices`` a feature map, or one (N, C), see ``out_type``.

        Raises:
            ValueError: If an image is smaller than a patch.
        """
        if min(x.shape[-2:]) < self.patch_size:
            raise ValueError(
                f'images of {x.shape[-2]} x {x.shape[-1]} pixels are smaller than a patch of {self.patch_size}; '
                'resize or pad them'
            )
        x, size = self._embed(x)
        for block in self.blocks:
            x = block(x)
        return self._outputs(x, size)

    def _embed(self, x):
        """Return tokens with their positions, and (height, width) of their grid."""
        x = self.patch_embed(x)
        size = tuple(x.shape[-2:])
        x = x.flatten(2).transpose(1, 2) + self._positions_for(size)
        front = [] if self.cls_token is None else [self.cls_token + self.pos_embed[:, :1]]
        front += [] if self.reg_token is None else [self.reg_token]
        return torch.cat([*(tokens.to(x.dtype).expand(len(x), -1, -1) for tokens in front), x], 1), size

    def _positions_for(self, size):
        """Return the position embedding of the patches, interpolated if the grid has another size."""
        patches = self.pos_embed[:, self.pos_embed.shape[1] - self.grid[0] * self.grid[1] :]
        return interpolate_positions(patches, self.grid, size, self.interpolate_mode)

    def _outputs(self, x, size):
        if self.out_type == 'cls_token':
            return (self.norm.tokens(x[:, 0]),)
        if self.out_type == 'avg_featmap':
            return (self.norm.tokens(x[:, self.prefix :].mean(1)),)
        # mmcv's RoIAlign reads memory as contiguous (N, C, H, W), but maps made of tokens have channels last.
        x = self.norm(x[:, self.prefix :].transpose(1, 2).unflatten(2, size)).contiguous()
        return tuple(getattr(self, f'scale{i}')(x) for i in self.out_indices)

    def _freeze_blocks(self):
        if not self.frozen_blocks:
            return
        for token in (self.cls_token, self.reg_token, self.pos_embed):
            if token is not None:
                token.requires_grad_(False)
        for module in (self.patch_embed, *self.blocks[: self.frozen_blocks]):
            module.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> 'SBPViT':
        """Set training or evaluation mode; frozen blocks stay in evaluation mode."""
        super().train(mode)
        self._freeze_blocks()
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Load weights with other names, and position embeddings of other sizes or without that of the class token."""
        rename_weights(self, state_dict, prefix, 'vit')
        given = state_dict.get(prefix + 'pos_embed')
        if isinstance(given, Tensor) and given.dim() == 3 and given.shape != self.pos_embed.shape:
            fitted = fit_positions(given, self.pos_embed, self.grid, self.pretrained_grid, self.interpolate_mode)
            state_dict[prefix + 'pos_embed'] = fitted
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the depth of a parameter for layer-wise learning-rate decay, as mmpretrain counts it.

        Args:
            param_name (str): Name of the parameter.
            prefix (str): Prefix of the backbone's parameters. Default: ''.

        Returns:
            tuple[int, int]: The layer's depth and the number of layers.
        """
        last = self.depths[0] + 1
        kind, *rest = param_name.removeprefix(prefix).split('.')
        if not param_name.startswith(prefix):
            return last, last + 1
        if kind in ('cls_token', 'reg_token', 'pos_embed', 'patch_embed'):
            return 0, last + 1
        return (int(rest[0]) + 1 if kind == 'blocks' else last), last + 1


def _tokens(number, channels):
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, number, channels), std=0.02))


def _check(depth, drop_rate, attn_drop_rate, out_type, out_indices, frozen_blocks):
    for name, rate in dict(drop_rate=drop_rate, attn_drop_rate=attn_drop_rate).items():
        if rate:
            raise ValueError(
                f'{name}={rate!r}: SBPViT has no dropout; set it to 0 and use drop_path_rate to regularise'
            )
    if out_type not in OUT_TYPES:
        raise ValueError(f'out_type={out_type!r} is unknown; choose one of {OUT_TYPES}')
    if not isinstance(out_indices, Sequence) or not out_indices or not {*out_indices} <= {0, 1, 2, 3}:
        raise ValueError(
            f'out_indices={out_indices!r} must be a list of scales from 0 to 3: strides of 1/4, 1/2, 1 and 2 patches'
        )
    if not isinstance(frozen_blocks, int) or not 0 <= frozen_blocks <= depth:
        raise ValueError(f'frozen_blocks={frozen_blocks!r} must be a whole number from 0 to {depth}')


def _parse_arch(arch):
    """Return the numbers of blocks, channels and attention heads, and the width of the MLP."""
    if isinstance(arch, str):
        if arch not in ARCHS:
            raise ValueError(
                f'arch={arch!r} is unknown; choose one of {list(ARCHS)} or give num_layers, embed_dims and num_heads'
            )
        depth, channels, heads = ARCHS[arch]
        return depth, channels, heads, 4 * channels
    required = ('num_layers', 'embed_dims', 'num_heads')
    if not isinstance(arch, dict) or not {*required} <= set(arch) <= {*required, 'feedforward_channels'}:
        raise ValueError(f'arch={arch!r} must have {required}, and may have "feedforward_channels"')
    depth, channels, heads = (arch[key] for key in required)
    if channels % heads:
        raise ValueError(f'arch: num_heads={heads} must divide embed_dims={channels}')
    return depth, channels, heads, arch.get('feedforward_channels', 4 * channels)
