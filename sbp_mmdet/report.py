"""Reports of a training in the log: changed modules, verification and saved memory."""

import copy
import dataclasses
import itertools
import logging
from collections import Counter
from types import MappingProxyType

import torch
from mmengine.hooks import Hook
from torch import nn

from .adapters import LeanModule
from .stochastic_backprop.step_draws import StepDraws
from .surgery import Mixin, unwrap
from .verify.dry_run import NoUpdate
from .verify.first_pass import (
    conclude,
    sum_bytes,
    verify_at_first_pass,
    verify_changed,
    verify_not_at_first_pass,
    warn_of_own_code,
)

__all__ = ['FROZEN', 'NO_BLOCK', 'UNKNOWN', 'Report', 'ReportingHook', 'thinned_line']

# Reasons why a module is unchanged: no adapter has anything to change in it, or 'with_cp' does not checkpoint it.
UNKNOWN, NO_BLOCK = 'no operation of this package saves memory there', 'not a block of a backbone'
FROZEN = 'frozen'  # it is supported, but trains no parameter
_MOST_NAMES = 6  # largest number of names that a line of the report lists


@dataclasses.dataclass(frozen=True)
class Report:
    """Changes that :func:`.apply.apply_lean` made.

    Attributes:
        changed (dict[str, str]): Changed submodules by name, with a description of the change.
        left (dict[str, str]): Unchanged submodules by name, with the reason: :data:`FROZEN` for frozen ones.
        kinds (dict[str, str]): Classes of all of these by name.
    """

    changed: dict[str, str]
    left: dict[str, str]
    kinds: dict[str, str]

    @property
    def frozen(self) -> list[str]:
        """Names of the submodules that are unchanged because they are frozen."""
        return [name for name, reason in self.left.items() if reason == FROZEN]

    def __str__(self):
        frozen = dict.fromkeys(self.frozen, 'they train no parameters')
        unchanged = {name: reason for name, reason in self.left.items() if name not in frozen}
        modules = 'module' if len(self.changed) == 1 else 'modules'
        numbers = f'{len(self.changed)} {modules} changed, {len(unchanged)} unchanged'
        lines = [f'{numbers}, {len(frozen)} frozen' if frozen else numbers]
        for word, reasons in (('changed', self.changed), ('unchanged', unchanged), ('frozen', frozen)):
            for reason in dict.fromkeys(reasons.values()):
                names = [name for name in reasons if reasons[name] == reason]
                numbers = Counter(self.kinds[name] for name in names)
                kinds = ', '.join(f'{number} {kind}' for kind, number in numbers.items())
                outer = [name for name in names if not any(name.startswith(f'{other}.') for other in names)]
                who = '' if word == 'changed' or len(outer) > _MOST_NAMES else f' ({", ".join(outer)})'
                lines.append(f'{word}: {kinds}{who}: {reason}')
        return '\n'.join(lines)


def thinned_line(model: nn.Module) -> str | None:
    """Return a line for the log with the number of thinned blocks of each stage.

    Args:
        model (nn.Module): A changed model.

    Returns:
        str | None: The line, or ``None`` if nothing is thinned.
    """
    lines, seen = [], set()
    for module in model.modules():
        draws = module._lean.draws if isinstance(module, LeanModule) else None
        if not isinstance(draws, StepDraws) or id(draws) in seen:
            continue
        seen.add(id(draws))
        ratios, layers = draws.stages.keep_ratios(), draws.stages.layers
        blocks = [key for key in layers if len(key) == 2 and isinstance(key[1], int)]
        if ratios and blocks:
            depths = [0] * (max(stage for stage, _ in blocks) + 1)
            thinned = [*depths]
            for key in blocks:
                depths[key[0]] += 1
                thinned[key[0]] += key in ratios
            others = len(ratios) - sum(thinned)
            more = f', and {others} downsampling layers' if others else ''
            lines.append(f'thinned blocks by stage: {tuple(thinned)} of {tuple(depths)}{more}')
    return '\n'.join(lines) or None


def _hooks_before(hook, runner):
    """Return the hooks of this kind that changed the model of a runner before another one did."""
    earlier = itertools.takewhile(lambda other: other is not hook, runner.hooks)
    return [other for other in earlier if isinstance(other, ReportingHook) and hasattr(other, 'report')]


