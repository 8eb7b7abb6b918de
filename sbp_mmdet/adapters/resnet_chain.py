"""Stages of ResNets and Darknets, whose blocks run as chains, see :mod:`sbp_mmdet.ops.residual_chain`."""

import dataclasses
import functools
from collections.abc import Sequence

import mmengine.model
from mmdet.models.backbones import res2net, resnet
from mmdet.models.layers import ResLayer
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from ..ops.common.autograd_function import Form
from ..ops.common.average_pool import AveragePool
from ..ops.residual_block import BlockSettings
from ..ops.residual_chain import ChainSettings, residual_chain
from ..ops.split_layer import SplitSettings
from ..surgery import stock_class
from . import csp
from .base import LeanModule, adapter
from .chain import ChainBinding
from .conv_module import ConvNorm, layers_of
from .copies import original_class
from .csp import CSPBinding
from .parameters import CachedSettings
from .predicate import cached_answers, find_problems, unsupported
from .roles import ROLES

__all__ = ['LeanStage', 'ResidualChainBinding', 'may_chain']

# Blocks of a chain: their inputs exist at the same time in the backward pass. Of blocks of two convolutions a chain
# saves nothing: their inputs are no larger than those of their last convolutions.
_LONGEST = 6


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualChainBinding(ChainBinding):
    """Consecutive residual blocks, or one, run as one chain.

    Attributes:
        blocks (tuple[nn.Module, ...]): Blocks that :func:`may_chain` has approved of.
    """

    @staticmethod
    def is_full(blocks: Sequence[nn.Module]) -> bool:
        """See :meth:`.ChainBinding.is_full`."""
        return len(blocks) == _LONGEST or _number_of_layers(blocks[0]) == 2

    def __call__(self, form: Form, x: Tensor):
        """Run the blocks on (N, C, H, W)."""
        settings, tensors = self.layer_inputs(form, x)
        return residual_chain(self._settings(settings), x, tensors)

    @functools.cached_property
    def layers(self):
        """See :attr:`.ChainBinding.layers`. The layer of a shortcut follows the others of its block."""
        layers = []
        for block in self.blocks:
            layers += _layers(block)
            if block.downsample is not None:
                *_, conv, norm = block.downsample
                layers.append((conv, norm))
        return [ConvNorm(*layer) for layer in layers]

    @functools.cached_property
    def _settings(self):
        """Settings of the chain, given those of its layers."""
        return CachedSettings(functools.partial(ChainSettings, tuple(map(_settings_of_block, self.blocks))))

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        return [one for block in self.blocks for one in _bypassed_in(block)]


_BLOCKS = {kind for role in ('residual block', 'CSP block') for kind in ROLES[role]}


def _kind_of_chain(block):
    """Return the class of the chains that a block can be part of, or ``None``."""
    return ResidualChainBinding if may_chain(block) else CSPBinding if csp.is_known_block(block) else None


