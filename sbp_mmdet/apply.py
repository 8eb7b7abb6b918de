"""Change of a model in place for lean training, independently of its config.

In a config, ``custom_hooks = [dict(type='LeanHook', preset='exact')]``; without mmengine's runner,
``report = apply_lean(model, preset='exact')``. The table :data:`.adapters.ADAPTERS` lists the classes of modules that
can be changed. A few lines add a class of your own, see :mod:`.adapters.base`.
"""

from torch import nn

from .adapters import LeanModule, LeanState, bypassed_by, release, take_over
from .adapters.predicate import fairscale_forward
from .adapters.row_draws import RowDraws
from .change_plan import modules_to_change, patch_stride, plan_change
from .checkpointed_parts import give_parts_back, parts_to_checkpoint
from .checkpointing import Checkpointed, mix_out_checkpoint, refuse_replays
from .library_code import check_code_once
from .passes import attach_draws, detach_draws, share_maps_within
from .presets import Settings
from .report import FROZEN, NO_BLOCK, UNKNOWN, Report
from .stochastic_backprop.masks import format_keep_ratio
from .stochastic_backprop.step_draws import StepDraws, ThinnedStages, TokenDraws
from .surgery import Mixin, mix_in, mix_out, unwrap
from .verify.first_pass import FirstPass, verify_at_first_pass

__all__ = ['Report', 'apply_lean', 'keep_ratios', 'remove_lean']


def apply_lean(model: nn.Module, preset: str = 'exact', **keys) -> Report:
    """Change the modules of a model in place, so that they save less for the backward pass.

    Names and shapes of parameters, checkpoints, evaluation and export do not change. Calling this function again
    replaces the settings.

    Args:
        model (nn.Module): A detector or a backbone. In a model of several detectors, such as a student and a teacher,
            all of them are changed; a detector in evaluation mode runs its own code anyway.
        preset (str): 'exact', 'exact_min', 'int8', 'sampled' or 'sbp'; for comparison 'none', 'with_cp' or 'reference'.
            Default: 'exact'.
        **keys: ``keep_ratio``, ``sampler``, ``blocks``, ``downsample``, ``attention``, ``skip_dropped_images``,
            ``modules`` and ``verify``, see :class:`.presets.Settings`.

    Returns:
        Report: The changed modules, the unchanged ones, and the reasons.

    Raises:
        ValueError: If a setting cannot be honoured or there is nothing to change. The model is unchanged then.

    Example:
        >>> print(apply_lean(model, preset='exact'))
    """
    settings = Settings.parse(dict(preset=preset, **keys), where='apply_lean')
    model = unwrap(model)
    report = apply_settings(model, settings)
    verify_at_first_pass(model, settings, report)
    return report


@check_code_once()
def apply_settings(model: nn.Module, settings: Settings) -> Report:
    """Apply checked settings to a model without wrappers, and do not verify it; see :func:`apply_lean`.

    Args:
        model (nn.Module): The model, changed in place.
        settings (Settings): The settings.

    Returns:
        Report: See :func:`apply_lean`.

    Raises:
        ValueError: See :func:`apply_lean`.
    """
    chosen = modules_to_change(model, settings)
    plan = None if settings.preset.name == 'none' else plan_change(model, settings, chosen)
    before = _get_state(model)
    try:
        _restore(model, [*_changed_around(model, chosen, plan), *chosen.values()])
        report = _carry_out(model, settings, plan, chosen) if plan else Report({}, {}, {})
        refuse_replays(model)
        return report
    except BaseException:
        _restore_state(before)
        raise


# Attributes that this package sets on changed modules, and the forward of fairscale that it may remove.
_ATTRIBUTES = frozenset(('_lean', 'step_draws', '_verification', '_inside', 'has_run', 'forward'))


def _get_state(model):
    """Return the class of each module and the attributes that this package has set on it."""
    state = []
    for module in model.modules():
        keys = _ATTRIBUTES.intersection(vars(module))
        state.append((module, type(module), {key: vars(module)[key] for key in keys} if keys else {}))
    return state


