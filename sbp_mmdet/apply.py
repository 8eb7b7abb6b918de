"""SBP and exact lean training in place, in a model whose config stays as it is.

    custom_hooks = [dict(type='SBPHook', keep_ratio=0.5, recompute=True)]

or, without mmengine's runner, ``report = apply_sbp(model, dict(keep_ratio=0.5))``. What a block's class becomes is
written down in a table, and a block of one's own is added by a few lines:

    from sbp_mmdet.apply import Thin, register_block

    @register_block('my_project.MyBlock')          # or the class itself
    class ThinMyBlock(Thin):
        def thin_forward(self, x):                  # in training; x (N, C, H, W)
            return x + self.on_position(self.mlp, self.spatial(x))

``self.mlp`` must treat each position for itself. Blocks of one parent module are a stage; each stage halves the map of
the one before it. ``Thin.stride`` (4) and ``Thin.rounds_up`` (False) say how the first map comes from the image.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from mmdet.registry import HOOKS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .models.stock_layers import ThinConvNeXtBlock, ThinViTBlock
from .models.swin_layers import ThinSwinBlock
from .models.thin import Thin, thin_out
from .settings import SBPSettings
from .shared_draws import LayerDraws
from .surgery import ModelHook, detectors, mix_out, unwrapped

__all__ = ['BLOCKS', 'Report', 'SBPHook', 'Thin', 'apply_sbp', 'register_block', 'remove_sbp']

# Class of a block, by its module and name, to what is mixed into it.
BLOCKS: dict[str, type[Thin]] = {
    'mmdet.models.backbones.swin.SwinBlock': ThinSwinBlock,
    'mmpretrain.models.backbones.convnext.ConvNeXtBlock': ThinConvNeXtBlock,
    'mmpretrain.models.backbones.swin_transformer.SwinBlock': ThinSwinBlock,
    'mmpretrain.models.backbones.vision_transformer.TransformerEncoderLayer': ThinViTBlock,
}


def register_block(block: str | type[nn.Module]) -> Callable[[type[Thin]], type[Thin]]:
    """Decorates what is to be mixed into a class of blocks; see this module for an example.

    Args:
        block (str | type[nn.Module]): The class, or its module and name.

    Returns:
        Callable: The decorator.
    """

    def register(mixin):
        if not issubclass(mixin, Thin):
            raise ValueError(f'{mixin.__name__} must derive from sbp_mmdet.apply.Thin')
        BLOCKS[_name(block) if isinstance(block, type) else block] = mixin
        return mixin

    return register


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`apply_sbp` did.

    Attributes:
        changed (dict[str, str]): By the name of a submodule of the backbone, what it does now.
        left (dict[str, str]): By name, why a submodule stays as it is.
    """

    changed: dict[str, str]
    left: dict[str, str]

    def __str__(self):
        lines = [f'{len(self.changed)} layers changed, {len(self.left)} left alone']
        for word, found in (('changed', self.changed), ('left alone', self.left)):
            by_reason = {}
            for name, reason in found.items():
                by_reason.setdefault(reason, []).append(name)
            lines += [f'{word}: {", ".join(names)}: {reason}' for reason, names in by_reason.items()]
        return '\n'.join(lines)


def apply_sbp(model: nn.Module, sbp_cfg: dict | None = None) -> Report:
    """Lets the blocks of a model send gradients from some positions (section 3.2), in place.

    Names and shapes of parameters, checkpoints, evaluation and export stay as they are. ``keep_ratio=1.0`` keeps all
    gradients exact and stores less. A model that has been changed is changed anew, by the new settings.

    Args:
        model (nn.Module): A detector, or its backbone. What holds several detectors, such as a student and a teacher,
            is changed in all of them; one that runs in evaluation mode stays plain.
        sbp_cfg (dict | None): See :class:`sbp_mmdet.settings.SBPSettings`; None: its defaults. Default: None.

    Returns:
        Report: What was changed, what was left alone, and why.

    Raises:
        ValueError: For a setting that cannot be honoured, or if there is nothing to change; nothing is changed then.
    """
    plans = {name: _plan(backbone, sbp_cfg or {}) for name, backbone in _backbones(model).items()}
    remove_sbp(model)
    reports = {name: _carry_out(plan) for name, plan in plans.items()}
    if [*reports] == ['']:
        return reports['']
    parts = [(f'{name}.', report) for name, report in reports.items()]
    return Report(
        {prefix + layer: done for prefix, report in parts for layer, done in report.changed.items()},
        {prefix + layer: reason for prefix, report in parts for layer, reason in report.left.items()},
    )


