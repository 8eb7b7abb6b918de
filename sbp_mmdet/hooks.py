"""The hooks that a config names: ``LeanHook``, ``CheckpointModulesHook`` and ``TargetsInChunksHook``."""

from collections.abc import Sequence

from mmdet.registry import HOOKS
from mmengine import registry
from torch import nn

from .apply import apply_settings, keep_ratios
from .checkpointing import checkpoint_modules
from .chunked_targets import targets_in_chunks
from .presets import Settings, parse_module_names, refuse_unknown_keys
from .report import ReportingHook
from .surgery import ModelHook, named_submodules, unwrap

__all__ = ['CheckpointModulesHook', 'LeanHook', 'TargetsInChunksHook']


def _register(kind: type[ModelHook]) -> type[ModelHook]:
    """Register a hook with mmdet, and with mmengine, where configs of mmyolo and mmrotate look for it."""
    return registry.HOOKS.register_module()(HOOKS.register_module()(kind))


@_register
class LeanHook(ReportingHook, ModelHook):
    """Hook that trains a detector in less memory, by changing its modules in place; see :func:`.apply.apply_lean`.

    Unless ``modules`` restricts the change, training targets are computed in chunks as well, see
    :func:`.chunked_targets.targets_in_chunks`. When training begins, the log lists what was changed, what was left
    unchanged, and why. Before the first step, the changed modules are compared with their own code (``verify``); the
    log says how far apart they are and how many bytes they save for the backward pass.

    Args:
        preset (str): A key of :data:`.presets.PRESETS`. Default: 'exact'.
        **keys: Further settings, see :class:`.presets.Settings`.

    Raises:
        ValueError: If a preset or key is unknown. When training begins, if the model cannot honour a setting, or if
            there is nothing to change.

    Example:
        ``custom_hooks = [dict(type='LeanHook', preset='exact')]``
    """

    def __init__(self, preset: str = 'exact', **keys):
        self.settings = Settings.parse(dict(preset=preset, **keys), where='LeanHook')
        self.exact = self.settings.preset.gradients == 'exact'

    def apply(self, model: nn.Module) -> str:
        """See :meth:`.surgery.ModelHook.apply`."""
        self.report = apply_settings(unwrap(model), self.settings)
        done = f"preset='{self.settings.preset.name}': {self.report}"
        if self.settings.preset.name == 'none' or self.settings.modules is not None:
            return done
        return f'{done}\n{targets_in_chunks(model)}'

    def before_run(self, runner) -> None:
        """Change the model; called by mmengine's runner."""
        super().before_run(runner)
        self._replace_conv_bn_eval(runner)

    def _replace_conv_bn_eval(self, runner):
        """Turn mmengine's ``efficient_conv_bn_eval`` off where changed modules fold frozen norms themselves.

        It would trace the model by torch.fx after this hook and run a graph of its own instead of the changed modules.
        """
        named = (getattr(runner, 'cfg', None) or {}).get('efficient_conv_bn_eval')
        if named is None or self.settings.preset.form is None:
            return
        named = [named] if isinstance(named, str) else [*named]
        taken = [name for name in named if any(f'{other}.'.startswith(f'{name}.') for other in self.report.changed)]
        if taken:
            runner.cfg.efficient_conv_bn_eval = [name for name in named if name not in taken] or None
            runner.logger.warning(
                f'LeanHook: efficient_conv_bn_eval={taken} is off, because changed modules fold frozen norms into '
                'convolutions themselves; remove it from the config, or name other parts in LeanHook(modules=[...])'
            )

    def keep_ratio(self, model: nn.Module) -> float | None:
        """Return the mean keep ratio of the thinned layers, or ``None`` if there are none."""
        ratios = keep_ratios(unwrap(model)).values()
        return sum(ratios) / len(ratios) if ratios else None


@_register
class CheckpointModulesHook(ModelHook):
    """Hook that checkpoints submodules of the model, see :func:`.checkpointing.checkpoint_modules`.

    Args:
        modules (Sequence[str]): Names of submodules, such as 'neck', 'rpn_head', 'roi_head.bbox_head',
            'roi_head.mask_head'. A list of modules means each of its members.

    Raises:
        ValueError: If ``modules`` is missing or misspelt. When training begins, if the model has no such submodule, or
            one whose forward is never called.

    Example:
        ``custom_hooks = [dict(type='CheckpointModulesHook', modules=['neck', 'rpn_head'])]``
    """

    exact = True

    def __init__(self, modules: Sequence[str] = (), **unknown):
        refuse_unknown_keys('CheckpointModulesHook', unknown, ['modules'])
        if not modules:
            raise ValueError(
                "CheckpointModulesHook needs modules, the names of submodules to checkpoint, such as modules=['neck']"
            )
        self.modules = list(parse_module_names(modules))
        self._looked = False

    def apply(self, model: nn.Module) -> str:
        """See :meth:`.surgery.ModelHook.apply`."""
        names, self._looked = checkpoint_modules(model, self.modules), False
        return f'{", ".join(names)} {"is" if len(names) == 1 else "are"} recomputed in the backward pass'

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        """Warn of modules that the first step did not call: checkpointing them saves nothing."""
        if self._looked:
            return
        self._looked = True
        found = named_submodules(unwrap(runner.model), self.modules)
        if silent := [name for name, module in found if not getattr(module, 'has_run', False)]:
            runner.logger.warning(
                f'CheckpointModulesHook: {", ".join(silent)} did not run in the first step, so checkpointing saves '
                'nothing there; name the submodules whose forward the model calls'
            )


@_register
class TargetsInChunksHook(ModelHook):
    """Hook that computes training targets in chunks, see :func:`.chunked_targets.targets_in_chunks`.

    Args:
        masks (int): Number of masks that are cropped or sampled at a time. Default: 4.
        pairs (int): Number of pairs of a prior and a ground-truth box that are compared at a time. Default: 2**20.

    Raises:
        ValueError: If a key is unknown.

    Example:
        ``custom_hooks = [dict(type='TargetsInChunksHook')]``
    """

    exact = True

    def __init__(self, masks: int = 4, pairs: int = 2**20, **unknown):
        refuse_unknown_keys('TargetsInChunksHook', unknown, ['masks', 'pairs'])
        self.options = dict(masks=masks, pairs=pairs)

    def apply(self, model: nn.Module) -> str:
        """See :meth:`.surgery.ModelHook.apply`."""
        done = targets_in_chunks(model, **self.options)
        return '{done}. {masks} masks and {pairs} pairs at a time'.format(done=done, **self.options)
