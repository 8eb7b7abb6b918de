"""Signs of life: what was changed, and what changed modules store in the first step, now and unchanged."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

import torch
from mmengine.hooks import Hook
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

from .adapters import Lean, adapter_of
from .checkpointing import Checkpointed, keep_buffers
from .ops.common.precision import autocast_dtype
from .surgery import mix_in, mix_out, unwrapped

__all__ = ['NO_BLOCK', 'UNKNOWN', 'Report', 'SignsOfLife', 'StoredBytes']

# Why a module stays as it is: nothing is known of it, or it is none that preset='with_cp' is about.
UNKNOWN, NO_BLOCK = 'no lean form of it is known', 'it is no block of a backbone'
_MOST_NAMES = 6  # that a line of the report lists


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`.apply.apply_lean` did.

    Attributes:
        changed (dict[str, str]): By the name of a submodule, what it does now.
        left (dict[str, str]): By name, why a submodule stays as it is.
        kinds (dict[str, str]): By name, the class of a submodule.
    """

    changed: dict[str, str]
    left: dict[str, str]
    kinds: dict[str, str]

    def __str__(self):
        lines = [f'{len(self.changed)} modules changed, {len(self.left)} left alone']
        for word, found in (('changed', self.changed), ('left alone', self.left)):
            for reason in dict.fromkeys(found.values()):
                names = [name for name in found if found[name] == reason]
                numbers = Counter(self.kinds[name] for name in names)
                kinds = ', '.join(f'{number} {kind}' for kind, number in numbers.items())
                who = '' if word == 'changed' or len(names) > _MOST_NAMES else f' ({", ".join(names)})'
                lines.append(f'{word}: {kinds}{who}: {reason}')
        return '\n'.join(lines)


class SignsOfLife(Hook):
    """What :class:`.apply.LeanHook` says when training begins.

    - Log, before the first step: what was changed, what was left alone and why; remarks on the preset.
    - Log, after the first step: what the changed modules stored in it, what they would have stored unchanged and as
      checkpoints, and a warning where checkpoints would store less.
    - mmengine's visualizers (TensorBoard, W&B): these figures and the keep ratio, as 'lean/...', at the first step.
      CUDA's peak is mmengine's own 'memory'.
    """

    _counter = None
    _told = False

    def before_run(self, runner) -> None:
        """Called by mmengine's runner."""
        super().before_run(runner)
        for other in runner.hooks:
            if isinstance(other, SignsOfLife) and other is not self and hasattr(other, 'report'):
                if twice := [name for name in self.report.changed if name in other.report.changed]:
                    raise ValueError(
                        f'LeanHook stands twice in custom_hooks, and both change {len(twice)} modules, such as '
                        f'{twice[0]}: keep one, or give each other modules=[...]'
                    )
        if not self.report.changed:
            runner.logger.warning(
                f'LeanHook changes nothing: {"no preset" if self.settings.preset.name == "none" else "all is frozen"}'
            )
        if self.settings.preset.gradients == 'sbp':
            runner.logger.info(
                "preset='sbp' lost AP on small objects (docs/research/accuracy.md); 'exact' lost none that was seen"
            )

    def before_train_iter(self, runner, *args, **kwargs) -> None:
        """Called by mmengine's runner."""
        if not self._told and self.report.changed:
            self._counter = StoredBytes(unwrapped(runner.model), self.report.changed)

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        """Called by mmengine's runner."""
        if self._told or self._counter is None:
            return
        self._told, stored, ratio = True, self._counter.stop(), self.keep_ratio(runner.model)
        for name, error in self._counter.failed.items():
            runner.logger.warning(f'LeanHook: {name} was not counted: {error}')
        if not stored['before']:
            runner.logger.warning('LeanHook: no changed module ran in the first step, so nothing is saved')
            return
        megabytes = {key: n / 1e6 for key, n in stored.items()}
        runner.logger.info(
            'LeanHook: in the first step the changed modules stored {now:,.1f} MB for the backward pass; unchanged '
            '{before:,.1f} MB, with_cp {with_cp:,.1f} MB'.format(**megabytes)
        )
        preset = self.settings.preset.name
        if stored['with_cp'] < stored['now'] and preset != 'with_cp':
            other = '' if preset == 'int8' else ", and preset='int8' less than now"
            half = '' if self._counter.autocast else f'. In mixed precision {preset!r} gains more'
            runner.logger.warning(f"LeanHook: preset='with_cp' stores less here{other}{half}")
        scalars = {f'lean/stored_mb_{key}': value for key, value in megabytes.items()}
        runner.visualizer.add_scalars(scalars | ({} if ratio is None else {'lean/keep_ratio': ratio}), runner.iter + 1)
        self._counter = None