def _restore_state(before):
    """Restore the state that :func:`_get_state` has returned."""
    for module, kind, attributes in before:
        module.__class__ = kind
        for key in _ATTRIBUTES:
            vars(module).pop(key, None)
        vars(module).update(attributes)


def remove_lean(model: nn.Module) -> None:
    """Undo :func:`apply_lean`. A model that was not changed is left unchanged.

    Args:
        model (nn.Module): A detector or a backbone.
    """
    model = unwrap(model)
    _restore(model, model.modules())


def _restore(model, modules):
    for module in modules:
        if not isinstance(module, Mixin):
            continue
        if isinstance(module, FirstPass):
            mix_out(module, FirstPass)
            vars(module).pop('_verification', None)
        mix_out_checkpoint(module, _CheckpointedBlock)
        release(module)
        give_parts_back(module)
    detach_draws(model, draws_of(model))
    share_maps_within(model)


def _changed_around(model, chosen, plan):
    """Return changed modules that an earlier call chose, and that run modules of this one without calling them.

    They would go on with the settings of the earlier call. With their own code, they call what is inside of them.
    """
    inside = {*plan.bounds} if plan else set()
    inside |= {key for key, module in chosen.items() if isinstance(module, LeanModule)}
    others = (m for m in model.modules() if isinstance(m, LeanModule) and id(m) not in chosen)
    return [other for other in others if not inside.isdisjoint(map(id, bypassed_by(other)))]


def keep_ratios(model: nn.Module) -> dict[tuple, float]:
    """Return the keep ratios of the layers that a model's backbone thins.

    Args:
        model (nn.Module): A backbone, or a model with one.

    Returns:
        dict[tuple, float]: Keep ratios by layer, ``(stage, block)`` or ``(stage, 'downsample')``; stages count from 0.
        Frozen layers and ratios of 1 are omitted.
    """
    ratios = {}
    for draws in draws_of(model):
        ratios |= draws.stages.keep_ratios()
    return ratios


def draws_of(model: nn.Module) -> list[StepDraws]:
    """Return the draws of a model's changed backbones.

    Args:
        model (nn.Module): A backbone, or a model with one.
    """
    states = (module._lean for module in model.modules() if isinstance(module, LeanModule))
    return [*{id(state.draws): state.draws for state in states if isinstance(state.draws, StepDraws)}.values()]


class _CheckpointedBlock(Checkpointed):
    """Block that ``preset='with_cp'`` checkpoints."""

    def extra_repr(self):
        return ', '.join(filter(None, (super().extra_repr(), "preset='with_cp'")))


def _carry_out(model, settings, plan, chosen):
    changed, left = {}, dict(plan.left)
    row_draws = RowDraws() if settings.preset.gradients == 'sampled' else None
    names = {id(module): name for name, module in model.named_modules()}

    frozen = _frozen_in_training(model)

    def change(module, mixin, state, meaning):
        name = names[id(module)]
        if settings.preset.form is None:
            mix_in(module, _CheckpointedBlock)
        else:
            take_over(module, mixin, state._replace(name=name, row_draws=row_draws, bound=plan.bounds[id(module)]))
        parameters = _nearest_parameters(model, name)
        trains = not parameters or not frozen.issuperset(map(id, parameters))
        (changed if trains else left)[name] = meaning if trains else FROZEN

    for owner, kind, layers, ratios, _, name in plan.backbones:
        modules = {key: module for key, (module, _) in layers.items()}
        heads = _num_heads(plan.bounds, modules)
        stride = patch_stride(owner) or kind.stride
        draws = StepDraws(ThinnedStages(settings, modules, ratios, stride, kind.rounds_up, heads, name))
        for key, (module, mixin) in layers.items():
            if settings.preset.form or mixin.checkpointed:
                change(
                    module,
                    mixin,
                    LeanState(settings, key, draws),
                    _describe_change(settings, ratios.get(key), module, mixin),
                )
        if settings.preset.form is not None and draws.stages.any_random():
            attach_draws(owner, draws)
    for module, mixin in plan.others:
        ratio = mixin.token_ratio(settings)
        state = LeanState(settings, draws=TokenDraws(settings) if ratio else None)
        change(module, mixin, state, _describe_change(settings, ratio, module, mixin))
    if settings.preset.checkpoints:
        for part, mixin in [*parts_to_checkpoint(model, chosen, settings.preset.checkpoints)]:
            mix_in(part, mixin)
            changed[names[id(part)]] = 'exact, recomputed in the backward pass'
            left.pop(names[id(part)], None)
    if settings.preset.form is not None and settings.preset.form.implementation == 'fused':
        share_maps_within(model)
    for bound in plan.bounds.values():
        for inside, reason in bound.left:
            if names[id(inside)] not in changed:
                left[names[id(inside)]] = reason
    left |= _explain_unchanged(model, changed, left, chosen, settings.preset)
    return Report(changed, left, {name: type(model.get_submodule(name)).__name__ for name in changed | left})


