"""Blocks and stems that call convolutions, norms and activations one by one: ResNet, its relatives, HRNet."""

from collections.abc import Callable

import torch
from mmdet.models.backbones import hrnet, regnet, res2net, resnest, resnet, resnext
from torch import Tensor, nn

from ..presets import Settings
from ..surgery import stock_class
from .base import LeanModule, adapter
from .conv_module import ConvNormActBinding, add_shortcut
from .copies import original_class, problem_of_copy
from .parameters import has_trained_parameters
from .pooling import ConvPoolBinding
from .predicate import unsupported
from .resnet_chain import ResidualChainBinding, may_chain

__all__ = ['LeanBasicBlock', 'LeanBottle2neck', 'LeanBottleneck', 'LeanSplitAttention']


class _Convolutional(LeanModule):
    """Base class of adapters of modules that call convolutions, norms and activations one by one."""

    dims = 4
    checkpointed = calls_layers = True
    samples = has_reference = False
    folds_frozen_norms = separable = shares_maps = True

    def layer(self, name: str, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Run a layer of :meth:`bindings`, or the modules' own code if the operation cannot be used.

        Args:
            name (str): Name of the layer.
            x (Tensor): Input, shape (N, C, H, W).
            residual (Tensor | None): Added before the activation, of the output's shape. Default: None.

        Returns:
            Tensor: Output of the layer.
        """
        binding = self.binding(name)
        if binding is None:
            return self._lean.bound.unused[name].run_own_code(x, residual)
        return binding(self.form, x, residual)

    def adds_outside(self, name: str) -> bool:
        """Return whether the last layer was bound without the block's last activation, see :func:`_adds_outside`.

        Args:
            name (str): Name of the last layer.
        """
        bound = self._lean.bound
        return (bound.bindings.get(name) or bound.unused[name]).act is None

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        return problem_of_copy(module)


def _shortcut(block, x):
    """Return the output of a block's shortcut."""
    return x if block.downsample is None else block.downsample(x)


def _adds_outside(block):
    """Return whether a block adds its shortcut outside of an operation, so that modules are called in its own order.

    An operation that adds the output of the shortcut needs it first, while the block calls its last norm first. The
    order decides what running statistics a norm has that is on both paths, and which norms of two processes communicate
    with each other (SyncBN), of which one may run the block's own code. Plugins stand in between.
    """
    if _has_plugins(block) and block.after_conv3_plugin_names:
        return True
    if block.downsample is None:
        return False
    past = {*block.downsample.modules()}
    if any(isinstance(m, nn.SyncBatchNorm) for m in past):
        return True
    return any(m in past for child in block.children() if child is not block.downsample for m in child.modules())


def _has_plugins(block):
    return getattr(block, 'with_plugins', False)  # copies in other projects have no plugins


def _run_plugins(block, number, x):
    """Run the plugins that follow a convolution of a block, with their own code."""
    return block.forward_plugin(x, getattr(block, f'after_conv{number}_plugin_names')) if _has_plugins(block) else x


@adapter(resnet.BasicBlock)
class LeanBasicBlock(_Convolutional):
    """Basic block of ResNet: two convolutions."""

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(
            conv1=ConvNormActBinding(self.conv1, self.norm1, self.relu),
            conv2=ConvNormActBinding(self.conv2, self.norm2, None if _adds_outside(self) else self.relu),
        )

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""
        out = self.layer('conv1', x)
        if self.adds_outside('conv2'):
            return self.relu(add_shortcut(self.layer('conv2', out), _shortcut(self, x)))
        return self.layer('conv2', out, residual=_shortcut(self, x))


def _bindings_of_bottleneck(block, **middle):
    """Return the operations of a bottleneck: its layers, and the whole block as a chain if its modules are known.

    Args:
        block (_Convolutional): The bottleneck.
        **middle (ConvNormActBinding): Layers between the first and the last convolution, by name.
    """
    bindings = dict(
        conv1=ConvNormActBinding(block.conv1, block.norm1, block.relu),
        conv3=ConvNormActBinding(block.conv3, block.norm3, None if _adds_outside(block) else block.relu),
        **middle,
    )
    return bindings | (dict(block=ResidualChainBinding((block,))) if may_chain(block, called=True) else {})


def _run_bottleneck(block: _Convolutional, x: Tensor, middle: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a bottleneck, as a chain if it is one, otherwise layer by layer with the function ``middle`` in between."""
    chain = block.binding('block')
    if chain is not None and x.numel():
        return chain(block.form, x)
    out = _run_plugins(block, 1, block.layer('conv1', x))
    out = _run_plugins(block, 2, middle(out))
    if block.adds_outside('conv3'):
        return block.relu(add_shortcut(_run_plugins(block, 3, block.layer('conv3', out)), _shortcut(block, x)))
    return block.layer('conv3', out, residual=_shortcut(block, x))


@adapter(resnet.Bottleneck, resnext.Bottleneck)
class LeanBottleneck(_Convolutional):
    """Bottleneck of ResNet, ResNeXt and RegNet: three convolutions.

    It is called where it is no member of a :class:`.LeanStage`, for example in a head, and is a chain by itself there.
    """

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return _bindings_of_bottleneck(self, conv2=ConvNormActBinding(self.conv2, self.norm2, self.relu))

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""
        return _run_bottleneck(self, x, lambda x: self.layer('conv2', x))


@adapter(res2net.Bottle2neck)
class LeanBottle2neck(_Convolutional):
    """Bottleneck of Res2Net, which has a second convolution for each group of channels."""

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        layers = zip(self.convs, self.bns, strict=False)  # if there are more than groups, the rest is not called
        middle = {f'convs.{i}': ConvNormActBinding(conv, norm, self.relu) for i, (conv, norm) in enumerate(layers)}
        return _bindings_of_bottleneck(self, **middle)

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""
        return _run_bottleneck(self, x, self.middle)

    def middle(self, x: Tensor) -> Tensor:
        """Run the convolutions of the groups of channels on (N, C, H, W)."""
        groups, outs = torch.split(x, self.width, 1), []
        for i in range(self.scales - 1):
            added = outs and self.stage_type != 'stage'
            outs.append(self.layer(f'convs.{i}', (groups[i] + outs[-1] if added else groups[i]).contiguous()))
        if self.stage_type == 'normal' or self.conv2_stride == 1:
            outs.append(groups[self.scales - 1])
        elif self.stage_type == 'stage':
            outs.append(self.pool(groups[self.scales - 1]))
        return torch.cat(outs, 1)


@adapter(resnest.Bottleneck)
class LeanSplitBottleneck(_Convolutional):
    """Bottleneck of ResNeSt, whose second convolution is a :class:`LeanSplitAttention`."""

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return _bindings_of_bottleneck(self)

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""

        def middle(x):
            x = self.conv2(x)
            return self.avd_layer(x) if self.avg_down_stride else x

        return _run_bottleneck(self, x, middle)


@adapter(resnest.SplitAttentionConv2d)
class LeanSplitAttention(_Convolutional):
    """Split attention of ResNeSt: a convolution, and attention between groups of its channels."""

    checkpointed = calls_layers = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(
            conv=ConvNormActBinding(self.conv, self.norm0, self.relu),
            fc1=ConvNormActBinding(self.fc1, self.norm1, self.relu),
        )

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the convolution on (N, C, H, W)."""
        x = self.layer('conv', x)
        splits = x.unflatten(1, (self.radix, -1))
        gap = splits.sum(1).mean((2, 3), keepdim=True)
        attention = self.fc2(self.layer('fc1', gap))
        attention = self.rsoftmax(attention).view(len(x), self.radix, -1, 1, 1)
        return (attention * splits).sum(1).contiguous()


@adapter(
    *(resnet.ResNet, resnet.ResNetV1d, resnext.ResNeXt, regnet.RegNet, res2net.Res2Net, resnest.ResNeSt),
)
class LeanResNet(_Convolutional):
    """Backbone whose stem of one convolution is changed. Stages and deep stems have adapters of their own."""

    checkpointed = calls_layers = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        layer = ConvNormActBinding(self.conv1, self.norm1, self.relu)
        if _pools(self) and not unsupported(self.relu, 'ReLU') and not unsupported(self.maxpool, 'max pool'):
            layer = ConvPoolBinding(self.conv1, self.norm1, self.relu, self.maxpool)
        return dict(stem=layer)

    def lean_forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run the backbone on images (N, 3, H, W)."""
        stem = self.binding('stem')
        x = self.relu(self.norm1(self.conv1(x))) if stem is None else stem(self.form, x)
        x = self.maxpool(x) if _pools(self) and not isinstance(stem, ConvPoolBinding) else x
        outs = []
        for name in self.res_layers:
            outs.append(x := getattr(self, name)(x))
        return tuple(outs[i] for i in range(len(outs)) if i in self.out_indices)

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`."""
        return (
            cls.is_stock(module)
            and not module.deep_stem
            and any(map(has_trained_parameters, (module.conv1, module.norm1)))
        )


def _pools(backbone):
    return regnet.RegNet not in map(original_class, stock_class(type(backbone)).__mro__)


@adapter(hrnet.HRNet)
class LeanHRNet(_Convolutional):
    """HRNet, of which the stem of two convolutions is changed. Its stages have adapters of their own."""

    checkpointed = calls_layers = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(
            conv1=ConvNormActBinding(self.conv1, self.norm1, self.relu),
            conv2=ConvNormActBinding(self.conv2, self.norm2, self.relu),
        )

    def lean_forward(self, x: Tensor) -> list[Tensor]:
        """Run the backbone on images (N, 3, H, W)."""
        x = self.layer('conv2', self.layer('conv1', x))
        outs = [self.layer1(x)]
        for number in (2, 3, 4):
            transitions = getattr(self, f'transition{number - 1}')
            ins = [outs[i] if module is None else module(outs[-1]) for i, module in enumerate(transitions)]
            outs = getattr(self, f'stage{number}')(ins)
        return outs

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`."""
        stem = module.conv1, module.norm1, module.conv2, module.norm2
        return cls.is_stock(module) and any(map(has_trained_parameters, stem))