@adapter(ResLayer, res2net.Res2Layer, nn.Sequential, mmengine.model.Sequential)
class LeanStage(LeanModule):
    """Sequence of layers, in which convolutions followed by a norm or an activation are operations.

    Residual or CSP blocks in it run as chains. Other members run their own code, one by one.
    """

    dims = 4
    samples = has_reference = False
    folds_frozen_norms = separable = shares_maps = runs_blocks = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`. A chain is named after its first block, a layer after its convolution."""
        bindings, chain, kind = layers_of(self), [], None
        for name, block in [*self._modules.items(), (None, None)]:
            own = None if block is None else _kind_of_chain(block)
            if chain and (own is not kind or kind.is_full([block for _, block in chain])):
                bindings[chain[0][0]] = kind(tuple(block for _, block in chain))
                chain = []
            chain, kind = [*chain, (name, block)] if own else [], own
        return bindings

    def watches(self):
        """See :meth:`.LeanModule.watches`."""
        blocks = (
            block for block in self.children() if not _kind_of_chain(block) and stock_class(type(block)) in _BLOCKS
        )
        return [inside for block in blocks for inside in block.modules()]

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the members one after the other."""
        done = 0  # number of following members that the latest operation has computed
        for name, module in self._modules.items():
            binding = self.binding(name)
            if done:
                done -= 1
            elif binding is None or (isinstance(binding, ChainBinding) and not (x.dim() == 4 and x.numel())):
                x = module(x)
            else:
                x = binding(self.form, x)
                done = binding.num_members - 1
        return x

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`."""
        roles = 'residual block', 'CSP block'
        blocks = any(not unsupported(block, role) for block in module.children() for role in roles)
        return cls.is_stock(module) and (blocks or bool(cls.bindings(module)))


def may_chain(block: nn.Module, called: bool = False) -> bool:
    """Return whether a block can be part of a chain, because a chain computes exactly what its forward computes.

    Args:
        block (nn.Module): A residual block.
        called (bool): Whether the block itself is called, so that hooks on it run in any case. Default: False.
    """
    answers, question = cached_answers('chains'), (id(block), called)
    if question not in answers:
        answers[question] = not find_problems(_bypassed_in(block), called=block if called else None)
    return answers[question]


def _bypassed_in(block) -> list[tuple[nn.Module, str]]:
    """Return the modules of a block that a chain bypasses, with their roles, up to the first unsupported container."""
    answers = cached_answers('bypassed by chains')
    if id(block) not in answers:
        answers[id(block)] = _find_bypassed_in(block)
    return answers[id(block)]


def _find_bypassed_in(block):
    bypassed = [(block, 'residual block')]
    if unsupported(block, 'residual block', called=True):
        return bypassed
    for conv, norm in _layers(block):
        bypassed += (conv, 'convolution of a chain'), (norm, 'norm of a chain')
    bypassed.append((block.relu, 'ReLU'))
    if _pools_last_group(block):
        bypassed.append((block.pool, 'average pool'))
    if block.downsample is None:
        return bypassed
    bypassed.append((block.downsample, 'shortcut of a chain'))
    if unsupported(block.downsample, 'shortcut of a chain'):
        return bypassed
    *pools, conv, norm = block.downsample
    bypassed += [(pool, 'average pool') for pool in pools]
    bypassed += (conv, 'convolution of a chain'), (norm, 'norm of a chain')
    return bypassed


def _is_split(block):
    """Return whether a block has a convolution for each group of channels, as Res2Net's."""
    return original_class(stock_class(type(block))) is res2net.Bottle2neck


def _layers(block):
    """Return the block's convolutions with their norms."""
    if _is_split(block):
        return [(block.conv1, block.norm1), *zip(block.convs, block.bns, strict=True), (block.conv3, block.norm3)]
    return [(getattr(block, f'conv{i}'), getattr(block, f'norm{i}')) for i in range(1, _number_of_layers(block) + 1)]


def _number_of_layers(block):
    return 2 if original_class(stock_class(type(block))) is resnet.BasicBlock else 3


def _settings_of_block(block):
    pools = [] if block.downsample is None else [*block.downsample][:-2]
    (pool,) = map(_settings_of_pool, pools) if pools else (None,)
    return BlockSettings(len(_layers(block)), block.downsample is not None, pool, _split(block))


def _split(block):
    """Return the settings of a block's split layer, or ``None`` if it has none."""
    if not _is_split(block):
        return None
    pool = _settings_of_pool(block.pool) if _pools_last_group(block) else None
    return SplitSettings(len(block.convs), block.stage_type != 'stage', pool)


def _pools_last_group(block):
    return _is_split(block) and block.stage_type == 'stage' and block.conv2_stride != 1


def _settings_of_pool(pool):
    sizes = map(_pair, (pool.kernel_size, pool.stride, pool.padding))
    return AveragePool(*sizes, pool.ceil_mode, pool.count_include_pad)
