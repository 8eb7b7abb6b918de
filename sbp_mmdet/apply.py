"""Changes a model in place for lean training, whatever its config is.

    custom_hooks = [dict(type=preset='exact')]

or, without mmengine's runner, ``report = apply_lean(model, preset='exact')``. What a module's class becomes is written
down in a table, :data:`.adapters.ADAPTERS`; a class of one's own is added by a few lines, see :mod:`.adapters.adapter`.
"""

from torch import nn

from .adapters import LeanModule, Place, release, take_over
from .adapters.predicate import fairscale_forward
from .change_plan import modules_to_change, plan_change
from .checkpointed_parts import give_parts_back, parts_to_checkpoint
from .checkpointing import Checkpointed, refuse_replays
from .passes import close_drawing, hand_on_within, open_drawing
from .presets import Settings
from .report import NO_BLOCK, UNKNOWN, Report
from .stochastic_backprop.step_draws import RowDraws, StepDraws, ThinnedStages, TokenDraws
from .surgery import mix_in, mix_out, unwrapped
from .verify.first_pass import FirstPass, verify_at_first_pass

__all__ = ['Report', 'apply_lean', 'keep_ratios', 'remove_lean']


def apply_lean(model: nn.Module, preset: str = 'exact', **keys) -> Report:
    """Let the modules of a model store less for the backward pass, in place.

    Names and shapes of parameters, checkpoints, evaluation and export stay as they are. A model that has been changed
    is changed anew, by the new settings.

    Args:
        model (nn.Module): A detector, or its backbone. What holds several detectors, such as a student and a teacher,
            is changed in all of them; one that runs in evaluation mode trains nothing and stays plain.
        preset (str): 'exact', 'int8', 'sampled', 'sbp'; to compare with 'none', 'with_cp', 'reference'. Default:
            'exact'.
        **keys: keep_ratio, sampler, blocks, downsample, attention, skip_dropped_images, modules, verify: see
            :class:`.presets.Settings`.

    Returns:
        Report: What was changed, what was left alone, and why.

    Raises:
        ValueError: For a setting that cannot be honoured, or if there is nothing to change; nothing is changed then.

    Example:
        ``print(apply_lean(model, preset='exact'))``
    """
    settings = Settings.parse(dict(preset=preset, **keys), where='apply_lean')
    model = unwrapped(model)
    report = apply_settings(model, settings)
    verify_at_first_pass(model, settings, report)
    return report


def apply_settings(model: nn.Module, settings: Settings) -> Report:
    """Apply checked settings to a model that is not wrapped; see :func:`apply_lean`."""
    chosen = modules_to_change(model, settings)
    plan = None if settings.preset.name == 'none' else plan_change(model, settings, chosen)
    before = _state_of(model)
    try:
        _restore(model, chosen.values())
        report = _carry_out(model, settings, plan, chosen) if plan else Report({}, {}, {})
        refuse_replays(model)
        return report
    except BaseException:
        _put_back(model, before)
        raise


# What this package keeps in the instances of changed modules, and the forward that it may take out of them.
_ATTRIBUTES = ('_lean', 'step_draws', '_verification', '_inside', 'forward')


def _state_of(model):
    """Return the classes of all modules, and what this package keeps in them."""
    return [
        (module, type(module), {key: vars(module)[key] for key in _ATTRIBUTES if key in vars(module)})
        for module in model.modules()
    ]


def _put_back(model, before):
    """Restore what :func:`_state_of` has seen."""
    for module, kind, attributes in before:
        module.__class__ = kind
        for key in _ATTRIBUTES:
            vars(module).pop(key, None)
        vars(module).update(attributes)


def remove_lean(model: nn.Module) -> None:
    """Undo :func:`apply_lean`. A model that was not changed stays as it is.

    Args:
        model (nn.Module): A detector, or its backbone.
    """
    model = unwrapped(model)
    _restore(model, model.modules())


def _restore(model, modules):
    for module in modules:
        if isinstance(module, FirstPass):
            mix_out(module, FirstPass)
            vars(module).pop('_verification', None)
        mix_out(module, _CheckpointedBlock)
        release(module)
        give_parts_back(module)
    close_drawing(model, draws_of(model))
    hand_on_within(model)


def keep_ratios(model: nn.Module) -> dict[tuple, float]:
    """Return the keep ratios of the layers that a model's backbone thins.

    Args:
        model (nn.Module): A backbone, or what has one.

    Returns:
        dict[tuple, float]: ``(stage, block)`` or ``(stage, 'downsample')`` to keep ratio; stages count from 0. Frozen
        layers and ratios of 1 do not appear.
    """
    found = {}
    for draws in draws_of(model):
        found |= draws.stages.keep_ratios()
    return found


def draws_of(model: nn.Module) -> list[StepDraws]:
    """Return the draws of a model's changed backbones.

    Args:
        model (nn.Module): A backbone, or what has one.
    """
    places = (module._lean for module in model.modules() if isinstance(module, LeanModule))
    return [*{id(place.draws): place.draws for place in places if isinstance(place.draws, StepDraws)}.values()]


