"""Changes of live models: finding submodules, mixing classes into theirs, and hooks that change a model."""

import copyreg
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import nn
from torch.fx import Proxy

from .library_code import replaced_code

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch 2.5 and older
    FSDPModule = None

__all__ = [
    'MADE_OF',
    'Mixin',
    'ModelHook',
    'detectors',
    'foreign_classes',
    'has_methods_of',
    'hook_arguments',
    'hook_class',
    'mix_in',
    'mix_into_known',
    'mix_out',
    'model_hook_class',
    'model_hooks',
    'named_submodules',
    'refuse_tracing',
    'stock_class',
    'unwrap',
]


class Mixin:
    """Base class of classes that are mixed into the class of a module, see :func:`mix_in`.

    Attributes:
        outermost (bool): Whether it stays in front of classes that are mixed in later. Default: False.
    """

    outermost = False

    def __init__(self, *args, **kwargs):
        # Somebody calls the class of a changed module: a slice of nn.Sequential does. The new module is a plain one.
        kind, fronts, derived = _decompose(type(self))
        if fronts:
            self.__class__ = _compose(kind, [], derived)
            self.__init__(*args, **kwargs)
        else:
            super().__init__(*args, **kwargs)

    def __prepare_scriptable__(self):
        # torch.jit.script calls this first. It puts what is returned in the place of the module in the live model.
        raise ValueError(
            f'{type(self).__name__} was changed by LeanHook or apply_lean and cannot be compiled by torch.jit.script. '
            'Call remove_lean(model) before, or use torch.jit.trace on the evaluated model'
        )

    def __reduce_ex__(self, protocol):
        # A class that was made at run time cannot be imported by its name, so a pickle has the classes it was made of.
        kind, fronts, derived = _decompose(type(self))
        _, (_, *args), *state = super().__reduce_ex__(protocol)
        return (copyreg.__newobj__, (type(self), *args), *state) if derived else (_new, (kind, fronts, *args), *state)


# Class that was made at run time -> the mixin and the class that it was made of.
MADE_OF: dict[type, tuple[type[Mixin], type]] = {}


@functools.cache
def _mixed_class(mixin, kind):
    """Return the class that joins a mixin and a class. It is made once: torch.compile compiles for each class.

    Its bases are those of the user's class as well, as mmengine's ``init_cfg`` initialises layers by the names of their
    class and its bases. A runner does so after its hooks have changed the model.
    """
    bases = [base for base in kind.__bases__ if issubclass(base, nn.Module)]
    mixed = type(kind.__name__, (mixin, kind, *bases), {'__module__': kind.__module__})
    MADE_OF[mixed] = mixin, kind
    return mixed


def _decompose(kind):
    """Split a class into the user's class, the mixins from the front, and the classes that were derived later.

    ``torch.nn.utils.parametrize`` and FSDP derive a class from that of the module, whatever was mixed into it.
    """
    fronts, derived = [], []
    while kind not in MADE_OF:
        base = next((base for base in kind.__bases__ if issubclass(base, Mixin) and issubclass(base, nn.Module)), None)
        if base is None:
            return kind, fronts, derived
        derived.append(kind)
        kind = base
    while kind in MADE_OF:
        front, kind = MADE_OF[kind]
        fronts.append(front)
    return kind, fronts, derived


def has_methods_of(obj: object, kind: type, *names: str) -> bool:
    """Check that an object runs methods of a class as its library defines them, and neither a subclass's nor its own.

    Args:
        obj (object): An object without :func:`mix_in` for these methods.
        kind (type): The class.
        *names (str): Names of the methods.
    """
    return isinstance(obj, kind) and all(
        name not in vars(obj) and getattr(type(obj), name) is getattr(kind, name) and not replaced_code(kind, name)
        for name in names
    )