def remove_sbp(model: nn.Module) -> None:
    """The reverse of :func:`apply_sbp`; a model that was not changed stays as it is.

    Args:
        model (nn.Module): A detector, or its backbone.
    """
    for backbone in _backbones(model).values():
        for module in backbone.modules():
            if isinstance(module, Thin):
                mix_out(module, Thin)
                del module._sbp_place
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    if isinstance(getattr(hook, '__self__', None), LayerDraws):
                        del hooks[key]


def _backbones(model):
    """By the name of their detector, see :func:`.surgery.detectors`; a model without one is a backbone."""
    return {name: detector.backbone for name, detector in detectors(model).items()} or {'': unwrapped(model)}


class _Plan(NamedTuple):
    """What is to be changed in a backbone.

    Attributes:
        backbone (nn.Module): What holds all of its blocks.
        kind (type[Thin]): What is mixed into its blocks.
        settings (SBPSettings): The settings.
        layers (dict): Key of a layer to the module and what is mixed into its class.
        left (dict[str, str]): By name, why a submodule stays as it is.
    """

    backbone: nn.Module
    kind: type[Thin]
    settings: SBPSettings
    layers: dict
    left: dict


def _plan(backbone, sbp_cfg):
    """Checks all and changes nothing."""
    if any(getattr(module, 'sbp', None) is not None for module in backbone.modules()):
        raise ValueError(f'{type(backbone).__name__} has sbp_cfg of its own; leave SBPHook out, or sbp_cfg')
    if any('_fsdp_wrapped_module' in module._modules for module in backbone.modules()):
        raise ValueError(
            'the backbone lies in FSDP already, which hides its blocks; call apply_sbp(model, ...) before it is wrapped'
        )
    stages = _stages(backbone)
    if not stages:
        raise ValueError(_nothing(backbone))
    backbone = _owner(backbone, stages)
    depths = tuple(len(blocks) for blocks in stages)
    names = {id(module): name for name, module in backbone.named_modules()}
    kind, single = _mixin(stages[0][0]), len(depths) == 1
    blocks = (round(depths[0] * 2 / 3),) if kind.last else depths if single else None
    absent = ('attention', *kind.absent, *(['downsample'] if single else []))  # attention is exact here
    settings = SBPSettings.parse(sbp_cfg, depths, blocks, absent=absent)
    layers, left = {}, {}
    for i, blocks in enumerate(stages):
        for j, block in enumerate(blocks):
            _take((i, j), block, _mixin(block), settings, names, layers, left)
    if not layers:
        raise ValueError(f'SBP applies to no block of {type(backbone).__name__}: {next(iter(left.values()))}')
    for key, (module, mixin) in kind.others(backbone, settings).items():
        _take(key, module, mixin, settings, names, layers, left)
    if settings.recompute == 'block' and not issubclass(kind, ThinConvNeXtBlock):
        raise ValueError("recompute='block' is there for ConvNeXt only, whose convolution runs again; use True")
    return _Plan(backbone, kind, settings, layers, left)


def _carry_out(plan):
    backbone, kind, settings, layers, left = plan
    getattr(backbone, '_freeze_stages', lambda: None)()  # as mmdet's and mmpretrain's do when training begins
    draws = thin_out(backbone, settings, layers, _stride(backbone, kind), kind.rounds_up, kind.last)
    names = {id(module): name for name, module in backbone.named_modules()}
    ratios, changed, left = draws.model.keep_ratios(), {}, dict(left)
    for key, (module, _) in layers.items():
        if any(p.requires_grad for p in module.parameters()):
            changed[names[id(module)]] = _meaning(ratios.get(key), settings, kind)
        else:
            left[names[id(module)]] = 'frozen'
    return Report(changed, left | _others(backbone, layers, left, names))


