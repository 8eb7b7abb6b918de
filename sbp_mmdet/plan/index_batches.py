"""Batches of image indices, as a config's own samplers put them together."""

import copy
from collections.abc import Iterator

from mmdet.registry import DATA_SAMPLERS
from mmengine.config import Config
from mmengine.dist import get_world_size
from torch.utils.data import BatchSampler

from .errors import describe_data_error
from .pipeline import CannotRun, Samples, seeded_generators
from .transforms import name_of

__all__ = ['GROUPING', 'index_batches']

GROUPING = ('AspectRatioBatchSampler', 'MultiDataAspectRatioBatchSampler', 'TrackAspectRatioBatchSampler')
# With these, any images of a group may share a batch, so that drawing sizes finds more batches than running them.
_DRAWING = ('DefaultSampler', 'InfiniteSampler', 'MultiSourceSampler', 'GroupMultiSourceSampler', 'MultiDataSampler')


def index_batches(
    samples: Samples, config: Config, dataset, batch: int, number: int, processes: int
) -> list[list[int]] | None:
    """Run a config's samplers, unless they are known to put together any images of a group.

    Args:
        samples (Samples): Result of :func:`.pipeline.sample_pipeline`.
        config (Config): Config of the detector.
        dataset: Train data set.
        batch (int): Number of images of a batch.
        number (int): Largest number of batches.
        processes (int): Number of processes of the training.

    Returns:
        list[list[int]] | None: Indices of the images of each batch; ``None`` if batches may be drawn at random, if the
        images are not on this machine, or if this process does not belong to a training with as many processes.

    Raises:
        CannotRun: If the samplers cannot be run.
    """
    loader = config.get('train_dataloader') or {}
    sampler, batches = loader.get('sampler') or {}, loader.get('batch_sampler') or {}
    random = name_of(sampler) in ('', *_DRAWING) and sampler.get('shuffle', True)
    if random and name_of(batches) in ('', *GROUPING) or samples.groups is None or processes != get_world_size():
        return None
    with seeded_generators():
        try:
            return [[int(i) for i in one] for one in _draw_epochs(loader, dataset, batch, number)]
        except Exception as error:  # whatever a sampler of the user's raises
            raise CannotRun(describe_data_error('its sampler cannot be run', error, config)) from error


def _draw_epochs(loader, dataset, batch, number) -> Iterator[list[int]]:
    """Yield the batches of as many epochs as it takes, built as mmengine's runner builds the samplers."""
    sampler = DATA_SAMPLERS.build(copy.deepcopy(loader.sampler), default_args=dict(dataset=dataset, seed=0))
    if given := loader.get('batch_sampler'):
        batches = DATA_SAMPLERS.build(copy.deepcopy(given), default_args=dict(sampler=sampler, batch_size=batch))
    else:
        batches = BatchSampler(sampler, batch, loader.get('drop_last', False))
    done = epoch = 0
    while done < number:
        if hasattr(sampler, 'set_epoch'):
            sampler.set_epoch(epoch)
        begun, epoch = done, epoch + 1
        for one in batches:
            yield one
            if (done := done + 1) == number:
                return
        if done == begun:
            raise ValueError(f'it gives no batch of {batch} from {len(dataset)} images; take a smaller batch')
