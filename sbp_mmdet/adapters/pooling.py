"""Max pooling, alone and after a convolution with a ReLU, and VGG, which calls its layers one by one."""

import dataclasses
import functools

import mmcv.cnn
from mmdet.models.backbones import SSDVGG
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from ..ops.common.autograd_function import Form
from ..ops.max_pool import LARGEST_WINDOW, PoolSettings, PoolTensors, max_pool
from ..presets import Settings
from .base import LeanModule, adapter
from .bindings import Binding
from .conv_module import ConvNormActBinding
from .predicate import unsupported
from .roles import ROLES

__all__ = ['ConvPoolBinding', 'LeanMaxPool', 'LeanVGG']


def _check_window_size(pool):
    if pool.return_indices:
        return 'it returns indices'
    height, width = _pair(pool.kernel_size)
    return None if height * width <= LARGEST_WINDOW else f'its windows have more than {LARGEST_WINDOW} positions'


_POOLS = (nn.MaxPool2d, mmcv.cnn.MaxPool2d)
ROLES['max pool'] = dict.fromkeys(_POOLS, _check_window_size)


def _run_pool(form, pool, x, relu=False):
    geometry = map(_pair, (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    return max_pool(PoolSettings(form, *geometry, pool.ceil_mode, relu), PoolTensors(x))


@adapter(*_POOLS)
class LeanMaxPool(LeanModule):
    """Max pooling that saves the place of each maximum in its window, in one byte."""

    dims = 4
    samples = has_reference = False

    def lean_forward(self, x: Tensor) -> Tensor:
        """Pool a map (N, C, H, W)."""
        return _run_pool(self.form, self, x) if x.numel() else super(LeanModule, self).forward(x)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        return _check_window_size(module)


@dataclasses.dataclass(frozen=True, eq=False)
class ConvPoolBinding(Binding):
    """``pool(relu(norm(conv(x))))``, which saves neither the pool's input nor the ReLU's output.

    Attributes:
        conv (nn.Module): Convolution.
        norm (nn.Module | None): Norm. If ``None``, there is none.
        relu (nn.ReLU): ReLU.
        pool (nn.MaxPool2d): Max pooling.
    """

    conv: nn.Module
    norm: nn.Module | None
    relu: nn.Module
    pool: nn.Module

    @functools.cached_property
    def _layer(self):
        return ConvNormActBinding(self.conv, self.norm)

    @property
    def num_members(self) -> int:
        """See :attr:`.ConvNormActBinding.num_members`."""
        return 3 + (self.norm is not None)

    def __call__(self, form: Form, x: Tensor):
        """Run the layer on (N, C, H, W)."""
        return _run_pool(form, self.pool, self._layer(form, x), relu=True)

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        yield from self._layer.bypasses(form)
        yield from ((self.relu, 'ReLU'), (self.pool, 'max pool'))


@adapter(mmcv.cnn.VGG, SSDVGG)
class LeanVGG(LeanModule):
    """VGG backbone: convolutions, ReLUs and max pools. A ReLU in front of a max pool saves nothing."""

    dims = 4
    samples = has_reference = False
    separable = shares_maps = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`. The name of an operation is the index of its convolution."""
        layers, ends, bindings, i = [*self.features], _output_indices(self), {}, 0
        while i < len(layers):
            binding = None if unsupported(layers[i], 'convolution') else _layer(layers[i:], i, ends)
            if binding:
                bindings[str(i)] = binding
            i += binding.num_members if binding else 1
        return bindings

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`. The list of layers is never called."""
        yield self.features, 'list of layers'

    def lean_forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the backbone on images (N, 3, H, W)."""
        outs, ends, i = [], _output_indices(self), 0
        while i < len(self.features):
            binding = self.binding(str(i))
            x = self.features[i](x) if binding is None else binding(self.form, x)
            i += binding.num_members if binding else 1
            if i - 1 in ends:
                outs.append(x)
        return outs[0] if len(outs) == 1 else tuple(outs)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        return 'it has a classifier' if module.num_classes > 0 and not isinstance(module, SSDVGG) else None


def _output_indices(vgg):
    """Return the indices of the layers whose outputs are outputs of the backbone."""
    if isinstance(vgg, SSDVGG):
        return set(vgg.out_feature_indices)
    ends = [end for _, end in vgg.range_sub_modules]
    return {end - 1 for i, end in enumerate(ends) if i in vgg.out_indices}


def _layer(layers, i, ends):
    """Return the operation of a convolution and of the layers after it that it can compute.

    Args:
        layers (list[nn.Module]): Layers of the backbone from the convolution on.
        i (int): Index of the convolution.
        ends (set[int]): See :func:`_output_indices`. An operation does not go beyond one of these layers.
    """
    conv, *behind = layers[: next((n + 1 for n in range(len(layers)) if i + n in ends), len(layers))]
    norm = behind.pop(0) if behind and not unsupported(behind[0], 'norm of a map') else None
    act = behind.pop(0) if behind and not unsupported(behind[0], 'activation') else None
    if act is not None and behind and not unsupported(act, 'ReLU') and not unsupported(behind[0], 'max pool'):
        return ConvPoolBinding(conv, norm, act, behind[0])
    return ConvNormActBinding(conv, norm, act)
