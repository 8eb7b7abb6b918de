"""Fast access to what bindings read from modules in every step: parameters, and cached settings."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

__all__ = ['CachedSettings', 'has_active_dropout', 'has_trained_parameters', 'weight_and_bias', 'weights_and_biases']


class CachedSettings:
    """Cache of an operation's settings: they are built again only when one of their values changes.

    Copies and pickles of the cache start empty.

    Args:
        kind (Callable): Class of the settings, or a function that makes them.
    """

    def __init__(self, kind: Callable):
        self.kind, self._last = kind, (None, None)

    def __reduce__(self):
        return CachedSettings, (self.kind,)

    def __call__(self, *made_of):
        """Return the settings that ``kind`` builds from these arguments."""
        last = self._last  # read and written at once, as another thread may run the module with other settings
        if made_of != last[0]:
            self._last = last = made_of, self.kind(*made_of)
        return last[1]


def weight_and_bias(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a module, ``None`` where it has none.

    Args:
        module (nn.Module): The module.
    """
    return tuple(weights_and_biases((module,)))


def weights_and_biases(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    """Return weight and bias of each module, one module after the other, ``None`` where it has none.

    The attribute lookup of ``nn.Module`` takes three times as long.

    Args:
        modules (Iterable[nn.Module]): The modules.
    """
    tensors = []
    for module in modules:
        own = module.__dict__
        parameters = own['_parameters']
        weight = parameters['weight'] if 'weight' in parameters else None
        bias = parameters['bias'] if 'bias' in parameters else None
        # FSDP keeps the parameters elsewhere and puts views of them into the instance.
        if weight is None and 'weight' in own:
            weight = own['weight']
        if bias is None and 'bias' in own:
            bias = own['bias']
        tensors += weight, bias
    return tensors


def has_trained_parameters(module: nn.Module) -> bool:
    """Return whether any parameter of a module needs a gradient.

    ``nn.Module.parameters()`` takes ten times as long to list them.

    Args:
        module (nn.Module): The module.
    """
    own = module.__dict__
    if any([p is not None and p.requires_grad for p in own['_parameters'].values()]):
        return True
    return any([child is not None and has_trained_parameters(child) for child in own['_modules'].values()])


def has_active_dropout(module: nn.Module) -> bool:
    """Return whether dropout is active in a module: in an ``nn.Dropout`` inside it, or as the rate of an attention.

    Args:
        module (nn.Module): The module.
    """
    inside = [m for m in module.modules() if m.training]
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, 'dropout', 0) for m in inside]
    return any([isinstance(rate, (int, float)) and rate > 0 for rate in rates])
