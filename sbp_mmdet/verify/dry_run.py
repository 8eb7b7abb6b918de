"""Forward passes without side effects: a copy of the model without hooks, and restored random and other states."""

import contextlib
import copy
import functools
import inspect
import random
from collections.abc import Collection, Iterator

import numpy as np
import torch
from mmengine.logging import MessageHub
from mmengine.model.utils import _BatchNormXd
from mmengine.optim import OptimWrapperDict
from mmengine.runner import activation_checkpointing
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..adapters.predicate import is_hooked_globally
from ..checkpointing import Checkpointed
from ..surgery import mix_in

__all__ = [
    'CannotCopy',
    'NoUpdate',
    'hookless_copy',
    'put_tensor_back',
    'random_state_restorer',
    'restored_messages',
    'restored_parameters',
    'restored_random_states',
    'without_side_effects',
]


class CannotCopy(Exception):
    """Error of a model that cannot be copied without its hooks."""


def hookless_copy(model: nn.Module) -> nn.Module:
    """Copy a model without its hooks.

    Parameters are shared with the original, so the copy must not be trained. Buffers and everything else are copied.
    Synchronised batch norms become batch norms of this process, so a pass of the copy does not communicate.

    Args:
        model (nn.Module): The model, not wrapped.

    Returns:
        nn.Module: The copy.

    Raises:
        CannotCopy: If parameters are sharded or have no values, hooks of all modules are set, or a module's forward is
            a function that may refer to the original.
    """
    if is_hooked_globally():
        raise CannotCopy(
            'hooks are registered for all modules; remove them for the first step (register_module_forward_hook)'
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CannotCopy(f'the lazy module of {name} has no values yet; run the model once before it is changed')
        if tensor.is_meta:
            raise CannotCopy(f'{name} is on the meta device, so it has no values')
    memo = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if 'hooks' in key and isinstance(value, dict):
                memo[id(value)] = type(value)()
            elif isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()  # deepcopy refuses tensors with a graph
        _check_forward(name, module)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, 'full_tensor') or hasattr(parameter, '_sharded'):
            raise CannotCopy(f'{name} is sharded; run sbp-mmdet verify CONFIG on one GPU')
        memo[id(parameter)] = parameter
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        vars(module).pop('_compiled_call_impl', None)
        for key in [key for key, value in vars(module).items() if _is_compiled(value)]:
            delattr(module, key)  # such as mmengine's `train_step`: it would run the original
        if _is_checkpointed_by_mmengine(vars(module).get('forward')):  # its function would run the original
            del module.forward
            mix_in(module, Checkpointed)
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _BatchNormXd
    return copied


def _check_forward(name, module):
    """Raise :class:`CannotCopy` if a forward of the instance may refer to the original, as any function may."""
    forward = vars(module).get('forward')
    if forward is None or inspect.ismethod(forward) or _is_compiled(forward):
        return
    if isinstance(forward, functools.partial) or _is_checkpointed_by_mmengine(forward):
        return
    raise CannotCopy(
        f'the forward pass of {name or "the model"} was replaced by a function of the instance; define it in its class'
    )


def _is_checkpointed_by_mmengine(forward):
    """Return whether a forward is the function that ``activation_checkpointing`` of a config puts there."""
    ours = getattr(forward, '__globals__', None) is vars(activation_checkpointing)
    return ours and inspect.ismethod(getattr(forward, '__wrapped__', None))


def _is_compiled(forward):
    return inspect.ismethod(getattr(forward, '_torchdynamo_orig_callable', None))