def mix_into_known(model: nn.Module, mixin: type, is_known: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Mix a class into the modules of a model that are known.

    Args:
        model (nn.Module): The model, changed in place.
        mixin (type): The class.
        is_known (Callable[[nn.Module], bool]): Whether a module that does not have the class yet is to get it.

    Returns:
        dict[str, nn.Module]: All modules that have the class now, by name; the model itself is 'the model'.
    """
    mixed = {}
    for name, module in model.named_modules():
        if not isinstance(module, mixin):
            if not is_known(module):
                continue
            mix_in(module, mixin)
        mixed[name or 'the model'] = module
    return mixed


def refuse_tracing(module: nn.Module, args) -> None:
    """Raise an error if ``torch.fx`` traces a module: it supports neither a forward with ``*args`` nor lean operations.

    Args:
        module (nn.Module): The module.
        args: Positional arguments of its forward pass; of a traced module a proxy of them.

    Raises:
        ValueError: If it is traced.
    """
    if type(args) is not tuple or (args and isinstance(args[0], Proxy)):
        raise ValueError(
            f'{type(module).__name__} was changed by LeanHook or apply_lean and cannot be traced by torch.fx. Leave '
            'out efficient_conv_bn_eval (LeanHook saves the same memory), or trace the model before it is changed or '
            'after remove_lean(model)'
        )


def _compose(kind, fronts, derived=()):
    """Reverse :func:`_decompose`: return the user's class with mixins in front and with the classes derived later."""
    inner = kind
    for front in reversed(fronts):
        kind = _mixed_class(front, kind)
    for outer in reversed(derived):
        bases = tuple(kind if issubclass(base, inner) else base for base in outer.__bases__)
        content = {name: value for name, value in vars(outer).items() if name not in ('__dict__', '__weakref__')}
        kind = inner = type(outer.__name__, bases, content)
    return kind


def _new(kind, fronts, *args):  # pickles of changed models name this function
    kind = _compose(kind, fronts)
    return kind.__new__(kind, *args)


@functools.cache
def foreign_classes(kind: type) -> tuple[type, ...]:
    """Return a class without this package's mixins, followed by the classes that were derived from it later.

    Args:
        kind (type): The class of a module.
    """
    kind, _, derived = _decompose(kind)
    return kind, *derived


def _is_derived_by_torch(kind):
    """Return whether all that a derived class adds is of torch, whose FSDP and parametrizations leave forward alone."""
    if sum(not base.__module__.startswith('torch.distributed.') for base in kind.__bases__) != 1:
        return False
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        known = f'{function.__module__}.'.startswith('torch.') if callable(function) else name.startswith('__')
        if not known and name != '_abc_impl':  # of every class whose metaclass is ABCMeta
            return False
    return True


@functools.cache
def stock_class(kind: type) -> type:
    """Return a class without this package's mixins and without classes that torch derived later, for example by FSDP.

    A class that somebody else derived later is returned itself, because it may have another forward pass.

    Args:
        kind (type): The class of a module.
    """
    kind, *derived = foreign_classes(kind)
    for outer in derived:
        if not _is_derived_by_torch(outer):
            return outer
    if FSDPModule is not None and FSDPModule in kind.__bases__:
        return stock_class(kind.__bases__[1])
    return kind


def mix_in(module: nn.Module, mixin: type[Mixin]) -> None:
    """Mix a class into the class of a module, in front of all others except an outermost one.

    Args:
        module (nn.Module): The module, changed in place. Its class keeps its name.
        mixin (type[Mixin]): The class.
    """
    # A class, not an attribute of the instance: copies of the model, as for EMA, would call the original's attribute.
    kind, fronts, derived = _decompose(type(module))
    place = 1 if fronts and fronts[0].outermost and not mixin.outermost else 0
    module.__class__ = _compose(kind, [*fronts[:place], mixin, *fronts[place:]], derived)


def mix_out(module: nn.Module, mixin: type[Mixin] | tuple[type[Mixin], ...]) -> None:
    """Undo :func:`mix_in`: remove a class, whichever classes were mixed in or derived after it.

    Args:
        module (nn.Module): The module, changed in place.
        mixin (type[Mixin] | tuple[type[Mixin], ...]): The class or a base class of it, or several.
    """
    if not isinstance(module, mixin):
        return
    kind, fronts, derived = _decompose(type(module))
    kept = [front for front in fronts if not issubclass(front, mixin)]
    if kept != fronts:
        module.__class__ = _compose(kind, kept, derived)


def named_submodules(model: nn.Module, modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield submodules by their names.

    Args:
        model (nn.Module): The model.
        modules (Sequence[str]): Names of submodules. A list of modules means each of its members.

    Yields:
        tuple[str, nn.Module]: Name and submodule; each submodule once, if it is named twice.

    Raises:
        ValueError: If the model has no such submodule, or none is named.
    """
    seen = set()
    for name, module in _named(model, modules):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _named(model, modules):
    if not modules or '' in modules:
        raise ValueError(f"modules={list(modules)} must name submodules of the model, such as 'neck'")
    for name in modules:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            children = [child for child, _ in model.named_children()]
            raise ValueError(f'modules={list(modules)}: {name!r} does not exist; the model has {children}') from None
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f'{name}.{key}', member) for key, member in module.named_children())
        else:
            yield name, module


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside distributed wrappers and test-time augmentation, or the model itself.

    Raises:
        TypeError: If it is no ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        hint = (
            '; the train() of some models of mmdet returns None: call it in a line of its own' if model is None else ''
        )
        shown = ' '.join(f'{model!r}'.split())  # of several modules the text has lines
        raise TypeError(f'{shown:.80} is a {type(model).__name__}, and an nn.Module is needed{hint}')
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def detectors(model: nn.Module) -> dict[str, nn.Module]:
    """Return the detectors in a model: the outermost modules with a backbone.

    Args:
        model (nn.Module): A detector, or a model of several, such as the student and the teacher of semi-supervised
            training.

    Returns:
        dict[str, nn.Module]: Detectors by name; the model itself has the name ''. Empty for a backbone.
    """
    model = unwrap(model)
    outermost = {}
    for name, module in model.named_modules():  # the outer ones first; a backbone may be made of one
        if 'backbone' in module._modules and not any(not outer or name.startswith(f'{outer}.') for outer in outermost):
            outermost[name] = module
    return outermost


class ModelHook(Hook):
    """Base class of hooks that change the model before a run.

    Tools that build a detector without mmengine's runner find these hooks by their class and apply them. A project's
    own hook that changes the model should derive from this class.

    Attributes:
        exact (bool): Whether gradients are the same as without the hook. A study of gradients excludes other hooks from
            its exact baseline. Default: False.
    """

    exact = False

    def apply(self, model: nn.Module) -> str:
        """Change the model in place.

        Args:
            model (nn.Module): The detector, not wrapped.

        Returns:
            str: Description of the change, for the log.
        """
        raise NotImplementedError(f'{type(self).__name__} must define apply(model)')

    def before_run(self, runner) -> None:
        """Change the model of a runner and log what was done."""
        runner.logger.info(f'{type(self).__name__}: {self.apply(unwrap(runner.model))}')


def hook_class(cfg: dict) -> type | None:
    """Return the class of a hook, or ``None`` if none is registered under its name.

    Args:
        cfg (dict): A member of a config's ``custom_hooks``.
    """
    kind = cfg['type']
    return HOOKS.get(kind) if isinstance(kind, str) else kind


def hook_arguments(cfg: dict) -> dict:
    """Return the arguments of a hook's class: a config without its type and without its priority for the runner.

    Args:
        cfg (dict): A member of a config's ``custom_hooks``.
    """
    return {key: value for key, value in cfg.items() if key not in ('type', 'priority')}


def model_hook_class(cfg: dict) -> type[ModelHook] | None:
    """Return the class of a hook that changes the model.

    Args:
        cfg (dict): A member of a config's ``custom_hooks``.

    Returns:
        type[ModelHook] | None: The class, or ``None`` for any other hook.

    Raises:
        ValueError: If no such hook is registered.
    """
    kind = hook_class(cfg)
    if kind is None:
        near = difflib.get_close_matches(f'{cfg["type"]}'.rpartition('.')[2], HOOKS.module_dict, n=1, cutoff=0.75)
        remedy = f'did you mean {near[0]!r}?' if near else 'name its module in custom_imports'
        raise ValueError(f'custom_hooks: no hook is registered as {cfg["type"]!r}; {remedy}')
    return kind if isinstance(kind, type) and issubclass(kind, ModelHook) else None


def model_hooks(custom_hooks: Iterable[dict] | None) -> Iterator[ModelHook]:
    """Build the hooks that change the model.

    Args:
        custom_hooks (Iterable[dict] | None): ``custom_hooks`` of a config.

    Yields:
        ModelHook: The hooks in the order of the config.

    Raises:
        ValueError: If a hook is not registered.
    """
    for cfg in custom_hooks or []:
        if model_hook_class(cfg):
            yield HOOKS.build(dict(hook_arguments(cfg), type=cfg['type']))