class StoredBytes:
    """Counts what changed modules store for the backward pass, until :meth:`stop`.

    Each pass of such a module in training is followed by three more, whose results are thrown away: one as it is, one
    without the change, one with its blocks checkpointed. Autograd's tensors are counted and let go at once, so this
    takes time, and the memory of a pass without gradients. Random numbers and running statistics stay as they are.

    Args:
        model (nn.Module): Changed by :func:`.apply.apply_lean`.
        names (Iterable[str]): Of the changed modules. Those inside of a module that is checkpointed store nothing
            themselves, so they are left out.

    Attributes:
        failed (dict[str, str]): By the name of a module that cannot be counted, what went wrong.
        autocast (bool): Whether autocast was on.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self.failed, self.autocast = {}, False
        self._stored = dict(now={}, before={}, with_cp={})  # address of a storage to its bytes
        self._references = []  # keep addresses from being given away
        self._running = False
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        modules, names = dict(model.named_modules()), set(names)
        around = names | {name for name, module in modules.items() if type(module).__mro__[1] is Checkpointed}
        self._names = {id(modules[name]): name for name in names if not around & set(_outer(name))}
        self._handles = [
            module.register_forward_hook(self._count, with_kwargs=True)
            for module in modules.values()
            if id(module) in self._names
        ]

    def stop(self) -> dict[str, int]:
        """Ends the count.

        Returns:
            dict[str, int]: Bytes stored ``now``, ``before`` the change, and by checkpoints of all blocks (``with_cp``).
        """
        for handle in self._handles:
            handle.remove()
        return {key: sum(found.values()) for key, found in self._stored.items()}

    @torch.compiler.disable
    def _count(self, module, args, kwargs, output):
        in_backward = torch._C._current_graph_task_id() != -1  # somebody's checkpoint runs it again
        if self._running or in_backward or not (module.training and torch.is_grad_enabled()):
            return
        self._running, name = True, self._names[id(module)]
        classes = [(inside, inside.__class__) for inside in module.modules()]
        try:
            found = dict(now=self._saved(module, args, kwargs, output))
            for inside, _ in classes:
                mix_out(inside, (Lean, Checkpointed))
            found['before'] = self._saved(module, args, kwargs, output)
            for inside, _ in classes:
                if (kind := adapter_of(inside)) and kind.checkpointed:
                    mix_in(inside, Checkpointed)
            found['with_cp'] = self._saved(module, args, kwargs, output)
        except Exception as error:  # noqa: BLE001  whatever a module's own code raises: a count stops no training
            self.failed[name] = f'{type(error).__name__}: {error}'
            return
        finally:
            self._running = False
            for inside, kind in classes:
                inside.__class__ = kind
        self.autocast |= any(autocast_dtype(x) is not None for x in tree_flatten((args, kwargs))[0] if _is_float(x))
        for variant, storages in found.items():
            self._stored[variant] |= storages

    def _saved(self, module, args, kwargs, output):
        """Storages that a pass saves, to their bytes; copies of inputs and outputs count as the real ones."""
        real, found, copies = {}, {}, {}

        def copy(leaf):
            """Modules may work in place."""
            if not _is_float(leaf):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                real[self._storage(copies[id(leaf)])[0]] = self._storage(leaf)
            return copies[id(leaf)]

        def note(tensor):
            address, nbytes = self._storage(tensor)
            found[address] = nbytes

        args, kwargs = tree_map(copy, (args, kwargs))
        devices = {p.device.index for p in module.parameters() if p.is_cuda}
        dtype = autocast_dtype(next(iter(copies.values()))) if copies else None
        kind = 'cuda' if devices else 'cpu'
        # Without autocast's cache: it would keep copies of weights until the step ends.
        autocast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda held: held)
        with torch.random.fork_rng(devices), keep_buffers(module), autocast, hooks:
            out = module.forward(*args, **kwargs)
        for dry, leaf in zip(tree_flatten(out)[0], tree_flatten(output)[0], strict=True):
            if isinstance(leaf, Tensor):
                real[self._storage(dry)[0]] = self._storage(leaf)
        return dict(real.get(address, (address, n)) for address, n in found.items() if address not in self._own)

    def _storage(self, tensor):
        storage = tensor.untyped_storage()
        self._references.append(StorageWeakRef(storage))
        return storage._cdata, storage.nbytes()


def _is_float(leaf):
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _outer(name):
    """Names of the modules around a module."""
    words = name.split('.') if name else []
    return ['.'.join(words[:i]) for i in range(len(words))]
