"""What is known of a changed module: the operations that are used, and what runs its own code and why."""

from typing import NamedTuple

from torch import nn

from ..ops.common.autograd_function import Form
from ..presets import Settings
from ..surgery import stock_class
from .bindings import Binding
from .bypassed_modules import BypassedModules
from .predicate import (
    fairscale_forward,
    is_hooked_globally,
    is_parametrized,
    is_replaced,
    unsupported,
)

__all__ = ['Bound', 'bind', 'runs_reference']


class Bound(NamedTuple):
    """Operations of a changed module in its present state. They are found once, and again when the state has changed.

    Attributes:
        parts (dict[str, Binding]): The operations that are used.
        reason (str | None): Why the whole module runs its own code. If ``None``, it does not.
        left (list[tuple[nn.Module, str]]): Submodules that run their own code, and why.
        bypassed (BypassedModules): The modules that were asked about, with the state in which they were.
        used (list[nn.Module]): Modules that the used operations bypass.
        reference (bool): See :func:`runs_reference`.
    """

    parts: dict[str, Binding]
    reason: str | None
    left: list[tuple[nn.Module, str]]
    bypassed: BypassedModules
    used: list[nn.Module]
    reference: bool


def bind(mixin, module: nn.Module, settings: Settings, running: bool = False) -> Bound:
    """Find out what an adapter can do in a module as it is now.

    Args:
        mixin (type[LeanModule]): The adapter.
        module (nn.Module): The module, changed or not.
        settings (Settings): The settings of the model.
        running (bool): Whether this is asked in a call of the module. Whatever forward was put into the instance then
            calls that of the adapter. Default: False.

    Returns:
        Bound: The parts that are used, and what runs its own code and why.
    """
    form = settings.preset.form
    reason, reference = _reason(mixin, module, settings, running), runs_reference(mixin, form)
    if reason or reference:
        return Bound({}, reason, [], BypassedModules(module, ()), [], reference)
    parts, unused, used = {}, [], []
    bypasses = [*mixin.bypasses(module)]
    asked = [inside for inside, _ in bypasses]
    left = [(inside, problem) for inside, role in bypasses if (problem := unsupported(inside, role))]
    fatal = bool(left)
    for name, part in mixin.parts(module).items():
        asked += [inside for inside, _ in part.reads(form)]
        usable, problems = part.usable(form, module)
        left += problems
        if usable is None:
            unused.append(name)
        else:
            parts[name] = usable
            wrong = {id(inside) for inside, _ in problems}
            if not usable.shares_modules:
                used += [inside for inside, _ in usable.reads(form) if id(inside) not in wrong]
    if fatal or (unused and not (mixin.separable and parts)):
        names = {id(inside): name for name, inside in module.named_modules()}
        told = ((names.get(id(inside), ''), problem) for inside, problem in left)
        reason = '; '.join(f'{name}: {problem}' if name else problem for name, problem in told)
        return Bound({}, reason, [], BypassedModules(module, asked), [], False)
    used += [] if mixin.shares_modules else [inside for inside, _ in bypasses]
    return Bound(parts, None, left, BypassedModules(module, asked), used, False)


def runs_reference(mixin, form: Form) -> bool:
    """Return whether a module runs its own code because the form is the reference, which its adapter does not have.

    Args:
        mixin (type[LeanModule]): The adapter.
        form (Form): How operations store.
    """
    return form.implementation == 'reference' and not mixin.has_reference


def _reason(mixin, module, settings, running):
    """Return why nothing of a module can be bypassed, whatever is in it."""
    if is_parametrized(module):
        return 'it is parametrized'
    if not mixin.is_stock(module):
        return f'its class, {stock_class(type(module)).__name__}, has a forward pass of its own'
    if runs_reference(mixin, settings.preset.form):
        return None
    if is_hooked_globally():
        return 'hooks of every module are registered (register_module_forward_hook), and its submodules would skip them'
    own = ('forward',) if running or fairscale_forward(module) else ()
    if is_replaced(module, but=(*own, *mixin.callers)):
        return 'its forward pass was replaced'
    return mixin.refusal(module, settings)
