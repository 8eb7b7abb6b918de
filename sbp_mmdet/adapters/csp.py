"""CSP layers and their blocks, run as one operation, see :mod:`sbp_mmdet.ops.csp_layer`."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from mmcv.cnn import ConvModule, DepthwiseSeparableConvModule
from mmdet.models.backbones import darknet
from mmdet.models.layers import csp_layer as mmdets
from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.common.kept_maps import add
from ..ops.csp_layer import CSPSettings, csp_layer
from ..presets import Settings
from ..surgery import stock_class
from .base import LeanModule, adapter
from .chain import ChainBinding
from .conv_module import ConvNorm
from .copies import problem_of_copy
from .parameters import CachedSettings, weight_and_bias
from .predicate import unsupported
from .roles import ROLES, any_setting

__all__ = ['CSPBinding', 'LeanCSPLayer', 'LeanShortcutBlock', 'is_known_block']

_LONGEST = 12  # blocks of a chain, whose saved maps are freed when all have had their gradients


def _is_a_whole_layer(layer):
    whole = layer.with_norm and layer.with_activation and tuple(layer.order) == ('conv', 'norm', 'act')
    return None if whole and not layer.with_explicit_padding else 'it is not convolution, norm, activation'


ROLES['CSP block'] = dict.fromkeys((darknet.ResBlock, mmdets.DarknetBottleneck, mmdets.CSPNeXtBlock), problem_of_copy)
ROLES['layer of a CSP block'] = {ConvModule: _is_a_whole_layer}
ROLES['depthwise separable layer'] = {DepthwiseSeparableConvModule: any_setting}
ROLES['attention of a CSP layer'] = {mmdets.ChannelAttention: any_setting}
ROLES['mean of a map'] = {
    nn.AdaptiveAvgPool2d: lambda m: None if m.output_size == 1 else f'its size is {m.output_size}'
}
ROLES['hard sigmoid'] = {nn.Hardsigmoid: any_setting}


@dataclasses.dataclass(frozen=True, eq=False)
class CSPBinding(ChainBinding):
    """Consecutive CSP blocks, or a CSP layer with its blocks.

    Attributes:
        blocks (tuple[nn.Module, ...]): Blocks that :func:`is_known_block` has approved of.
        layer (nn.Module | None): The CSP layer. If ``None``, there are the blocks alone. Default: None.
    """

    layer: nn.Module | None = None

    @staticmethod
    def is_full(blocks: Sequence[nn.Module]) -> bool:
        """See :meth:`.ChainBinding.is_full`."""
        return len(blocks) == _LONGEST

    def __call__(self, form: Form, x: Tensor):
        """Run the layer or the blocks on (N, C, H, W)."""
        settings, tensors = self.layer_inputs(form, x)
        fc = self.layer.attention.fc if getattr(self.layer, 'channel_attention', False) else None
        gate = None if fc is None else weight_and_bias(fc)
        return csp_layer(self._settings(settings), x, tensors, gate)

    @functools.cached_property
    def layers(self):
        """See :attr:`.ChainBinding.layers`."""
        convolutions = [conv for block in self.blocks for conv in _convolutions_of_block(block)]
        if self.layer is not None:
            convolutions = [self.layer.short_conv, self.layer.main_conv, *convolutions, self.layer.final_conv]
        return [ConvNorm(conv.conv, conv.norm, conv.activate) for conv in convolutions]

    @functools.cached_property
    def _settings(self):
        """Settings of the operation, given those of its layers."""
        sizes = tuple(len(_convolutions_of_block(block)) for block in self.blocks)
        adds = tuple(map(_adds, self.blocks))
        return CachedSettings(functools.partial(CSPSettings, blocks=sizes, adds=adds, whole=self.layer is not None))

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        if self.layer is not None:
            yield from _bypassed_in_csp_layer(self.layer)
        for block in self.blocks:
            yield from _bypassed_in_block(block)


def is_known_block(block: nn.Module, called: bool = False) -> bool:
    """Return whether an operation computes exactly what the forward pass of a CSP block computes.

    Args:
        block (nn.Module): Any module.
        called (bool): Whether the block itself is called, so that hooks on it run in any case. Default: False.
    """
    return not any(unsupported(m, role, called=called and m is block) for m, role in _bypassed_in_block(block))


def _bypassed_in_block(block) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of a block that are bypassed, with their roles, up to the first unsupported container."""
    yield block, 'CSP block'
    if not unsupported(block, 'CSP block', called=True):
        yield from _bypassed_in_layer(block.conv1)
        yield from _bypassed_in_layer(block.conv2)


