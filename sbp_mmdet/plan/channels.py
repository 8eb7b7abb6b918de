"""Whether the images of a config have as many channels as its preprocessor and its backbone take."""

import inspect

from mmdet.models import DetDataPreprocessor
from mmdet.registry import MODELS, TRANSFORMS
from mmengine.config import Config

from .config_values import list_loaders
from .transforms import innermost_of, name_of, transforms_of

__all__ = ['find_channel_mismatch', 'loaded_channels']

_OF_LIBRARIES = ('mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'sbp_mmdet')


def loaded_channels(config: Config) -> int | None:
    """Return the number of channels that a config's train pipeline loads, where the config alone says it.

    Args:
        config (Config): Config of a detector.

    Returns:
        int | None: 1 for images that are loaded in grey and that no transform of the user's own may change; ``None``
        otherwise.
    """
    datasets = [loader.get('dataset') for loader in list_loaders(config, 'train_dataloader').values()]
    steps = [step for dataset in datasets for step in innermost_of(transforms_of(dataset))]
    types = [step.get('type') for step in steps]
    kinds = [TRANSFORMS.get(kind) if isinstance(kind, str) else kind for kind in types]
    known = all(map(_is_of_libraries, kinds))
    grey = [step.get('color_type') == 'grayscale' for step in steps if name_of(step).startswith('LoadImage')]
    return 1 if grey and all(grey) and known else None


def find_channel_mismatch(config: Config, channels: int) -> str | None:
    """Return an error message if images have another number of channels than a config's model takes, else ``None``.

    Args:
        config (Config): Config of a detector, or of a model that holds one. Its preprocessor and its backbone may be of
            any class; of those of the user's own, nothing is known.
        channels (int): Number of channels of the images.

    Returns:
        str | None: The message, with the remedy.
    """
    model = config.get('model') or {}
    preprocessor = model.get('data_preprocessor') or {}
    preprocessor = preprocessor.get('data_preprocessor') or preprocessor  # of branches
    if _class_of(preprocessor) is not DetDataPreprocessor:
        return None
    images, remedy = f'{channels} channel{"s" * (channels > 1)}', _remedy(channels)
    for key in ('bgr_to_rgb', 'rgb_to_bgr'):
        if preprocessor.get(key) and channels < 3:
            return f'model.data_preprocessor: {key}=True needs images of 3 channels, and these have {images}; {remedy}'
        if preprocessor.get(key) and channels > 3:
            images = f'3 channels behind {key}=True, which takes the first three of {channels}'
            channels = 3
    means = len(preprocessor.get('mean') or ())
    if means > 1 and means != channels:
        return f'model.data_preprocessor: mean has {means} values, but the images have {images}; {remedy}'
    backbone = (model.get('detector') or model).get('backbone') or {}
    kind = _class_of(backbone)
    if not _is_of_libraries(kind):
        return None
    own = inspect.signature(kind.__init__).parameters.get('in_channels')
    taken = backbone.get('in_channels', own and own.default)
    if isinstance(taken, int) and taken != channels:
        return f'model.backbone: in_channels={taken}, but the images have {images}; {remedy}'
    return None


def _remedy(channels):
    own = f'set model.backbone.in_channels={channels}'
    if channels != 1:
        return f'{own} and model.data_preprocessor=dict(mean=None, std=None, bgr_to_rgb=False)'
    return (
        "leave out color_type='grayscale' of LoadImageFromFile, so that grey images are loaded in three equal "
        f'channels, or {own} and model.data_preprocessor=dict(mean=[127.5], std=[50.0], bgr_to_rgb=False)'
    )


def _is_of_libraries(kind):
    return getattr(kind, '__module__', '').partition('.')[0] in _OF_LIBRARIES


def _class_of(node):
    kind = node.get('type')
    return MODELS.get(kind) if isinstance(kind, str) else kind