def _name(kind):
    return f'{kind.__module__}.{kind.__qualname__}'


def _mixin(module):
    """What is to be mixed into a module; None: nothing."""
    return next((BLOCKS[_name(kind)] for kind in type(module).__mro__ if _name(kind) in BLOCKS), None)


def _stages(backbone):
    """Lists of blocks: those of one parent module, in the model's order."""
    stages = []
    for parent in backbone.modules():
        if blocks := [child for child in parent.children() if _mixin(child)]:
            stages.append(blocks)
    return stages


def _owner(backbone, stages):
    """What holds all blocks and is no mere list of them: the backbone, or the one inside of a wrapper."""
    found, number = backbone, sum(map(len, stages))
    for module in backbone.modules():
        plain = isinstance(module, (nn.ModuleList, nn.Sequential)) or _mixin(module)
        if not plain and sum(1 for m in module.modules() if _mixin(m)) == number:
            found = module  # modules() goes inwards
    return found


def _take(key, module, mixin, settings, names, layers, left):
    """Puts a module into ``layers``, or why not into ``left``."""
    if reason := mixin.refusal(module, settings):
        left[names[id(module)]] = reason
    else:
        layers[key] = (module, mixin)


def _stride(backbone, kind):
    """Pixels for each position of the first stage: the stride of the patch embedding, where it is found."""
    for find in (
        lambda: backbone.patch_embed.projection.stride[0],
        lambda: backbone.downsample_layers[0][0].stride[0],
    ):
        try:
            return find()
        except (AttributeError, TypeError, KeyError):
            continue
    return kind.stride


def _meaning(ratio, settings, kind):
    form = 'reference' if 'implementation' in kind.absent else settings.implementation
    if ratio is not None:
        return f'gradients from {ratio:g} of the positions ({form})'
    return 'exact' + (', stores less' if form == 'fused' else '')


def _others(backbone, layers, left, names):
    """Why the rest of the backbone stays as it is, child by child."""
    known = {names[id(m)] for m, _ in layers.values()} | set(left)
    found = {}
    for name, child in backbone.named_children():
        inside = any(other == name or other.startswith(f'{name}.') for other in known)
        if not inside and any(True for _ in child.parameters()):
            found[name] = _why(child)
    return found


def _why(module):
    if any(isinstance(m, _BatchNorm) for m in module.modules()):
        return 'batch norm looks at all positions, and its activation stores what would be thinned out'
    return 'it has no blocks that SBP is known for'


def _nothing(backbone):
    if hasattr(backbone, 'sbp'):
        return f'{type(backbone).__name__} takes sbp_cfg of its own: set that, and leave SBPHook out'
    known = ', '.join(BLOCKS)
    reasons = ' '.join(f'{name}: {_why(child)}.' for name, child in backbone.named_children())
    return (
        f'SBP applies to no block of {type(backbone).__name__}. {reasons} Known blocks: {known}. '
        'For a block of your own see sbp_mmdet.apply.register_block. Without SBPHook, CheckpointModulesHook and '
        'TargetsInChunksHook save memory in any detector (docs/memory.md)'
    )


@HOOKS.register_module()
class SBPHook(ModelHook):
    """SBP in the backbone of a detector, in place: see :func:`apply_sbp`.

    Args:
        **sbp_cfg: Keys of ``sbp_cfg``, see :class:`sbp_mmdet.settings.SBPSettings`.
    """

    def __init__(self, **sbp_cfg):
        self.sbp_cfg = sbp_cfg
        ratio = sbp_cfg.get('keep_ratio', 0.5)
        every = all(r == 1 for r in (ratio if isinstance(ratio, (list, tuple)) else [ratio]))
        self.exact = every and sbp_cfg.get('storage', 'native') == 'native'

    def apply(self, model: nn.Module) -> str:
        """See :meth:`.surgery.ModelHook.apply`."""
        return str(apply_sbp(model, self.sbp_cfg))
