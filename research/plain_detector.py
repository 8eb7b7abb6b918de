"""Builds what studies need: a config's plain detector, its weights, and batches of its training set."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import CheckpointLoader, Runner, set_random_seed
from torch import nn

from sbp_mmdet.models.weights import quiet
from sbp_mmdet.plan.detector import build_detector
from sbp_mmdet.plan.variants import make_plain

__all__ = ['build_model', 'train_batches']


def build_model(config: Config, checkpoint: str | None = None, device: str = 'cpu', seed: int = 0) -> nn.Module:
    """Build the plain detector of a config, in training mode."""
    set_random_seed(seed)
    model, _ = build_detector(make_plain(config), device)
    checkpoint = checkpoint or config.get('load_from')
    with quiet():
        if checkpoint is None:
            model.init_weights()
        else:
            _load(model, str(checkpoint))
    return model.train()


def _load(model, checkpoint):
    try:
        content = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
        weights = content.get('state_dict', content.get('model', content))
        weights = {name.removeprefix('module.'): value for name, value in weights.items()}
        whole = any(name.startswith('backbone.') for name in weights)
        target = model if whole else model.backbone
        # No file of a backbone has the scales that ViT makes for a detector.
        missing = target.load_state_dict(weights, strict=whole).missing_keys
        if len(missing) == len(target.state_dict()):
            raise RuntimeError(f'it has {[*weights][:2]}')
    except FileNotFoundError as error:
        raise ValueError(f'checkpoint {checkpoint} does not exist (working folder: {Path.cwd()})') from error
    except (RuntimeError, OSError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        reason = ' '.join(str(error).split())[:300]
        raise ValueError(f'checkpoint {checkpoint} is not one of this config: {reason}') from error


def train_batches(config: Config, number: int, seed: int = 0) -> Iterator[dict]:
    """Yield batches of a config's train dataloader, with augmentation, before the data preprocessor.

    A short data set is read more than once.

    Raises:
        ValueError: If the data set cannot be read, or has less than a batch.
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
    number_given = epoch = 0
    while number_given < number:
        for sampler in (loader.sampler, loader.batch_sampler.sampler):  # the one of the two that mmengine shuffles
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
        before = number_given
        for batch in loader:
            yield batch
            number_given += 1
            if number_given == number:
                return
        if number_given == before:
            raise ValueError('train_dataloader gives no batch: is its data set empty, or smaller than batch_size?')
        epoch += 1
