"""What bindings read of modules in each step, in few calls: parameters, and settings that stay the same."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

__all__ = ['Remembered', 'affine', 'affine_of_all', 'drops_numbers', 'trains']


class Remembered:
    """Settings of an operation, kept from step to step and made anew when one of their values changes.

    Copies and pickles start empty.

    Args:
        kind (Callable): Class of the settings, or a function that makes them.
    """

    def __init__(self, kind: Callable):
        self.kind, self._made_of, self._made = kind, None, None

    def __reduce__(self):
        return Remembered, (self.kind,)

    def __call__(self, *made_of):
        """Return the settings that are made of these arguments."""
        if made_of != self._made_of:
            self._made_of, self._made = made_of, self.kind(*made_of)
        return self._made


def affine(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a module; ``nn.Module`` takes three times as long to find each.

    Args:
        module (nn.Module): The module.
    """
    own = module.__dict__
    parameters = own['_parameters']
    weight = parameters['weight'] if 'weight' in parameters else None
    bias = parameters['bias'] if 'bias' in parameters else None
    # FSDP keeps the parameters elsewhere and puts views of them into the instance.
    if weight is None and 'weight' in own:
        weight = own['weight']
    if bias is None and 'bias' in own:
        bias = own['bias']
    return weight, bias


def affine_of_all(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    """Return weight and bias of each module, one module after the other, see :func:`affine`.

    Args:
        modules (Iterable[nn.Module]): The modules.
    """
    tensors = []
    for module in modules:
        tensors += affine(module)
    return tensors


def trains(module: nn.Module) -> bool:
    """Return whether any parameter of a module needs a gradient; ``nn.Module`` takes ten times as long to list them.

    Args:
        module (nn.Module): The module.
    """
    own = module.__dict__
    if any([p is not None and p.requires_grad for p in own['_parameters'].values()]):
        return True
    return any([child is not None and trains(child) for child in own['_modules'].values()])


def drops_numbers(module: nn.Module) -> bool:
    """Return whether dropout is active in a module: that of an ``nn.Dropout`` inside, or the rate of an attention.

    Args:
        module (nn.Module): The module.
    """
    inside = [m for m in module.modules() if m.training]
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, 'dropout', 0) for m in inside]
    return any([isinstance(rate, (int, float)) and rate > 0 for rate in rates])
