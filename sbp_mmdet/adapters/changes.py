"""Change of single modules: an adapter is mixed in, and removed again."""

from torch import nn

from ..surgery import mix_in, mix_out
from .base import LeanModule
from .bound import LeanState, bind
from .predicate import fairscale_forward

__all__ = ['bypassed_by', 'modules_bypassed_in', 'release', 'take_over']


def take_over(module: nn.Module, mixin: type[LeanModule], state: LeanState) -> None:
    """Mix an adapter into a module, so that it trains lean.

    Args:
        module (nn.Module): The module; changed in place.
        mixin (type[LeanModule]): The adapter.
        state (LeanState): State of the changed module.
    """
    if state.settings.preset.form.implementation == 'fused' and (forward := fairscale_forward(module)):
        del module.forward
        state = state._replace(own_forward=forward)
    mix_in(module, mixin)
    module._lean = state


def release(module: nn.Module) -> None:
    """Reverse :func:`take_over`. A module that was not changed is left unchanged.

    Args:
        module (nn.Module): The module; changed in place.
    """
    if isinstance(module, LeanModule):
        mix_out(module, LeanModule)
        state = vars(module).pop('_lean')
        if state.own_forward is not None:
            module.forward = state.own_forward


def bypassed_by(module: LeanModule) -> set[nn.Module]:
    """Return the modules that the operations of a changed module run without calling them.

    Args:
        module (LeanModule): The changed module.
    """
    state = module._lean
    bound = bind(type(module), module, state.settings, running=True)
    bypassed = (
        inside for binding in bound.bindings.values() for inside, _ in binding.bypasses(state.settings.preset.form)
    )
    others = (inside for inside, _ in module.bypasses()) if bound.reason is None else ()
    return {*bypassed, *others} - {module}


def modules_bypassed_in(model: nn.Module) -> set[nn.Module]:
    """Return the modules that changed modules of a model bypass. Hooks on one of them switch its operation off.

    Args:
        model (nn.Module): A model, changed or not.
    """
    changed = [module for module in model.modules() if isinstance(module, LeanModule)]
    bypassed = ((module, inside) for module in changed for inside in module._lean.bound.bypassed.modules)
    return {inside for module, inside in bypassed if inside is not module}  # an activation is called itself