def _num_heads(bounds, modules):
    """Return the number of attention heads of a block, or ``None`` if no block can drop heads."""
    bound = [bounds[id(module)] for module in modules.values() if id(module) in bounds]
    bindings = (binding for one in bound for binding in one.bindings.values())
    return next((binding.num_heads for binding in bindings if binding.by_heads), None)


def _nearest_parameters(model, name):
    """Return the parameters of a module or, if it has none (as a pool), of the nearest module around it that has."""
    while not (parameters := [*model.get_submodule(name).parameters()]) and name:
        name = name.rpartition('.')[0]
    return parameters


def _frozen_in_training(model):
    """Return the ids of the parameters that get no gradient in training.

    mmdet's backbones freeze their stages in ``train()``, which a runner calls later. So it is called here once, and its
    effects on the model are undone.
    """
    modes = [(module, module.training) for module in model.modules()]
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for module, _ in modes:
            if hasattr(type(module), '_freeze_stages') or hasattr(type(module), '_freeze_blocks'):
                module.train()
        return {id(p) for p in model.parameters() if not p.requires_grad}
    finally:
        for module, mode in modes:
            module.training = mode
        for p, requires_grad in before:
            p.requires_grad = requires_grad  # its method refuses parameters of lazy modules


def _describe_change(settings, ratio, module, mixin):
    preset = settings.preset
    if preset.form is None:
        return 'recomputed in the backward pass'
    off = ' (with_cp=True is switched off, it would only take time)' if getattr(module, 'with_cp', False) else ''
    if fairscale_forward(module):
        off = ' (checkpointing by num_cp is switched off, it would only take time)'
    if ratio is not None:
        return f'gradients from {format_keep_ratio(ratio)} of the positions, preset {preset.name}{off}'
    if settings.preset.gradients == 'sampled' and mixin.samples:
        return f'stores less, gradients of weights from {float(settings.keep_ratio):.4g} of the rows{off}'
    if preset.form.implementation == 'reference':
        return f'exact, in plain autograd{off}'
    if preset.form.storage == 'int8':
        return f'stores less, in eight bits; gradients up to 2 % off{off}'
    return f'exact, stores less{off}'


def _explain_unchanged(model, changed, left, chosen, preset):
    """Return why the rest of the model is unchanged, child by child."""
    known = {*changed, *left}
    reasons = {}

    def reason(module):
        if not any(id(inside) in chosen for inside in module.modules()):
            return 'modules=[...] does not name it'
        return UNKNOWN if preset.form else NO_BLOCK

    def look(module, prefix, depth):
        for name, child in module.named_children():
            path = f'{prefix}{name}'
            if path in known or not any(p.requires_grad for p in child.parameters()):
                continue
            if any(other.startswith(f'{path}.') for other in known) and depth:
                look(child, f'{path}.', depth - 1)
            elif not any(other.startswith(f'{path}.') for other in known):
                reasons[path] = reason(child)

    if '' not in known:
        look(model, '', 2)
    return reasons
