"""Blocks and stems that call convolution, norm and activation one by one: ResNet, its relatives, HRNet; CSP blocks."""

from collections.abc import Iterator

import torch
from mmdet.models.backbones import darknet, hrnet, regnet, res2net, resnest, resnet
from mmdet.models.layers import csp_layer
from torch import Tensor, nn

from ..ops.common.kept_maps import add
from .base import adapter
from .conv_module import ConvLean

__all__ = ['BasicBlock', 'Bottle2neck', 'Bottleneck', 'SplitAttention']


class _Residual(ConvLean):
    """Base of blocks with a shortcut. Their ``with_cp`` is off."""

    checkpointed = True

    def identity(self, x: Tensor) -> Tensor:
        """What goes past the convolutions."""
        return x if self.downsample is None else self.downsample(x)

    def plugged(self, number: int, x: Tensor) -> Tensor:
        """``x`` after the plugins that stand behind a convolution; they run their own code."""
        return self.forward_plugin(x, getattr(self, f'after_conv{number}_plugin_names')) if self.with_plugins else x


@adapter(resnet.BasicBlock)
class BasicBlock(_Residual):
    """Two convolutions."""

    def lean_forward(self, x: Tensor) -> Tensor:
        out = self.layer(x, self.conv1, self.norm1, self.relu)
        return self.layer(out, self.conv2, self.norm2, self.relu, residual=self.identity(x))


@adapter(resnet.Bottleneck)
class Bottleneck(_Residual):
    """Three convolutions, of ResNet, ResNeXt and RegNet."""

    def lean_forward(self, x: Tensor) -> Tensor:
        out = self.plugged(1, self.layer(x, self.conv1, self.norm1, self.relu))
        out = self.plugged(2, self.middle(out))
        if self.with_plugins and self.after_conv3_plugin_names:
            return self.relu(self.plugged(3, self.layer(out, self.conv3, self.norm3)) + self.identity(x))
        return self.layer(out, self.conv3, self.norm3, self.relu, residual=self.identity(x))

    def middle(self, x: Tensor) -> Tensor:
        """The second convolution."""
        return self.layer(x, self.conv2, self.norm2, self.relu)


@adapter(res2net.Bottle2neck)
class Bottle2neck(Bottleneck):
    """In Res2Net's the second convolution is one for each part of the channels."""

    @classmethod
    def members(cls, module: nn.Module) -> Iterator[nn.Module]:
        yield from (*super().members(module), *module.convs, *module.bns)

    def middle(self, x: Tensor) -> Tensor:
        *parts, last = torch.split(x, self.width, 1)
        outs = []
        for part, conv, norm in zip(parts, self.convs, self.bns, strict=True):
            if outs and self.stage_type == 'normal':
                part = part + outs[-1]
            outs.append(self.layer(part.contiguous(), conv, norm, self.relu))
        pooled = self.stage_type == 'stage' and self.conv2_stride != 1
        return torch.cat([*outs, self.pool(last) if pooled else last], 1)


@adapter(resnest.Bottleneck)
class _SplitBottleneck(Bottleneck):
    """In ResNeSt's the second convolution is a :class:`SplitAttention`."""

    def middle(self, x: Tensor) -> Tensor:
        out = self.conv2(x)
        return self.avd_layer(out) if self.avg_down_stride else out


@adapter(resnest.SplitAttentionConv2d)
class SplitAttention(ConvLean):
    """Convolution, and attention between groups of its channels."""

    def lean_forward(self, x: Tensor) -> Tensor:
        x = self.layer(x, self.conv, self.norm0, self.relu)
        splits = x.unflatten(1, (self.radix, -1))
        gap = splits.sum(1).mean((2, 3), keepdim=True)
        attention = self.fc2(self.layer(gap, self.fc1, self.norm1, self.relu))
        attention = self.rsoftmax(attention).view(len(x), self.radix, -1, 1, 1)
        return (attention * splits).sum(1).contiguous()


@adapter(darknet.ResBlock, csp_layer.DarknetBottleneck, csp_layer.CSPNeXtBlock)
class _ConvModules(_Residual):
    """Blocks of two ``ConvModule``, which have their own adapter, and a shortcut."""

    @classmethod
    def members(cls, module: nn.Module) -> Iterator[nn.Module]:
        yield module

    def lean_forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.conv1(x))
        return add(out, x, self.form.storage) if getattr(self, 'add_identity', True) else out


class _Stem(ConvLean):
    """Base of backbones that call the layers of their stem one by one."""

    @classmethod
    def members(cls, module: nn.Module) -> Iterator[nn.Module]:
        members = [*super().members(module)] if cls.has_stock_forward(module) else []
        if any(p.requires_grad for inside in members[1:] for p in inside.parameters()):
            yield from members


@adapter(resnet.ResNet)
class _ResNet(_Stem):
    stock = (resnet.ResNet, regnet.RegNet)

    def lean_forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.layer(x, self.conv1, self.norm1, self.relu)
        x = x if isinstance(self, regnet.RegNet) else self.maxpool(x)
        outs = []
        for name in self.res_layers:
            outs.append(x := getattr(self, name)(x))
        return tuple(outs[i] for i in range(len(outs)) if i in self.out_indices)


@adapter(hrnet.HRNet)
class _HRNet(_Stem):
    def lean_forward(self, x: Tensor) -> list[Tensor]:
        x = self.layer(x, self.conv1, self.norm1, self.relu)
        x = self.layer(x, self.conv2, self.norm2, self.relu)
        outs = [self.layer1(x)]
        for number in (2, 3, 4):
            transitions = getattr(self, f'transition{number - 1}')
            ins = [outs[i] if module is None else module(outs[-1]) for i, module in enumerate(transitions)]
            outs = getattr(self, f'stage{number}')(ins)
        return outs
