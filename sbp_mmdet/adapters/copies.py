"""Classes of other projects that are copies of mmdet's classes, and the comparison of their code.

mmpretrain, mmseg and mmpose contain ResNets, HRNets, Swin Transformers and CSP blocks of the same origin as mmdet's,
and mmdet's detectors may use them as backbones. A class in :data:`COPIES` is treated as the original only if its code
is the same: ``forward`` and every method that it reaches have the syntax tree of the original, and global names refer
to the same objects. Two statements may be missing in either, because settings say whether they do anything: plugins,
and stochastic depth after the branch.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable

from torch import nn

from ..surgery import stock_class

__all__ = ['COPIES', 'original_class', 'path_of', 'problem_of_copy']

_BACKBONES = {
    'resnet': ('BasicBlock', 'Bottleneck', 'ResNet', 'ResNetV1d'),
    'resnext': ('Bottleneck', 'ResNeXt'),
    'regnet': ('RegNet',),
    'res2net': ('Bottle2neck', 'Res2Net'),
    'resnest': ('Bottleneck', 'SplitAttentionConv2d', 'ResNeSt'),
    'hrnet': ('HRNet',),
    'swin': ('SwinBlock', 'ShiftWindowMSA', 'WindowMSA'),
}
_CSP = ('DarknetBottleneck', 'CSPNeXtBlock')
_PATCHES = ('PatchEmbed', 'PatchMerging')
# Module of a copy -> module of the original, names of the classes in both.
_MODULES = {
    f'{project}.models.backbones.{file}': (f'mmdet.models.backbones.{file}', names)
    for project in ('mmpretrain', 'mmseg', 'mmpose')
    for file, names in _BACKBONES.items()
} | {
    'mmpose.models.utils.csp_layer': ('mmdet.models.layers.csp_layer', (*_CSP, 'CSPLayer', 'ChannelAttention')),
    'mmpretrain.models.backbones.cspnet': ('mmdet.models.layers.csp_layer', _CSP[:1]),
    'mmpose.models.utils.transformer': ('mmdet.models.layers.transformer.utils', _PATCHES),
    'mmseg.models.utils.embed': ('mmdet.models.layers.transformer.utils', _PATCHES),
}
# Class of another project -> class of mmdet that it may be a copy of, both by module and name.
COPIES: dict[str, str] = {
    f'{module}.{name}': f'{of}.{name}' for module, (of, names) in _MODULES.items() for name in names
}


def path_of(kind: type) -> str:
    """Return the module and name of a class.

    Args:
        kind (type): The class.
    """
    return f'{kind.__module__}.{kind.__qualname__}'


@functools.cache
def original_class(kind: type) -> type:
    """Return the class of mmdet that a class is a copy of, or the class itself if it is no copy.

    Args:
        kind (type): The class, without mixins of this package.

    Example:
        >>> original_class(mmseg.models.backbones.resnet.Bottleneck) is mmdet.models.backbones.resnet.Bottleneck
        True
    """
    path = COPIES.get(path_of(kind))
    if path is None:
        return kind
    module, _, name = path.rpartition('.')
    stock = getattr(importlib.import_module(module), name)
    code = _code_of(kind)
    return stock if code and code == _code_of(stock) else kind


def problem_of_copy(module: nn.Module) -> str | None:
    """Return why a module of another project does more than the forward of the original, or ``None``.

    Args:
        module (nn.Module): A module whose class may be a copy.
    """
    kind = stock_class(type(module))
    depth = stock_class(type(getattr(module, 'drop_path', None)))
    if original_class(kind) is kind:
        return None
    if getattr(module, 'with_plugins', False):
        return f'plugins of {kind.__module__} are not supported'
    return None if depth in (type(None), nn.Identity) else f'its drop_path is a {depth.__name__}; set its rate to 0'


def _code_of(kind: type) -> dict | None:
    """Return the code of ``forward`` and of the methods that it reaches through ``self``.

    Returns:
        dict | None: For each method, its syntax tree and the objects of its global names. ``None`` if the source cannot
        be read.
    """
    code, names = {}, ['forward']
    while names:
        name = names.pop()
        function = _function_of(kind, name)
        if function is None or name in code:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None
        tree = _Simplifier().visit(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        code[name] = ast.dump(tree), {n: v for n, v in function.__globals__.items() if n in used}
        names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)]
    return code


def _function_of(kind: type, name: str) -> Callable | None:
    """Return a method, or the getter of a property, or ``None`` if ``nn.Module`` has the same one."""
    member = inspect.getattr_static(kind, name, None)
    if member is inspect.getattr_static(nn.Module, name, None):
        return None
    member = getattr(member, 'fget', None) or getattr(member, '__func__', member)
    return member if inspect.isfunction(member) else None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == 'self'


class _Simplifier(ast.NodeTransformer):
    """Transformer of syntax trees that removes docstrings, annotations, plugins and stochastic depth."""

    def visit_FunctionDef(self, node):
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:]
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return self.generic_visit(node)

    def visit_If(self, node):
        optional = isinstance(node.test, ast.Attribute) and node.test.attr == 'with_plugins' and not node.orelse
        return None if optional else self.generic_visit(node)

    def visit_Assign(self, node):
        called = node.value.func if isinstance(node.value, ast.Call) else None
        optional = isinstance(called, ast.Attribute) and _is_self(called.value) and called.attr == 'drop_path'
        return None if optional else self.generic_visit(node)
