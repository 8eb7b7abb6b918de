"""State of a changed module: its operations, and the submodules that run their own code instead, with the reasons."""

from typing import Any, NamedTuple

from torch import nn

from ..library_code import replaced_code
from ..ops.common.autograd_function import Form
from ..presets import Settings
from ..stochastic_backprop.step_draws import StepDraws, TokenDraws
from ..surgery import stock_class
from .bindings import Binding
from .bypassed_modules import BypassedModules
from .predicate import fairscale_forward, find_problems, is_hooked_globally, is_replaced
from .quantisation import problem_of_preparation
from .row_draws import RowDraws

__all__ = ['Bound', 'LeanState', 'bind', 'lacks_reference']


class Bound(NamedTuple):
    """Operations of a changed module in its present state. They are bound once, and again when the state changes.

    Attributes:
        bindings (dict[str, Binding]): The operations that are used, by name.
        unused (dict[str, Binding]): The operations that cannot be used, by name. Their modules run their own code.
        reason (str | None): Why the whole module runs its own code. If ``None``, it does not.
        left (list[tuple[nn.Module, str]]): Submodules that run their own code, with the reasons.
        bypassed (BypassedModules): The modules that were checked, with their state at that time.
        used (list[nn.Module]): The modules that the used operations bypass.
        lacks_reference (bool): See :func:`lacks_reference`.
    """

    bindings: dict[str, Binding]
    unused: dict[str, Binding]
    reason: str | None
    left: list[tuple[nn.Module, str]]
    bypassed: BypassedModules
    used: list[nn.Module]
    lacks_reference: bool


class LeanState(NamedTuple):
    """State of a changed module, in its attribute ``_lean``.

    Attributes:
        settings (Settings): Settings of the model.
        layer (tuple | None): Layer of the backbone, such as ``(stage, block)`` or ``(stage, 'downsample')``. If
            ``None``, no positions are dropped by stage. Default: None.
        draws (StepDraws | TokenDraws | None): Draws of its backbone, or draws of its own. Default: None.
        name (str): Name of the module in the model. Default: ''.
        row_draws (RowDraws | None): Draws of the sampled rows. Default: None.
        bound (Bound | None): Operations that are used now. Default: None.
        own_forward (Any): The forward that fairscale's checkpointing had set, restored on release. Default: None.
    """

    settings: Settings
    layer: tuple | None = None
    draws: StepDraws | TokenDraws | None = None
    name: str = ''
    row_draws: RowDraws | None = None
    bound: Bound | None = None
    own_forward: Any = None


def bind(mixin, module: nn.Module, settings: Settings, running: bool = False) -> Bound:
    """Find the operations that an adapter can use in a module in its present state.

    Args:
        mixin (type[LeanModule]): The adapter.
        module (nn.Module): The module, changed or not.
        settings (Settings): Settings of the model.
        running (bool): Whether the module is being called. A forward that was set on the instance then evidently calls
            the adapter's, so it is no reason against it. Default: False.

    Returns:
        Bound: The operations, and the modules that run their own code.
    """
    form = settings.preset.form
    unbound = lacks_reference(mixin, form)
    reason = _find_reason(mixin, module, settings, running, unbound)
    if reason or unbound:
        return Bound({}, {}, reason, [], BypassedModules(module, ()), [], unbound)
    bindings, unused, used = {}, {}, []
    bypasses = [*mixin.bypasses(module)]
    checked, left = [inside for inside, _ in bypasses], find_problems(bypasses, called=module)
    fatal = bool(left)
    for name, binding in mixin.bindings(module).items():
        bypassed = [*binding.bypasses(form)]
        modules = [inside for inside, _ in bypassed]
        checked += modules
        usable, problems = binding.usable(form, module, bypassed)
        left += problems
        if usable is None:
            unused[name] = binding
            continue
        bindings[name] = usable
        if not usable.shares_modules:
            used += modules if usable is binding else _bypassed_without(usable, form, problems)
    if fatal or (unused and not (mixin.separable and bindings)):
        names = {id(inside): name for name, inside in module.named_modules()}
        by_problem = {}
        for inside, problem in left:
            by_problem.setdefault(problem, {})[names.get(id(inside), '')] = None
        listed = ((', '.join(filter(None, of)), problem) for problem, of in by_problem.items())
        reason = '; '.join(f'{of}: {problem}' if of else problem for of, problem in listed)
        return Bound({}, {}, reason, [], BypassedModules(module, checked), [], False)
    used += [] if mixin.shares_modules else [inside for inside, _ in bypasses]
    checked += mixin.watches(module)
    return Bound(bindings, unused, None, left, BypassedModules(module, checked), used, False)


def _bypassed_without(binding, form, problems):
    """Return the modules that an operation bypasses, without those that run their own code before it or after it."""
    unsupported = {id(module) for module, _ in problems}
    return [module for module, _ in binding.bypasses(form) if id(module) not in unsupported]


def lacks_reference(mixin, form: Form) -> bool:
    """Return whether the reference form is asked for and an adapter does not have it, so modules run their own code.

    Args:
        mixin (type[LeanModule]): The adapter.
        form (Form): Form of the operations.
    """
    return form.implementation == 'reference' and not mixin.has_reference


def _find_reason(mixin, module, settings, running, class_only):
    """Return why nothing of a module can be bypassed, whatever its submodules are, or ``None``.

    If ``class_only``, the module runs its own code in any case, and only its class is checked.
    """
    if 'parametrizations' in module._modules:
        return 'it is parametrized'
    if not mixin.is_stock(module):
        return f'its class, {stock_class(type(module)).__name__}, has a forward pass of its own'
    if class_only:
        return None
    if is_hooked_globally():
        return 'hooks are registered for all modules (register_module_forward_hook), and its submodules would skip them'
    own = ('forward',) if running or fairscale_forward(module) else ()
    if is_replaced(module, but=(*own, *mixin.callers)):
        return 'its forward pass was replaced'
    if running and not mixin.separable and not mixin.applies_to(module):
        return 'settings of the module have changed to others than the operation computes'
    return problem_of_preparation(module) or replaced_code(stock_class(type(module))) or mixin.refusal(module, settings)
