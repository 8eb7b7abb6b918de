"""Checks of a config's backbones: whether they can be built, and whether the neck accepts what they return."""

import inspect
import itertools

import torch
from mmdet.models.necks import FPN, FPN_CARAFE, NASFPN, PAFPN, YOLOXPAFPN, ChannelMapper, CSPNeXtPAFPN
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import nn

from ..surgery import stock_class
from .config_keys import describe_mistake, scope_of, values_in
from .errors import describe_error

__all__ = ['STANDS_IN', 'check_backbones', 'find_problems', 'is_ours']

# Backbones of packages that may be missing -> the backbone of this package with the same arguments and parameters.
STANDS_IN = {'mmpretrain.ConvNeXt': 'SBPConvNeXt', 'mmcls.ConvNeXt': 'SBPConvNeXt'}
_NECKS = FPN, FPN_CARAFE, PAFPN, NASFPN, ChannelMapper, YOLOXPAFPN, CSPNeXtPAFPN  # ``in_channels``: those of each map
# Arguments of backbones that also classify -> the value with which they return feature maps.
_FEATURE_MAPS = {'gap_before_final_norm': False, 'out_type': 'featmap'}


def check_backbones(config: Config) -> list[nn.Module]:
    """Check backbones of this package, such as that of a teacher too, and a classifier's backbone of a detector.

    Args:
        config (Config): Config of a detector.

    Returns:
        list[nn.Module]: The backbones of this package, on the device 'meta'.

    Raises:
        ValueError: If a backbone of this package cannot be built, or the neck does not accept what a backbone returns.
            The message names the value and the remedy.
    """
    found = []
    for key, node in values_in('model', config.get('model')):
        if not isinstance(node, dict) or 'type' not in node:
            continue
        kind = name = node['type']
        if isinstance(name, str):
            kind = MODELS.get(name) or (MODELS.get(STANDS_IN[name]) if name in STANDS_IN else None)
        own, is_detectors = is_ours(kind), key == 'model.backbone'
        if not own and not (is_detectors and _feature_map_key(kind)):
            continue
        if (backbone := _build(config, key, kind, node)) is None:
            continue
        found += [backbone] if own else []
        name = name if isinstance(name, str) else kind.__name__
        if is_detectors and (problems := find_problems(config.model, name, backbone)):
            raise ValueError(problems)
    return found


def _build(config, key, kind, node):
    """Build a backbone, or return ``None`` if one of another package fails: a step reports what its own code raises."""
    arguments = {key: value for key, value in node.items() if key not in ('type', 'init_cfg', '_scope_')}
    try:
        with DefaultScope.overwrite_default_scope(scope_of(config)), torch.device('meta'):
            return kind(**arguments)
    except Exception as error:  # whatever its values may raise
        if not is_ours(kind):
            return None
        text = f'{key}: {error}' if isinstance(error, ValueError) else describe_mistake(config, error)
        raise ValueError(text or f'{key}: {describe_error(error)}') from error


def find_problems(model: dict, name: str, backbone: nn.Module) -> str | None:
    """Return why the neck does not accept what a backbone returns, with the remedy, or ``None`` if it does.

    Args:
        model (dict): Config of a detector.
        name (str): Name of the backbone's class.
        backbone (nn.Module): The backbone, on the device 'meta'.
    """
    problems = _find_neck_mismatch(model, name, backbone), _find_flat_outputs(model, name, backbone)
    return '; '.join(filter(None, problems)) or None


def _find_neck_mismatch(model, name, backbone):
    """Return a message if the neck's ``in_channels`` differ from the backbone's output channels, else ``None``.

    In other necks than those of :data:`_NECKS`, ``in_channels`` may have another meaning.
    """
    widths = getattr(backbone, 'num_features', getattr(backbone, 'channels', None))  # of the stages
    kind, neck = _neck(model)
    given = neck.get('in_channels')
    lists = isinstance(widths, (list, tuple)) and isinstance(given, (list, tuple))
    if kind not in _NECKS or not lists or not hasattr(backbone, 'out_indices'):
        return None
    there = [widths[i] for i in backbone.out_indices]
    if [*given] == there:
        return None
    maps = f'{len(there)} map{"s" if len(there) > 1 else ""}'
    remedy = f'model.neck.in_channels={there}, or another arch'
    for stages in itertools.combinations(range(len(widths)), len(given)):
        if [widths[i] for i in stages] == [*given]:
            remedy = f'model.backbone.out_indices={[*stages]}'
    return (
        f'model.neck: in_channels={[*given]}, but {name} gives {maps} of {there} channels '
        f'(out_indices={[*backbone.out_indices]}); set {remedy}'
    )


def _find_flat_outputs(model, name, backbone):
    """Return a message if a backbone returns vectors, as for classification, to a neck of mmdet, else ``None``."""
    kind, (neck, _), arguments = stock_class(type(backbone)), _neck(model), model['backbone']
    key = _feature_map_key(kind)
    if not key or not getattr(neck, '__module__', '').startswith('mmdet.models.necks'):
        return None
    try:
        with torch.no_grad():
            outputs = backbone(torch.zeros(2, arguments.get('in_channels', 3), 64, 64, device='meta'))
    except Exception:  # noqa: BLE001  its code may need another device or size; a step reports what it raises
        return None
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    shape = next((tuple(x.shape) for x in outputs if isinstance(x, torch.Tensor) and x.dim() == 2), None)
    if shape is None:
        return None
    given = arguments.get(key, inspect.signature(kind).parameters[key].default)
    return (
        f'model.backbone: {name} with {key}={given!r} gives vectors of {shape[1]} channels, as for '
        f'classification, but {neck.__name__} needs feature maps; set model.backbone.{key}={_FEATURE_MAPS[key]!r}'
    )


def _neck(model):
    """Return class and config of the first neck of a detector."""
    neck = model.get('neck') or {}
    neck = neck[0] if isinstance(neck, (list, tuple)) else neck
    kind = neck.get('type')
    return MODELS.get(kind) if isinstance(kind, str) else kind, neck


def _feature_map_key(kind):
    """Return the argument of a class of backbones that decides whether it returns feature maps, or ``None``."""
    parameters = inspect.signature(kind).parameters if isinstance(kind, type) else ()
    return next((key for key in _FEATURE_MAPS if key in parameters), None)


def is_ours(kind: type | None) -> bool:
    """Return whether a class is of this package."""
    return getattr(kind, '__module__', '').partition('.')[0] == 'sbp_mmdet'
