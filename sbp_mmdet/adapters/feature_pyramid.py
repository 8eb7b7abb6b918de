"""mmdet's feature pyramid network."""

import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmdet.models.necks import FPN
from torch import Tensor, nn

from ..ops.common.row_strips import Convolution, StripSettings
from ..ops.feature_pyramid import LevelTensors, feature_pyramid
from .base import LeanModule, adapter
from .predicate import unsupported

__all__ = ['LeanFPN']


@adapter(FPN)
class LeanFPN(LeanModule):
    """Feature pyramid network without norms. Convolutions of extra levels have adapters of their own."""

    samples = has_reference = False
    shares_maps = True

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        for layers, role in (
            (self.lateral_convs, 'pointwise convolution'),
            ([*self.fpn_convs][: len(self.lateral_convs)], 'convolution that keeps the size'),
        ):
            for layer in layers:
                yield layer, 'convolution alone'
                if not unsupported(layer, 'convolution alone'):
                    yield layer.conv, role

    def accepts(self, inputs: tuple[Tensor, ...]) -> bool:
        """See :meth:`.LeanModule.accepts`. All maps have to be of the same images."""
        used = self._used(inputs)
        known = all(x.dim() == 4 and x.numel() and len(x) == len(used[0]) for x in used)
        return known and len(inputs) == len(self.in_channels)

    def _used(self, inputs):
        return inputs[self.start_level : self.start_level + len(self.lateral_convs)]

    def lean_forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the feature maps of all levels, given those of the backbone."""
        number, levels = len(self.lateral_convs), []
        for x, lateral, output in zip(self._used(inputs), self.lateral_convs, self.fpn_convs, strict=False):
            lateral, output = lateral.conv, output.conv
            levels.append(LevelTensors(x, lateral.weight, lateral.bias, output.weight, output.bias))
        outs = [*feature_pyramid(StripSettings(self.form, Convolution(*_geometry(output))), levels)]
        for i in range(number, self.num_outs):
            if not self.add_extra_convs:
                outs.append(F.max_pool2d(outs[-1], 1, stride=2))
                continue
            source = outs[-1]
            if i == number and self.add_extra_convs == 'on_input':
                source = inputs[self.backbone_end_level - 1]
            elif i > number and self.relu_before_extra_convs:
                source = F.relu(source)
            outs.append(self.fpn_convs[i](source))
        return tuple(outs)

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`. With norms or other interpolation, or with output convolutions that
        differ from each other, the layers are changed one by one.
        """
        if not cls.is_stock(module):
            return False
        outputs = [*module.fpn_convs][: len(module.lateral_convs)]
        layers = [layer for layer in (*module.lateral_convs, *outputs) if isinstance(layer, ConvModule)]
        nearest = module.upsample_cfg == dict(mode='nearest') and module.add_extra_convs != 'on_lateral'
        geometries = [_geometry(layer.conv) for layer in outputs if isinstance(layer, ConvModule)]
        alike = bool(geometries) and all(geometry == geometries[0] for geometry in geometries)
        return nearest and alike and not any(layer.with_norm or layer.with_activation for layer in layers)


def _geometry(conv):
    return conv.padding, conv.dilation, conv.groups
