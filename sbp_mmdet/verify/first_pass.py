"""Verification before the first training pass, and its consequences: log lines, modules with own code, or an error."""

import contextlib
import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from mmengine.logging import print_log
from mmengine.visualization import Visualizer
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..adapters import LeanModule, release
from ..adapters.predicate import is_hooked_globally
from ..checkpointed_parts import CheckpointedLevels, CheckpointedPart
from ..passes import is_known_inside
from ..presets import Settings
from ..stochastic_backprop.step_draws import StepDraws
from ..surgery import Mixin, mix_in, mix_out, refuse_tracing
from .checks import verify_modules
from .findings import Findings

__all__ = [
    'FirstPass',
    'conclude',
    'sum_bytes',
    'verification_off',
    'verify_at_first_pass',
    'verify_changed',
    'verify_not_at_first_pass',
    'warn_of_own_code',
]

_off = 0  # number of open `verification_off` contexts


@contextlib.contextmanager
def verification_off() -> Iterator[None]:
    """Disable verification within the context, for measurements of the step itself."""
    global _off  # noqa: PLW0603
    _off += 1
    try:
        yield
    finally:
        _off -= 1


class FirstPass(Mixin):
    """Mixin that verifies a changed model before its first pass in training."""

    def forward(self, *args, **kwargs):
        refuse_tracing(self, args)
        if not _off and self.training and torch.is_grad_enabled() and not torch.jit.is_tracing():
            self._verify_first_pass(args, kwargs)
            return self.forward(*args, **kwargs)  # this class is gone
        return super().forward(*args, **kwargs)

    @torch.compiler.disable
    def _verify_first_pass(self, args, kwargs):
        changes, stored = vars(self).pop('_verification'), {}
        mix_out(self, FirstPass)
        for settings, report in changes:
            warn_of_own_code(self, report, type(self).__name__, _print_to_log)
            inputs = _copies((args, kwargs))
            run = lambda model, inputs=inputs: model(*inputs[0], **inputs[1])  # noqa: E731
            findings = verify_changed(self, report, settings, run)
            conclude(self, report, settings, findings, type(self).__name__, _print_to_log)
            if findings.kinds:
                stored = sum_bytes(stored, findings.stored)
        if Visualizer._instance_dict and stored:
            scalars = {f'lean/stored_mb_{key}': n / 1e6 for key, n in stored.items()}
            Visualizer.get_current_instance().add_scalars(scalars, 1)


def sum_bytes(*stored: Mapping[str, int]) -> dict[str, int]:
    """Add up the bytes that several changes of a model save for the backward pass.

    Args:
        *stored (Mapping[str, int]): Bytes of a change by name, see :attr:`.findings.Findings.stored`.
    """
    total = Counter()
    for one in stored:
        total.update(one)
    return dict(total)


def verify_at_first_pass(model: nn.Module, settings: Settings, report) -> None:
    """Make a changed model verify itself before its first pass in training, if the settings ask for it.

    An earlier change that waits for its verification goes on to wait, unless this one replaced or undid a part of it.

    Args:
        model (nn.Module): The model.
        settings (Settings): Settings of the change.
        report (Report): Report of the changed modules.
    """
    changes = [(earlier, one) for earlier, one in _waiting(model) if _is_in_place(model, one, report)]
    if settings.verify and settings.preset.form is not None and report.changed:
        changes.append((settings, report))
    _let_wait(model, changes)


def verify_not_at_first_pass(model: nn.Module, report) -> None:
    """Undo :func:`verify_at_first_pass`.

    Args:
        model (nn.Module): The model.
        report (Report): Report of the changed modules.
    """
    _let_wait(model, [(settings, one) for settings, one in _waiting(model) if one is not report])


def _waiting(model):
    return vars(model).get('_verification', ())


def _is_in_place(model, report, later):
    modules, names = dict(model.named_modules(remove_duplicate=False)), report.changed.keys()
    return names.isdisjoint(later.changed) and all(isinstance(modules.get(name), Mixin) for name in names)


def _let_wait(model, changes):
    """Set the changes that the model verifies at its first pass."""
    mix_out(model, FirstPass)
    vars(model).pop('_verification', None)
    if changes:
        mix_in(model, FirstPass)
        vars(model)['_verification'] = changes


def verify_changed(model: nn.Module, report, settings: Settings, run: Callable[[nn.Module], None]) -> Findings:
    """Compare the changed modules of a report with their own code, see :func:`.verify_modules`.

    Args:
        model (nn.Module): The changed model.
        report (Report): Report of the changed modules.
        settings (Settings): Settings of the model.
        run (Callable): Runs a forward pass of its argument, a copy of the model.

    Returns:
        Findings: The results.
    """
    lean = _lean_modules(model, report)
    names = [name for name, module in lean.items() if module._lean.bound.reason is None]
    findings = verify_modules(model, names, run, every=settings.verify == 'all', parts=report.changed)
    frozen = {*report.frozen}
    findings.frozen = [name for name in names if name in frozen]
    findings.own_code = [name for name in report.changed if name not in lean]
    return findings


