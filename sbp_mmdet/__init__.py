"""Memory-efficient training of MMDetection's detectors: exact lean operations and Stochastic Backpropagation (SBP).

Importing the package registers :class:`SBPConvNeXt`, :class:`SBPSwinTransformer`, :class:`SBPViT` and the hooks. In a
config: ``custom_imports = dict(imports=['sbp_mmdet'])``.
"""

import contextlib as _contextlib
import importlib.util
import sys as _sys
from pathlib import Path as _Path

__version__ = '0.2.0'

_missing = [name for name in ('torch', 'mmengine', 'mmcv', 'mmdet') if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(
        f'sbp_mmdet needs {", ".join(_missing)}, which this environment lacks. From a checkout, tools/setup_env.sh '
        'makes one with all of it; or install torch, then one of the two mm stacks: pip install --no-build-isolation '
        "'.[onedl]' (maintained) or '.[upstream]' (mmcv 2.1, mmdet 3.3)."
    )

# Some builds of mmdet print when they are imported. Their output goes to stderr, because scripts may parse stdout.
with _contextlib.redirect_stdout(_sys.stderr):
    import mmdet as _mmdet  # noqa: E402, F401

from .adapters import adapter  # noqa: E402
from .apply import apply_lean, remove_lean  # noqa: E402
from .hooks import CheckpointModulesHook, LeanHook, TargetsInChunksHook  # noqa: E402
from .models.convnext import SBPConvNeXt  # noqa: E402
from .models.swin import SBPSwinTransformer  # noqa: E402
from .models.vit import SBPViT  # noqa: E402
from .plan.rehearse import RehearseHook  # noqa: E402
from .resume import AtomicBackend  # noqa: E402
from .stochastic_backprop.algorithm1 import sbp  # noqa: E402
from .stochastic_backprop.masks import positions, sample_mask  # noqa: E402

__all__ = [
    'AtomicBackend',
    'CheckpointModulesHook',
    'LeanHook',
    'RehearseHook',
    'SBPConvNeXt',
    'SBPSwinTransformer',
    'SBPViT',
    'TargetsInChunksHook',
    '__version__',
    'adapter',
    'apply_lean',
    'config',
    'positions',
    'remove_lean',
    'sample_mask',
    'sbp',
]


def config(name: str) -> str:
    """Return the path of a config of this package, for the ``_base_`` of a config in another folder.

    Args:
        name (str): Folder and file, such as 'sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py'.

    Returns:
        str: The path.

    Raises:
        ValueError: If there is no such config, or there are none at all. The message lists all configs.

    Example:
        >>> _base_ = __import__('sbp_mmdet').config('sbp_swin/mask-rcnn_sbp-swin-t_fpn_amp-ms-crop-3x_coco.py')
    """
    package = _Path(__file__).parent
    folder = next((f for f in (package / '.mim/configs', package.parent / 'configs') if f.is_dir()), None)
    if folder is None:
        raise ValueError(f'there are no configs beside {package}; install the package by pip, not as a zip file')
    if not (folder / name).is_file():
        known = sorted(str(path.relative_to(folder)) for path in folder.glob('*/*.py'))
        raise ValueError(f'config {name!r} does not exist; choose from {known}')
    return str(folder / name)