def _bypassed_in_layer(layer):
    if stock_class(type(layer)) is not ConvModule:
        yield layer, 'depthwise separable layer'
        if unsupported(layer, 'depthwise separable layer'):
            return
    for conv in _convolutions(layer):
        yield conv, 'layer of a CSP block'
        if not unsupported(conv, 'layer of a CSP block'):
            yield from ((conv.conv, 'convolution of a chain'), (conv.norm, 'norm of a chain'))
            yield conv.activate, 'activation'


def _bypassed_in_csp_layer(layer):
    """Yield the modules of a CSP layer that are bypassed, without those of its blocks."""
    for conv in (layer.short_conv, layer.main_conv, layer.final_conv):
        yield from _bypassed_in_layer(conv)
    yield layer.blocks, 'list of layers'
    if layer.channel_attention:
        yield layer.attention, 'attention of a CSP layer'
        if not unsupported(layer.attention, 'attention of a CSP layer'):
            yield layer.attention.global_avgpool, 'mean of a map'
            yield from ((layer.attention.fc, 'pointwise with bias'), (layer.attention.act, 'hard sigmoid'))


def _is_known(layer):
    """Return whether an operation computes exactly what the forward pass of a CSP layer computes."""
    if any(unsupported(module, role) for module, role in _bypassed_in_csp_layer(layer)):
        return False
    return all(map(is_known_block, layer.blocks))


def _adds(block):
    """Return whether a block adds its input to its output; Darknet's ``ResBlock`` always does."""
    return getattr(block, 'add_identity', True)


def _convolutions(layer):
    """Return the ``ConvModule`` of a layer, or both of a depthwise separable one."""
    return (layer,) if isinstance(layer, ConvModule) else (layer.depthwise_conv, layer.pointwise_conv)


def _convolutions_of_block(block):
    return [*_convolutions(block.conv1), *_convolutions(block.conv2)]


class _CSP(LeanModule):
    """Base class of adapters of modules that run as one operation, or else call their layers one by one."""

    dims = 4
    samples = has_reference = False
    folds_frozen_norms = separable = shares_maps = True

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the module on (N, C, H, W)."""
        binding = self.binding('whole')
        return binding(self.form, x) if binding is not None and x.numel() else self.one_by_one(x)

    def one_by_one(self, x: Tensor) -> Tensor:
        """Call the layers one after the other, each of which has an adapter of its own."""
        return super(LeanModule, self).forward(x)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        return problem_of_copy(module)


@adapter(mmdets.CSPLayer)
class LeanCSPLayer(_CSP):
    """CSP layer: convolutions side by side, of which one is followed by blocks, and one after both."""

    runs_blocks = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(whole=CSPBinding(tuple(self.blocks), self)) if _is_known(self) else {}

    def watches(self):
        """See :meth:`.LeanModule.watches`."""
        return () if _is_known(self) else self.modules()


@adapter(darknet.ResBlock, mmdets.DarknetBottleneck, mmdets.CSPNeXtBlock)
class LeanShortcutBlock(_CSP):
    """CSP block: two layers and a shortcut."""

    checkpointed = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(whole=CSPBinding((self,))) if is_known_block(self, called=True) else {}

    def watches(self):
        """See :meth:`.LeanModule.watches`."""
        return () if is_known_block(self, called=True) else self.modules()

    def one_by_one(self, x: Tensor) -> Tensor:
        """See :meth:`_CSP.one_by_one`."""
        out = self.conv2(self.conv1(x))
        return add(out, x, self.form.storage) if _adds(self) else out