def _lean_modules(model, report):
    """Return the modules of a report, frozen ones included, that have adapters.

    Others that it left unchanged may have them too: those that another hook changes.
    """
    known = {*report.changed, *report.frozen}
    return {name: m for name, m in model.named_modules() if name in known and isinstance(m, LeanModule)}


def warn_of_own_code(model: nn.Module, report, who: str, say: Callable) -> list[str]:
    """Log, in one message, which changed modules run their own code by now, such as those with hooks of other hooks.

    Args:
        model (nn.Module): The changed model.
        report (Report): Report of the changed modules.
        who (str): Prefix of the message.
        say (Callable): Function that logs a message with a level of ``logging``.

    Returns:
        list[str]: Names of these modules. Frozen ones, which save nothing anyway, are not among them.
    """
    reasons = {}
    for name, module in _lean_modules(model, report).items():
        before = module._lean.bound
        if before.reason or before.lacks_reference or before.bypassed.unchanged(module):
            continue
        bound = module.rebind(warns=False)
        new = [reason for _, reason in bound.left if reason not in {known for _, known in before.left}]
        if name in report.changed and (reason := bound.reason or '; '.join(dict.fromkeys(new))):
            reasons[name] = reason
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in report.changed:
        module = modules.get(name)  # the user may have removed it
        if isinstance(module, (CheckpointedPart, CheckpointedLevels)) and not is_known_inside(module):
            inside = [inner for inner in module.modules() if inner is not module]
            hooked = is_hooked_globally() or any(m._forward_hooks or m._forward_pre_hooks for m in inside)
            what = 'a module inside of it has hooks' if hooked else 'a function that it calls was replaced'
            reasons.setdefault(name, f'{what}, which would run twice')
    if reasons:
        name, reason = next(iter(reasons.items()))
        since = 'they have hooks' if all('has hooks' in one for one in reasons.values()) else 'they were changed since'
        say(
            f'{who}: {len(reasons)} of {len(report.changed)} changed modules run their own code in part or whole, '
            f'because {since}; they no longer save memory. An example is {name} ({reason})',
            logging.WARNING,
        )
    return [*reasons]


def conclude(model: nn.Module, report, settings: Settings, findings: Findings, who: str, say: Callable) -> None:
    """Log the results of a verification, and restore the own code of modules that disagree.

    Args:
        model (nn.Module): The changed model.
        report (Report): Report of the changed modules, which is updated.
        settings (Settings): Settings of the model.
        findings (Findings): The results.
        who (str): Prefix of messages.
        say (Callable): Function that logs a message with a level of ``logging``.

    Raises:
        RuntimeError: If a module disagrees and ``verify='raise'``.
    """
    by_reason = {}
    for name, reason in findings.failed.items():
        by_reason.setdefault(reason, []).append(name)
    messages = []
    for reason, names in by_reason.items():
        listed = ', '.join([*names[:3], *(['...'] if names[3:] else [])])
        messages.append(f'{listed} ({len(names)} of class {report.kinds[names[0]]}): {reason}')
    if messages and settings.verify == 'raise':
        raise RuntimeError(
            f"{who}: changed modules disagree with their own code, and verify='raise': {'; '.join(messages)}. "
            'Exclude them with modules=[...], or write verify=True, with which they run their own code'
        )
    say(f'{who}: {findings}', logging.WARNING if findings.skipped else logging.INFO)
    for line in messages:
        say(
            f'{who}: a changed module disagrees with its own code, which runs from now on: {line}. The training is '
            f"correct. Please report this line, versions and GPU to sbp_mmdet's issue tracker",
            logging.WARNING,
        )
    if findings.silent and findings.kinds:
        say(
            f'{who}: {len(findings.silent)} changed modules did not run in the first step, such as '
            f'{findings.silent[0]}: nothing is saved there, and they were not compared with their own code',
            logging.WARNING,
        )
    for name, reason in findings.failed.items():
        _fall_back(model.get_submodule(name))
        report.changed.pop(name, None)
        report.left[name] = f'verification failed: {reason}'
    stored = findings.stored
    if stored['before']:
        say(
            '{who}: for the backward pass the changed modules store {now:,.1f} MB; unchanged they would store '
            '{before:,.1f} MB, with their blocks checkpointed {with_cp:,.1f} MB. The peak of a step is more than '
            'that: `sbp-mmdet plan CONFIG` compares whole steps'.format(
                who=who, **{key: n / 1e6 for key, n in stored.items()}
            ),
            logging.INFO,
        )


def _fall_back(module):
    """Restore a module's own code, and forget its keep ratio."""
    state = module._lean
    if isinstance(state.draws, StepDraws):
        stages = state.draws.stages
        stages.layers.pop(state.layer, None)
        stages.ratios.pop(state.layer, None)
    release(module)


def _print_to_log(message: str, level: int) -> None:
    """Log a message with mmengine's current logger.

    Args:
        message (str): The message.
        level (int): A level of ``logging``.
    """
    print_log(message, logger='current', level=level)


def _copies(tree):
    """Return a copy of nested arguments, because a pass may change them in place."""
    leaves, structure = tree_flatten(tree)
    copies = [x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x) for x in leaves]
    return tree_unflatten(copies, structure)