class ReportingHook(Hook):
    """Base class of :class:`.hooks.LeanHook` that reports in the log what was changed, verified and saved.

    - Before the first step: the changed modules, the unchanged ones with reasons, whether changed modules agree with
      their own code, and how many bytes they save for the backward pass.
    - After the second step, on CUDA: the measured peak of memory.
    - mmengine's visualizers (TensorBoard, W&B): stored bytes and keep ratio, as 'lean/...', at the first step.
    """

    _verified = False
    _steps = 0
    _stored = MappingProxyType({})  # bytes that the changed modules save

    def before_run(self, runner) -> None:
        """Check and log the change; called by mmengine's runner."""
        super().before_run(runner)
        self._verified, self._steps, self._stored = False, 0, {}  # the hook may have been another runner's before
        for other in _hooks_before(self, runner):
            self._refuse_second_change(unwrap(runner.model), other.report.changed)
        if not self.report.changed:
            plain = self.settings.preset.name == 'none'
            runner.logger.warning(
                "LeanHook changes nothing: preset='none'; remove the hook or choose preset='exact'"
                if plain
                else 'LeanHook changes nothing: all its modules are frozen; lower frozen_stages or name other parts in '
                'modules=[...]'
            )
        if self.settings.preset.gradients == 'sbp':
            if line := thinned_line(unwrap(runner.model)):
                runner.logger.info(f'LeanHook: {line}')
            runner.logger.info(
                "preset='sbp' lost AP on small objects in our trainings; with 'exact' we found no significant loss. "
                'See docs/research/accuracy.md in the repository.'
            )

    def _refuse_second_change(self, model, changed):
        """Raise an error if this hook changed or undid what an earlier one changed."""
        if twice := [name for name in self.report.changed if name in changed]:
            raise ValueError(
                f'custom_hooks has two LeanHooks, and both change {len(twice)} modules, such as {twice[0]}; '
                'remove one, or give them different modules=[...]'
            )
        if undone := [name for name in changed if not isinstance(model.get_submodule(name), Mixin)]:
            raise ValueError(
                f"custom_hooks has two LeanHooks, and one of them, with preset='{self.settings.preset.name}', undoes "
                f'what the other changes in {len(undone)} modules, such as {undone[0]}; remove one'
            )

    def before_train(self, runner) -> None:
        """Let the model verify itself, in case that a loop of the user's own does not announce its batches."""
        super().before_train(runner)
        if not self._verified:
            verify_at_first_pass(unwrap(runner.model), self.settings, self.report)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None, **kwargs) -> None:
        """Verify the changed modules before the first step; called by mmengine's runner."""
        if self._verified or data_batch is None:  # then the model does so at its first pass
            return
        self._verified, settings, model = True, self.settings, unwrap(runner.model)
        verify_not_at_first_pass(model, self.report)

        def say(message, level):
            runner.logger.log(level, message)

        own = settings.preset.form and warn_of_own_code(model, self.report, 'LeanHook', say)
        if not (settings.verify and settings.preset.form and self.report.changed):
            return

        def run(dry):
            dry.train_step(copy.deepcopy(data_batch), NoUpdate(runner.optim_wrapper))

        findings = verify_changed(model, self.report, settings, run)
        conclude(model, self.report, settings, findings, 'LeanHook', say)
        if not findings.kinds and not findings.skipped and not own:
            text = f'none of {len(self.report.changed)} changed modules ran in the first step, so nothing is saved'
            say(f'LeanHook: {text}; name the parts that the model calls in modules=[...]', logging.WARNING)
        ratio, scalars = self.keep_ratio(runner.model), {}
        if findings.kinds:
            self._stored = findings.stored
            earlier = [hook._stored for hook in _hooks_before(self, runner)]
            scalars = {f'lean/stored_mb_{key}': n / 1e6 for key, n in sum_bytes(self._stored, *earlier).items()}
        if ratio is not None:
            scalars['lean/keep_ratio'] = ratio
        if scalars:
            runner.visualizer.add_scalars(scalars, runner.iter + 1)

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        """Log the peak of memory after the second step; called by mmengine's runner."""
        self._steps += 1
        if self._steps == 2 and torch.cuda.is_available() and self.report.changed:
            peak = torch.cuda.max_memory_allocated() / 1e6
            runner.logger.info(f'LeanHook: torch measured a peak of {peak:,.0f} MB of allocated memory')
