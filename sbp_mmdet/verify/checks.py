"""Verification of all changed modules of a model, in one forward pass of a copy."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor, nn

from ..adapters import LeanModule, adapter_of
from ..adapters.bound import lacks_reference
from ..checkpointed_parts import CheckpointedLevels, CheckpointedPart, give_parts_back
from ..checkpointing import Checkpointed
from ..ops.common.precision import autocast_dtype
from ..stochastic_backprop.step_draws import StepDraws, TokenDraws
from ..surgery import Mixin, mix_in, mix_out
from .comparison import Side, compare, relative_difference
from .dry_run import CannotCopy, hookless_copy, restored_parameters, without_side_effects
from .eight_bits import check_eight_bits
from .findings import Findings, Kind
from .fixed_draws import as_reference, dropped_images, with_fixed_draws, with_fixed_images
from .kinds import describe_tensors, settings_of
from .module_run import SavedTensors, bridge, cotangent, find_floating, run_module
from .parts_of_inputs import first_part
from .random_parts import Disagreement
from .saved_bytes import SavedBytes, note_calls

__all__ = ['verify_modules']

# Relative error of gradients with feature maps in eight bits, which is by design.
_EIGHT_BITS = 0.06


def verify_modules(
    model: nn.Module,
    names: Iterable[str],
    run: Callable[[nn.Module], None],
    every: bool = False,
    parts: Collection[str] | None = None,
) -> Findings:
    """Compare the changed modules of a model with their own code, on the inputs that they get in a forward pass.

    The pass runs on a copy without hooks and without gradients. At the first module of each kind, the changed module
    and its own code run forward and backward. Neither the model nor its gradients nor random states change. All
    processes of a distributed training agree on the modules that failed.

    Args:
        model (nn.Module): A model changed by :func:`.apply_lean`, not wrapped.
        names (Iterable[str]): Names of its changed modules.
        run (Callable): Runs a forward pass of its argument, a copy of the model.
        every (bool): Whether every module is compared, not one of each kind. Default: False.
        parts (Collection[str] | None): Names of the recomputed parts whose bytes are counted. If ``None``, all of them;
            the others are those that another hook changed. Default: None.

    Returns:
        Findings: The results.
    """
    names, findings, watch = [*names], Findings(), None
    try:
        watch = _Watch(hookless_copy(model), names, findings, every, parts)
    except Exception as error:  # noqa: BLE001  whatever a model's own code raises when it is copied
        findings.skipped = f'{error}' if isinstance(error, CannotCopy) else f'{type(error).__name__}: {error}'
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device('cpu'))
    if not _reduce_over_ranks([watch is not None], device, 'min')[0]:
        findings.skipped = findings.skipped or 'another process cannot copy the model'
        return findings
    try:
        with torch.no_grad(), without_side_effects(watch.devices), restored_parameters(model):
            run(watch.model)
    except Exception as error:  # noqa: BLE001  if the error is the model's own, the step itself will raise it
        findings.skipped = _describe_end(error)
    for kind in findings.kinds:
        if kind.disagrees:
            findings.failed.update(dict.fromkeys(kind.modules, kind.disagrees))
    ran = {name for kind in findings.kinds for name in kind.modules}
    others = [name for name in names if name not in ran]
    findings.silent, findings.missed = ([], others) if findings.skipped else (others, [])
    if names and not others:  # all were compared before the step ended
        findings.skipped = None
    findings.synced = get_world_size() > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    watch.saved.count()
    # Of all modules: which of them were changed may differ, for example if one process has registered hooks.
    everything, changed = [name for name, _ in model.named_modules()], {*names}
    failed = _reduce_over_ranks([name in findings.failed for name in everything], device, 'max')
    for name, bad in zip(everything, failed, strict=True):
        if bad and name in changed:
            findings.failed.setdefault(name, 'it failed in another process')
    return findings


def _describe_end(error):
    """Return why a pass without gradients ended early."""
    if isinstance(error, RuntimeError) and 'does not require grad' in f'{error}':
        return 'the model calls backward by itself, and here there are no gradients'
    return f'{type(error).__name__}: {error}'


def _reduce_over_ranks(flags, device, op):
    reduced = torch.tensor(flags, dtype=torch.int32, device=device)
    if reduced.numel():
        all_reduce(reduced, op)
    return reduced.tolist()


class _Watched(Mixin):
    """Mixin of changed modules of the copy: they run their own code, and a call is compared first."""

    def forward(self, *args, **kwargs):
        return vars(self)['_watch'](super().forward, args, kwargs)


class _Bridge(Mixin):
    """Mixin of modules that are compared separately, while the module that contains them is compared."""

    def forward(self, *args, **kwargs):
        return bridge(super().forward, args, kwargs)


def _find_leading_frozen(modules):
    """Return the ids of frozen modules that precede all trained parameters, so that autograd saves nothing for them.

    Modules are assumed to be called in their order.
    """
    found, trains = set(), False
    for module in modules:
        if not trains and not any(p.requires_grad for p in module.parameters()):
            found.add(id(module))
        trains |= any(p is not None and p.requires_grad for p in module._parameters.values())
    return found


@dataclasses.dataclass
class _Classes:
    """Classes that a module of the verified copy switches between, and its :class:`.adapters.LeanState`."""

    lean: type
    own: type
    bridged: type
    watched: type
    state: object


class _Watch:
    """Comparison of the changed modules of a copy at the time when they are called."""

    def __init__(self, model, names, findings, every, parts):
        self.model, self.findings, self.every = model, findings, every
        self.names, self.classes, self.kinds, self.saved = {}, {}, {}, SavedBytes()
        self.around = []  # changed modules whose own code is running; they count the bytes of modules inside of them
        self.devices = {t.device for t in (*model.parameters(), *model.buffers())}
        modules = dict(model.named_modules())
        # Ids of modules inside parts that the preset checkpoints, and inside parts that the user checkpoints.
        self.recomputed, self.checkpointed = set(), set()
        self.in_parts = set()  # those inside of recomputed parts that are no changed modules
        self.in_front = _find_leading_frozen(modules.values())
        for name, module in modules.items():  # a part before the modules in it
            if isinstance(module, (CheckpointedPart, CheckpointedLevels)):
                if id(module) not in self.recomputed and id(module) not in self.checkpointed:
                    self.recomputed.update(map(id, module.modules()))
                    self._watch_part(module, counts=parts is None or name in parts)
            elif isinstance(module, Checkpointed):
                self.checkpointed.update(map(id, module.modules()))
        for name in names:
            self.names.setdefault(id(modules[name]), name)
        for module in modules.values():
            if isinstance(module, LeanModule):
                self._prepare(module)

    def _watch_part(self, part, counts):
        """Make a recomputed part count what it saves, if it ``counts``: its inputs now, otherwise what its code saves.

        The own code of a changed module counts as its kind does. Any other part runs here once more for that, and
        counts for the changed modules inside of it.
        """
        lean = isinstance(part, LeanModule)
        if not lean:
            give_parts_back(part)
            self.in_parts.update(map(id, part.modules()))
        if not counts:
            return

        def note(args, kwargs, out):
            if any(outer is not part for outer in self.around):
                return
            everything = frozenset(range(len(find_floating((args, kwargs)))))
            stored = {} if lean else self._count_own_code(part, args, kwargs)
            if lean or stored:
                stored['now'] = SavedTensors(0, everything, frozenset())
            block = bool(kind := adapter_of(part)) and kind.checkpointed
            call = Kind(type(part).__name__, stored=stored, checkpointed=block and not lean)
            self.findings.recomputed.append(call)
            self.saved.add(call, ('now',) if lean else ('now', 'before', 'with_cp'), (args, kwargs), out)

        note_calls(part, note)

    def _count_own_code(self, module, args, kwargs):
        """Return what the own code of a module saves, as ``Kind.stored``; nothing if it raises."""
        blocks, stored = {*map(id, self._find_blocks(module))}, {}
        try:
            for key in ('before', 'with_cp') if blocks else ('before',):
                bridged = blocks if key == 'with_cp' else ()  # these are counted one by one
                with self._switched(module, False, bridged, lambda state: state):
                    stored[key] = run_module(module, args, kwargs, cotangent, backward=False).stored
        except Exception:  # noqa: BLE001  the real step will raise it
            return {}
        return stored

    def _prepare(self, module):
        state = module._lean
        vars(module).pop('forward', None)  # an adapter leaves only fairscale's forward, which checkpoints
        mix_out(module, Checkpointed)
        lean = module.__class__
        mix_out(module, LeanModule)
        own = module.__class__
        mix_in(module, _Bridge)
        bridged, module.__class__ = module.__class__, own
        if id(module) in self.names:
            mix_in(module, _Watched)
            vars(module)['_watch'] = lambda *call: self._run_call(module, *call)
        self.classes[id(module)] = _Classes(lean, own, bridged, module.__class__, state)

    def _run_call(self, module, forward, args, kwargs):
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kind = self._find_kind(module, args, kwargs)
        bridged = self._find_bridged(module)
        nothing = id(module) in self.checkpointed or id(module) in self.in_front
        keys = () if nothing else self._list_counts(kind)
        if id(module) in self.in_parts:
            keys = [key for key in keys if key == 'with_cp' and kind.checkpointed]
        elif id(module) in self.recomputed:
            keys = [key for key in keys if key != 'now']
        if not bridged:
            self.around.append(module)
        try:
            out = forward(*args, **kwargs)
        finally:
            if not bridged:
                self.around.pop()
        if keys:
            self.saved.add(kind, keys, (args, kwargs), out)
        return out

    def _list_counts(self, kind):
        """Return the counts to which a call adds its saved bytes: those of 'now', 'before' and 'with_cp'.

        A module that runs its blocks itself is counted instead of them, except for 'with_cp', where each block is a
        checkpoint.
        """
        if self.around:
            return ('with_cp',) if self._is_in_chain() and kind.checkpointed else ()
        return ('now', 'before', 'with_cp')

    def _is_in_chain(self):
        """Return whether the module that runs now is a block of one that runs its blocks itself and counts for them."""
        return bool(self.around) and all(self.classes[id(outer)].lean.runs_blocks for outer in self.around)

    def _find_kind(self, module, args, kwargs):
        """Return the kind of a call. A new kind is compared first."""
        name, classes = self.names[id(module)], self.classes[id(module)]
        settings = settings_of(module, classes.state)
        key = (
            name if self.every else '',
            classes.lean,
            settings,
            self._is_in_chain(),
            describe_tensors((args, kwargs)),
        )
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = Kind(classes.own.__name__, checkpointed=classes.lean.checkpointed)
            self.findings.kinds.append(kind)
            self.findings.autocast |= any(autocast_dtype(x) is not None for x in find_floating((args, kwargs)))
            start = time.perf_counter()
            try:
                self._compare(kind, module, args, kwargs)
            except Disagreement as error:
                kind.disagrees = str(error)
            except Exception as error:  # noqa: BLE001  out of memory, or whatever the module's own code raises
                kind.skipped = f'{type(error).__name__}: {error}'
            kind.seconds = time.perf_counter() - start
        kind.modules[name] = None
        return kind

    def _compare(self, kind, module, args, kwargs):
        classes, bridged = self.classes[id(module)], self._find_bridged(module)
        state, thin = classes.state, lambda grad: classes.lean.thin_gradient(module, grad)

        def make_side(lean, change=lambda state: state):
            return Side(module, lambda: self._switched(module, lean, bridged, change), thin=thin)

        part = first_part(args, kwargs)

        def compare_sides(own, lean, only=lambda name: True, slack=0.0):
            options = dict(devices=self.devices, slack=slack, only=only)
            runs = self._compare_part(part, own, lean, options) or compare(own, lean, args, kwargs, **options)
            gradients = [{name: g for name, g in run.gradients.items() if only(name)} for run in runs]
            kind.gradients = max(kind.gradients, relative_difference(gradients[1], gradients[0]))
            if part is not None and not self._is_in_chain():  # outputs and stored bytes are those of the whole
                forward = (dataclasses.replace(one, backward=False) for one in (own, lean))
                runs = compare(*forward, args, kwargs, devices=self.devices)
            kind.outputs = max(kind.outputs, relative_difference(runs[1].outputs, runs[0].outputs))
            return dict(before=runs[0].stored, now=runs[1].stored)

        form = state.settings.preset.form
        slack = 0.0
        if form.storage == 'int8':
            slack, maps = _EIGHT_BITS, [x for x in find_floating((args, kwargs)) if x.dim() >= 3 and x.numel()]
            for x in sorted(maps, key=Tensor.numel)[-1:]:
                check_eight_bits(x)
        whole = make_side(True, lambda state: state._replace(draws=None, row_draws=None))
        kind.stored = compare_sides(make_side(False), whole, slack=slack)
        if classes.lean.runs_blocks and not self.around:
            kind.stored = self._count_own_code(module, args, kwargs) | kind.stored
        if state.row_draws is not None:
            # Weight gradients are estimates; the operation was compared without a sample above.
            sampled = make_side(True, lambda state: state._replace(draws=None))
            kind.stored['now'] = compare_sides(make_side(False), sampled, lambda name: name.startswith('input '))['now']
        ratio = state.draws is not None and state.draws.ratio(state.layer)
        if ratio and ratio < 1 and form.implementation == 'fused':
            thinned = make_side(True, with_fixed_draws)
            own = make_side(True, lambda state: with_fixed_draws(as_reference(state)))
            # Modules that draw their own tokens have no reference form; outputs are compared with their own code.
            tokens = isinstance(state.draws, TokenDraws)
            kind.stored['now'] = compare_sides(
                make_side(False) if tokens else own, thinned, lambda name: not tokens, slack
            )['now']
        drops = any(getattr(binding.drop, 'drop_prob', 0) for binding in state.bound.bindings.values())
        if isinstance(state.draws, StepDraws) and state.settings.skip_dropped_images and drops:
            compare_sides(
                Side(module, lambda: self._with_dropped_images(module, bridged)),
                make_side(True, with_fixed_images),
                slack=slack,
            )

    @contextlib.contextmanager
    def _with_dropped_images(self, module, bridged):
        with (
            self._switched(module, False, bridged, lambda state: state),
            dropped_images(self.classes[id(module)].state),
        ):
            yield

    @staticmethod
    def _compare_part(part, own, lean, options):
        """Compare both sides on a part of the input; return ``None`` if there is none that the own code accepts."""
        try:
            return part and compare(own, lean, *part, **options)
        except Disagreement:
            raise
        except Exception:  # noqa: BLE001  whatever the module's own code says of an input that it did not get
            return None

    @contextlib.contextmanager
    def _switched(self, module, lean, bridged, change) -> Iterator[None]:
        """Switch a module and the modules inside it to their changed or own forward passes, within the context."""
        inside = [(m, self.classes[id(m)]) for m in module.modules() if id(m) in self.classes]
        for m, classes in inside:
            if id(m) in bridged:
                m.__class__ = classes.bridged
            else:
                m._lean = change(classes.state)
                own = not lean or lacks_reference(classes.lean, m._lean.settings.preset.form)
                m.__class__ = classes.own if own else classes.lean
        try:
            yield
        finally:
            for m, classes in inside:
                m.__class__, m._lean = classes.watched, classes.state

    def _find_bridged(self, module):
        """Return the changed modules inside a module with blocks, which are compared one by one to save memory."""
        kind = self.classes[id(module)].lean
        if kind.thins_only or kind.runs_blocks or not self._find_blocks(module):
            return set()
        return {id(m) for m in module.modules() if m is not module and id(m) in self.names}

    def _find_blocks(self, module):
        """Return the changed blocks inside of a module."""
        inside = [m for m in module.modules() if m is not module and id(m) in self.classes]
        return [m for m in inside if self.classes[id(m)].lean.checkpointed]