class NoUpdate:
    """Replacement for an optimizer wrapper, or for several, in a step that does not update parameters.

    It has those methods of mmengine's ``OptimWrapper`` and ``OptimWrapperDict`` with which a ``train_step`` updates.
    All that it may read otherwise, such as learning rates, is the wrapper's.

    Args:
        wrapper (OptimWrapper): The optimizer wrapper, whose ``optim_context`` the forward pass runs in.
        backward (bool): Whether the backward pass runs. Default: False.
    """

    def __init__(self, wrapper, backward: bool = False):
        self._wrapper, self._backward = wrapper, backward
        several = isinstance(wrapper, OptimWrapperDict)
        self._each = {name: NoUpdate(one, backward) for name, one in wrapper.items()} if several else {}
        self.keys, self.values, self.items = self._each.keys, self._each.values, self._each.items

    def __getitem__(self, name: str) -> 'NoUpdate':
        return self._each[name]

    def __contains__(self, name: str) -> bool:
        return name in self._each

    def __len__(self) -> int:
        return len(self._each)

    def __getattr__(self, name: str):
        if name.startswith('__') or name == '_wrapper':  # those that Python looks for, and before this one is made
            raise AttributeError(name)
        return getattr(self._wrapper, name)

    @property
    def optimizer(self) -> '_NoStep':
        """The optimizer, which updates nothing."""
        return _NoStep(self._wrapper.optimizer)

    @property
    def optim_wrappers(self) -> dict[str, 'NoUpdate']:
        """Replacements for several wrappers, by their names."""
        return self._each

    @property
    def param_groups(self) -> list[dict] | dict[str, list[dict]]:
        """Copies of the groups of the optimizer, or of each one by name: a step may write a learning rate into them."""
        return {name: one.param_groups for name, one in self.items()} or self.optimizer.param_groups

    def update_params(self, loss: Tensor, *args, **kwargs) -> None:
        """Run the backward pass if ``backward`` is true, and update nothing."""
        self.backward(loss)

    def backward(self, loss: Tensor, **kwargs) -> None:
        """Run the backward pass if ``backward`` is true."""
        if self._backward:
            loss.backward(**kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss."""
        return loss

    def should_update(self) -> bool:
        """Return that this step is one that updates parameters."""
        return True

    def step(self, **kwargs) -> None:
        """Update nothing."""

    def zero_grad(self, **kwargs) -> None:
        """Keep the gradients: the caller of the step restores them."""


class _NoStep:
    """Replacement for an optimizer, see :class:`NoUpdate`."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        if name.startswith('__') or name == '_optimizer':
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property
    def param_groups(self):
        return [dict(group) for group in self._optimizer.param_groups]

    def step(self, *args, **kwargs):
        pass

    def zero_grad(self, *args, **kwargs):
        pass


@contextlib.contextmanager
def without_side_effects(devices: set[torch.device]) -> Iterator[None]:
    """Restore at the end of the context what a forward pass changes outside of the model.

    These are the random states of Python, NumPy and torch, and mmengine's message hub. cuDNN's benchmark is disabled
    within the context, so that it chooses no algorithms there. Autocast's cache is emptied: a pass without gradients
    leaves casts of the weights there, by which older versions of torch cut the weights off from their gradients in the
    training pass that follows in the same context of autocast.

    Args:
        devices (set[torch.device]): Devices of the model.
    """
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with restored_random_states(devices), restored_messages():
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.clear_autocast_cache()


@contextlib.contextmanager
def restored_parameters(model: nn.Module) -> Iterator[None]:
    """Restore a model's parameters at the end of the context, where its forward pass writes to them.

    A teacher that follows its student does so, past autograd and without a new version. The copies lie on the host.

    Args:
        model (nn.Module): The model.
    """
    before = [(p, p.detach().to('cpu', copy=True)) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in before:
                put_tensor_back(parameter, value)


def put_tensor_back(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor the values that it had before, if it has others now.

    Args:
        tensor (Tensor): The tensor.
        before (Tensor): Its values, on the host.
    """
    if tensor.shape != before.shape or tensor.dtype != before.dtype:
        tensor.data = before.to(tensor.device)
    elif not torch.equal(tensor.detach(), value := before.to(tensor.device)):
        tensor.detach().copy_(value)


@contextlib.contextmanager
def restored_messages() -> Iterator[None]:
    """Restore at the end of the context the information and the scalars of mmengine's message hub."""
    hub = MessageHub.get_current_instance()
    info, scalars = dict(hub.runtime_info), dict(hub.log_scalars)
    histories = [(history, dict(vars(history))) for history in scalars.values()]
    try:
        yield
    finally:
        for values, before in ((hub.runtime_info, info), (hub.log_scalars, scalars)):
            values.clear()
            values.update(before)
        for history, before in histories:
            vars(history).update(before)


@contextlib.contextmanager
def restored_random_states(devices: Collection[torch.device] = ()) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch at the end of the context.

    Args:
        devices (Collection[torch.device]): Devices besides the CPU. Default: none.
    """
    python, numpy, put_back = random.getstate(), np.random.get_state(), random_state_restorer(devices)
    try:
        yield
    finally:
        put_back()
        random.setstate(python)
        np.random.set_state(numpy)


def random_state_restorer(devices: Collection[torch.device]) -> functools.partial:
    """Return a function that restores the present random states of torch.

    Args:
        devices (Collection[torch.device]): Devices besides the CPU.

    Returns:
        functools.partial: The function, which may be called several times.
    """
    cuda = [(torch.cuda.get_rng_state(device), device) for device in devices if device.type == 'cuda']
    return functools.partial(_set_random_state, torch.get_rng_state(), cuda)


def _set_random_state(cpu, cuda):
    torch.set_rng_state(cpu)
    for state, device in cuda:
        torch.cuda.set_rng_state(state, device)
