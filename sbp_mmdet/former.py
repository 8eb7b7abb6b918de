"""Names of former versions: each says what to write instead."""

from mmdet.registry import HOOKS

from .settings import rewritten
from .surgery import ModelHook

__all__ = ['FUNCTIONS', 'ObjectMasksHook', 'SBPHook', 'SBPModulesHook']

# Functions of the package, which refuses to import them.
FUNCTIONS = {
    'apply_sbp': "write apply_lean(model, preset='paper', ...)",
    'remove_sbp': 'write remove_lean(model)',
    'register_block': 'write an adapter, see sbp_mmdet.adapters.adapter',
}


@HOOKS.register_module()
class SBPHook(ModelHook):
    """Now :class:`.apply.LeanHook`."""

    def __init__(self, **keys):
        raise ValueError(
            f"SBPHook is now LeanHook: write dict(type='LeanHook', {rewritten(keys or dict(preset='exact'))})"
        )


@HOOKS.register_module()
class SBPModulesHook(ModelHook):
    """Gone: checkpointing is exact and stores less in necks and heads."""

    def __init__(self, modules: str | list = ('neck', 'rpn_head'), **keys):
        modules = [modules] if isinstance(modules, str) else [*modules]
        raise ValueError(
            f"SBPModulesHook is gone: write dict(type='CheckpointModulesHook', modules={modules!r}), which is exact "
            'and stores less'
        )


@HOOKS.register_module()
class ObjectMasksHook(ModelHook):
    """Gone with ``sampler='objects'``."""

    def __init__(self, **keys):
        raise ValueError(
            "ObjectMasksHook is gone with sampler='objects', which was no better in AP: leave it out; preset='exact' "
            'stores less'
        )