class _CheckpointedBlock(Checkpointed):
    """Block that ``preset='with_cp'`` checkpoints."""

    def extra_repr(self):
        return ', '.join(filter(None, (super().extra_repr(), "preset='with_cp'")))


def _carry_out(model, settings, plan, chosen):
    changed, left = {}, dict(plan.left)
    phases = RowDraws() if settings.preset.gradients == 'sampled' else None
    names = {id(module): name for name, module in model.named_modules()}

    frozen = _frozen_in_training(model)

    def change(module, mixin, place, meaning):
        name = names[id(module)]
        if settings.preset.form is None:
            mix_in(module, _CheckpointedBlock)
        else:
            take_over(module, mixin, place._replace(name=name, phases=phases, bound=plan.bounds[id(module)]))
        parameters = _nearest_parameters(model, name)
        trains = not parameters or any(id(p) not in frozen for p in parameters)
        (changed if trains else left)[name] = meaning if trains else 'frozen'

    for owner, kind, layers, ratios, _ in plan.backbones:
        modules = {key: module for key, (module, _) in layers.items()}
        heads = _num_heads(plan.bounds, modules)
        draws = StepDraws(ThinnedStages(settings, modules, ratios, _stride(owner, kind), kind.rounds_up, heads))
        for key, (module, mixin) in layers.items():
            if settings.preset.form or mixin.checkpointed:
                change(module, mixin, Place(settings, key, draws), _meaning(settings, ratios.get(key), module, mixin))
        if settings.preset.form is not None and draws.stages.draws():
            open_drawing(owner, draws)
    for module, mixin in plan.others:
        ratio = mixin.token_ratio(settings)
        place = Place(settings, draws=TokenDraws(settings) if ratio else None)
        change(module, mixin, place, _meaning(settings, ratio, module, mixin))
    if settings.preset.checkpoints:
        for part, mixin in [*parts_to_checkpoint(model, chosen, settings.preset.checkpoints)]:
            mix_in(part, mixin)
            changed[names[id(part)]] = 'exact, recomputed in the backward pass'
    if settings.preset.form is not None and settings.preset.form.implementation == 'fused':
        hand_on_within(model)
    for bound in plan.bounds.values():
        found = {names[id(inside)]: reason for inside, reason in bound.left}
        left |= {name: reason for name, reason in found.items() if name not in changed}
    left |= _untouched(model, changed, left, chosen, settings.preset)
    return Report(changed, left, {name: type(model.get_submodule(name)).__name__ for name in changed | left})


def _stride(owner, kind):
    """Return the stride of the patch embedding: pixels for each position of the first stage."""
    for find in (
        lambda: owner.patch_embed.projection.stride[0],
        lambda: owner.patch_embed.proj.stride[0],
        lambda: owner.downsample_layers[0][0].stride[0],
    ):
        try:
            return find()
        except (AttributeError, TypeError, KeyError):
            continue
    return kind.stride


def _num_heads(bounds, modules):
    """Return the number of heads of the blocks' attention, or ``None`` if there is none that drops heads."""
    parts = (part for module in modules.values() if id(module) in bounds for part in bounds[id(module)].parts.values())
    return next((part.num_heads for part in parts if part.by_heads), None)


def _nearest_parameters(model, name):
    """Return the parameters of a module or, if it has none, as a pool, of the module that holds it."""
    while not (parameters := [*model.get_submodule(name).parameters()]) and name:
        name = name.rpartition('.')[0]
    return parameters


def _frozen_in_training(model):
    """Return the ids of the parameters that get no gradient in training.

    mmdet's backbones freeze their stages in ``train()``, which a runner calls after this. So it is called here once,
    and its effect on flags is taken back.
    """
    modes = [(module, module.training) for module in model.modules()]
    needs = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for module in [m for m, _ in modes if '_freeze_stages' in dir(type(m)) or '_freeze_blocks' in dir(type(m))]:
            module.train()
        return {id(p) for p in model.parameters() if not p.requires_grad}
    finally:
        for module, mode in modes:
            module.training = mode
        for p, needed in needs:
            p.requires_grad_(needed)


def _meaning(settings, ratio, module, mixin):
    preset = settings.preset
    if preset.form is None:
        return 'runs again in the backward pass'
    off = ' (its with_cp=True is off: it would cost time)' if getattr(module, 'with_cp', False) else ''
    if fairscale_forward(module):
        off = ' (its checkpointing by num_cp is off: it would cost time)'
    if ratio is not None:
        return f'gradients from {ratio:g} of the positions, preset {preset.name}{off}'
    if settings.preset.gradients == 'sampled' and mixin.samples:
        return f'stores less, gradients of weights from {float(settings.keep_ratio):.4g} of the rows{off}'
    if preset.form.implementation == 'reference':
        return f'exact, in plain autograd{off}'
    return f'exact, stores less{" in eight bits" if preset.form.storage == "int8" else ""}{off}'


def _untouched(model, changed, left, chosen, preset):
    """Return why the rest of the model stays as it is, child by child."""
    known = {*changed, *left}
    found = {}

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
                found[path] = reason(child)

    look(model, '', 2)
    return found
