"""Stochastic Backpropagation (SBP) for detectors in MMDetection.

Importing the package registers :class:`SBPConvNeXt`, :class:`SBPSwinTransformer`, :class:`SBPViT` and the hooks; in a
config: ``custom_imports = dict(imports=['sbp_mmdet'])``.
"""

import importlib.util

__version__ = '0.1.0'

_missing = [name for name in ('torch', 'mmengine', 'mmcv', 'mmdet') if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(
        f'sbp_mmdet needs {", ".join(_missing)}, which this environment lacks. From a checkout, tools/setup_env.sh '
        'makes one with all of it; or install torch, then one of the two mm stacks: pip install --no-build-isolation '
        "'.[onedl]' (maintained) or '.[upstream]' (mmcv 2.1, mmdet 3.3)."
    )

from .adapters import adapter  # noqa: E402
from .apply import LeanHook, apply_lean, remove_lean  # noqa: E402
from .former import FUNCTIONS as _FORMER  # noqa: E402
from .functional import sbp  # noqa: E402
from .masks import positions, sample_mask  # noqa: E402
from .models.convnext import SBPConvNeXt  # noqa: E402
from .models.swin import SBPSwinTransformer  # noqa: E402
from .models.vit import SBPViT  # noqa: E402
from .rehearse import RehearseHook  # noqa: E402
from .resume import AtomicBackend  # noqa: E402
from .savings import CheckpointModulesHook, TargetsInChunksHook  # noqa: E402

__all__ = [
    'AtomicBackend',
    'CheckpointModulesHook',
    'LeanHook',
    'RehearseHook',
    'SBPConvNeXt',
    'SBPSwinTransformer',
    'SBPViT',
    'TargetsInChunksHook',
    'adapter',
    'apply_lean',
    'positions',
    'remove_lean',
    'sample_mask',
    'sbp',
    '__version__',
]


def __getattr__(name):
    if name in _FORMER:
        raise ImportError(f'sbp_mmdet has no {name} any more: {_FORMER[name]}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
