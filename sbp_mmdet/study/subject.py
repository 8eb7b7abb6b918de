"""What a study of gradients runs on: a config's detector, its weights, and batches of its training set."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner, load_checkpoint, set_random_seed
from torch import nn

from ..analysis.detector import build_detector
from ..analysis.variants import without_hook
from ..families import require
from ..models.weights import quiet
from ..surgery import model_hook_class

__all__ = ['build_model', 'exact_config', 'train_batches']


def exact_config(config: Config) -> Config:
    """A config without SBP in the backbone and without hooks that make gradients inexact.

    Args:
        config (Config): Config of a detector whose backbone SBP applies to; not changed.

    Returns:
        Config: A changed copy; its backbone takes ``sbp_cfg``.

    Raises:
        ValueError: If SBP does not apply to the backbone.
    """
    config = copy.deepcopy(without_hook(config))
    family = require(config.model.get('backbone'))
    config.model.backbone.update(type=family.backbone, sbp_cfg=None, with_cp=False)
    init_default_scope('mmdet')  # where hooks are looked up by name
    kinds = [(cfg, model_hook_class(cfg)) for cfg in config.get('custom_hooks') or []]
    config.custom_hooks = [cfg for cfg, kind in kinds if kind is None or kind.exact]
    return config


def build_model(
    config: Config,
    checkpoint: str | Path | None = None,
    device: str = 'cpu',
    seed: int = 0,
    backbone: str | Path | None = None,
) -> nn.Module:
    """A config's detector in training mode, as :func:`exact_config` has it.

    Args:
        config (Config): Config of a detector whose backbone SBP applies to; not changed.
        checkpoint (str | Path | None): Its weights, as mmengine saves them; None: ``load_from`` of the config, or the
            config's own start without anything downloaded. Default: None.
        device (str): Where it runs. Default: 'cpu'.
        seed (int): Of the start. Default: 0.
        backbone (str | Path | None): Weights of the backbone alone, under any name that is known. Default: None.

    Returns:
        nn.Module: The detector.

    Raises:
        ValueError: If SBP does not apply to the backbone, or the checkpoint does not fit.
    """
    config = exact_config(config)
    set_random_seed(seed)
    model, _ = build_detector(config, device)
    checkpoint = checkpoint or config.get('load_from')
    if checkpoint is None:
        with quiet():
            model.init_weights()
    else:
        _load(model, checkpoint)
    if backbone:
        _load(model.backbone, backbone, strict=False)  # no file has the scales that ViT makes for a detector
    return model.train()


def _load(model, checkpoint, strict=True):
    with quiet():
        try:
            load_checkpoint(model, str(checkpoint), map_location='cpu', strict=strict)
        except FileNotFoundError as error:
            raise ValueError(f'checkpoint {checkpoint} does not exist (working folder: {Path.cwd()})') from error
        except (RuntimeError, OSError, TypeError, pickle.UnpicklingError) as error:
            reason = ' '.join(str(error).split())
            raise ValueError(f'checkpoint {checkpoint} is not one of this config: {reason[:300]}') from error


def train_batches(config: Config, number: int, seed: int = 0) -> Iterator[dict]:
    """Batches of the config's train dataloader, its augmentation included.

    Args:
        config (Config): With ``train_dataloader``.
        number (int): How many; a short data set is gone through more than once.
        seed (int): Of order and augmentation. Default: 0.

    Yields:
        dict: ``inputs`` and ``data_samples``, before the data preprocessor.

    Raises:
        ValueError: If the data set cannot be read, or has no whole batch.
    """
    cfg = copy.deepcopy(config.train_dataloader)
    cfg.update(num_workers=0, persistent_workers=False)  # one process, so that one seed decides
    cfg.pop('prefetch_factor', None)
    set_random_seed(seed)
    try:
        loader = Runner.build_dataloader(cfg, seed=seed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f'train_dataloader: {error} (working folder: {Path.cwd()}); '
            'set train_dataloader.dataset.data_root and ann_file'
        ) from error
    given = epoch = 0
    while given < number:
        for sampler in (loader.sampler, loader.batch_sampler.sampler):  # the one of the two that mmengine shuffles
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
        before = given
        for batch in loader:
            yield batch
            given += 1
            if given == number:
                return
        if given == before:
            raise ValueError('train_dataloader gives no batch: is its data set empty, or smaller than batch_size?')
        epoch += 1
