"""Stages of residual blocks, whose blocks run as chains (see :mod:`sbp_mmdet.ops.residual_chain`)."""

import itertools
from collections.abc import Iterator

from mmcv.cnn.bricks.wrappers import Conv2d as MMCVConv2d
from mmdet.models.backbones import resnet, resnext
from mmdet.models.layers import ResLayer
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from ..ops.common.autograd_function import Form
from ..ops.conv_norm_act import ConvNormSettings, ConvNormTensors
from ..ops.residual_chain import AveragePool, BlockSettings, BlockTensors, residual_chain
from .base import adapter, kind_of
from .conv_module import Sequence, _hooked, _norm, known

__all__ = ['Stage', 'may_chain']

# The convolutions of a block, by its class.
_BLOCKS = {resnet.BasicBlock: 2, resnet.Bottleneck: 3, resnext.Bottleneck: 3}
_LONGEST = 6  # blocks of a chain: their inputs exist at the same time in the backward pass


@adapter(ResLayer, nn.Sequential)
class Stage(Sequence):
    """A sequence of residual blocks. Blocks that cannot be chained run one by one."""

    runs_blocks = True

    def lean_forward(self, x: Tensor) -> Tensor:
        if not any(kind_of(module) in _BLOCKS for module in self):
            return super().lean_forward(x)
        for chained, blocks in itertools.groupby(self, key=may_chain):
            blocks = [*blocks]
            while blocks:
                length = _LONGEST if chained and x.numel() else 1
                some, blocks = blocks[:length], blocks[length:]
                x = _run_chain(self.form, x, some) if chained and x.numel() else some[0](x)
        return x

    @classmethod
    def members(cls, module: nn.Module) -> Iterator[nn.Module]:
        """The sequence; its blocks have adapters of their own, for those that cannot be chained."""
        if any(kind_of(block) in _BLOCKS for block in module):
            yield from [module] if cls.has_stock_forward(module) else []
        else:
            yield from super().members(module)


def may_chain(block: nn.Module) -> bool:
    """Returns whether a chain computes exactly what the forward pass of a block computes.

    Args:
        block (nn.Module): A member of a stage.
    """
    if kind_of(block) not in _BLOCKS or _hooked(block) or getattr(block, 'with_plugins', False):
        return False
    if kind_of(block.relu) is not nn.ReLU or _hooked(block.relu):
        return False
    if not all(_may_run(*layer) for layer in _layers(block)):
        return False
    return block.downsample is None or _shortcut(block.downsample) is not None


def _layers(block):
    """Returns the block's convolutions with their norms."""
    return [(getattr(block, f'conv{i}'), getattr(block, f'norm{i}')) for i in range(1, _BLOCKS[kind_of(block)] + 1)]


def _may_run(conv, norm):
    if kind_of(conv) not in (nn.Conv2d, MMCVConv2d) or not (known(conv, 'conv') and known(norm, 'norm')):
        return False
    tensors = (norm.weight, norm.bias, getattr(norm, 'running_mean', norm.weight))
    return not any(tensor is None for tensor in tensors)


def _shortcut(downsample):
    """Returns pooling, convolution and norm of a shortcut. None: it consists of other modules."""
    if kind_of(downsample) is not nn.Sequential or _hooked(downsample):
        return None
    *pools, conv, norm = downsample if len(downsample) in (2, 3) else (None, None)
    if conv is None or not _may_run(conv, norm):
        return None
    pool = None
    for module in pools:
        if kind_of(module) is not nn.AvgPool2d or _hooked(module):
            return None
        if module.divisor_override or _pair(module.padding) != (0, 0):
            return None
        sizes = _pair(module.kernel_size), _pair(module.stride)
        pool = AveragePool(*sizes, module.ceil_mode, module.count_include_pad)
    return pool, conv, norm


def _run_chain(form: Form, x: Tensor, blocks: list[nn.Module]) -> Tensor:
    """Runs blocks that :func:`may_chain` has approved of."""
    pairs = [_bind(form, block) for block in blocks]
    return residual_chain(x, *zip(*pairs, strict=True))


def _bind(form, block):
    """Returns settings and tensors of a block. Counts a batch in norms that train, as their own code does."""
    settings, tensors = zip(*(_bind_layer(form, *layer) for layer in _layers(block)), strict=True)
    if block.downsample is None:
        return BlockSettings(settings), BlockTensors(tensors)
    pool, *layer = _shortcut(block.downsample)
    shortcut = _bind_layer(form, *layer)
    return BlockSettings(settings, shortcut[0], pool), BlockTensors(tensors, shortcut[1])


def _bind_layer(form, conv, norm):
    options, tensors = _norm(norm)
    geometry = conv.stride, conv.padding, conv.dilation, conv.groups
    return ConvNormSettings(form, *geometry, **options), ConvNormTensors(None, conv.weight, conv.bias, **tensors)
