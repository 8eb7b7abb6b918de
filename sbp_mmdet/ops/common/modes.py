"""Modes and transforms of torch that compute something else of the functions that modules call."""

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

try:
    from torch.compiler import is_compiling
except ImportError:  # torch 2.2 and older
    from torch._dynamo.external_utils import is_compiling

__all__ = ['clones_what_is_written', 'evaluates_lean', 'runs_within_others']

_KNOWN = (DeviceContext,)  # of torch.set_default_device and `with torch.device(...)`
_OWN = 'sbp_mmdet.'  # the planner's


def evaluates_lean() -> bool:
    """Return whether a module in evaluation mode may run anything but its own code.

    It may with gradients, for the sake of frozen modules, unless a compiler or an exporter traces it: what those see of
    an evaluated model is the model's own code, without a break in the graph.
    """
    return torch.is_grad_enabled() and not is_compiling()


def runs_within_others() -> bool:
    """Return whether something is active that has to see what modules compute, so that they run their own code.

    These are transforms such as ``torch.func.vjp`` and forward-mode differentiation, which refuse operations with a
    backward pass of their own; ``torch.jit.trace``, which would record the outputs of such operations as constants; and
    a user's ``TorchFunctionMode``, which may replace any function. A checkpoint would not find them again in the
    backward pass.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._is_tracing():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    modes = _get_current_function_mode_stack()
    return not all(isinstance(mode, _KNOWN) or type(mode).__module__.startswith(_OWN) for mode in modes)


def clones_what_is_written() -> bool:
    """Return whether ``torch.autograd.graph.allow_mutation_on_saved_tensors`` is active.

    Ask only if ``torch._C._len_torch_dispatch_stack()`` is not zero, which takes less time.

    This mode clones what a function writes to, and looks for a written result under the name ``out`` only, though some
    functions of torch have another name for it.
    """
    return any(isinstance(mode, _CloneArgBeforeMutateMode) for mode in _get_current_dispatch_mode_stack())
