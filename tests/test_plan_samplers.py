"""Batches of samplers that do not draw images at random, beside those of the real loader."""

from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmdet.datasets import CocoDataset
from mmdet.datasets.transforms import PackDetInputs
from mmdet.registry import DATA_SAMPLERS, DATASETS, TRANSFORMS
from mmdet.structures import DetDataSample, TrackDataSample
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import FUNCTIONS, init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from PIL import Image
from test_plan_sizes import coco, config_of
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from sbp_mmdet.plan.inputs import find_training_inputs
from sbp_mmdet.plan.pipeline import sample_pipeline
from sbp_mmdet.plan.real_batches import build_real_batch, has_usual_structure
from sbp_mmdet.plan.rehearse import build_largest_batch

# Neighbours are alike, so that a fixed order gives small batches: any two of them would need 120 x 120.
SHAPES = [(40, 120), (50, 120), (120, 40), (120, 50)]


@DATA_SAMPLERS.register_module(force=True)
class FirstImages(Sampler):
    """Sampler of the first images of a data set, with arguments of its own."""

    def __init__(self, dataset, first, seed=None):
        self.dataset, self.first = dataset, first

    def __iter__(self):
        return iter(range(self.first))

    def __len__(self):
        return self.first


@DATA_SAMPLERS.register_module(force=True)
class ThreesByWidth(BatchSampler):
    """Batch sampler that takes its own number of images."""

    def __init__(self, sampler, batch_size):
        self.sampler = sampler

    def __iter__(self):
        infos = [self.sampler.dataset.get_data_info(i) for i in range(len(self.sampler.dataset))]
        order = sorted(range(len(infos)), key=lambda i: infos[i]['width'])
        return (order[i : i + 3] for i in range(0, len(order), 3))

    def __len__(self):
        return -(-len(self.sampler) // 3)


FIXED = dict(type='DefaultSampler', shuffle=False)
CASES = {
    'in order': (dict(sampler=FIXED), 4),
    'in order without end': (dict(sampler=dict(type='InfiniteSampler', shuffle=False)), 4),
    'in order, by orientation': (dict(sampler=FIXED, batch_sampler=dict(type='AspectRatioBatchSampler')), 4),
    'without the last': (dict(sampler=FIXED, drop_last=True, batch_size=3), 4),
    'of my own': (dict(sampler=dict(type='FirstImages', first=2)), 4),
    'batches of my own': (dict(batch_sampler=dict(type='ThreesByWidth')), 4),
    'pairs that change': (dict(sampler=dict(type='InfiniteSampler', shuffle=False)), 3),
    'at random': ({}, 4),
}


@pytest.mark.parametrize('name', CASES)
def test_as_large_as_those_of_the_loader(name, tmp_path):
    keys, number = CASES[name]
    config = config_of(coco(tmp_path, SHAPES[:number], boxes=2), [], sampler=None)
    for key, value in keys.items():
        config.train_dataloader[key] = value
    init_default_scope('mmdet')
    loader, real, epoch = Runner.build_dataloader(config.train_dataloader, seed=7), set(), 0
    while epoch < (60 if name == 'at random' else 3):  # in a fixed order, all epochs have the same batches
        getattr(loader.batch_sampler, 'sampler', loader.sampler).set_epoch(epoch) if name == 'at random' else None
        for number, data in enumerate(loader):
            shapes = np.array([image.shape[-2:] for image in data['inputs']])
            real.add((len(shapes) * shapes.max(0).prod(), len(shapes), *shapes.max(0)))
            if number > 20:
                break
        epoch += 1
    found = find_training_inputs(config)
    most = max(real)[0]
    assert (most, found.batch, found.height, found.width) in real


def test_a_sampler_that_cannot_run_is_a_line(tmp_path):
    config = config_of(coco(tmp_path, SHAPES), [], sampler=None)
    config.train_dataloader.sampler = dict(type='FirstImages')
    with pytest.raises(ValueError, match="its sampler cannot be run here .*'first'"):
        find_training_inputs(config)
    config.train_dataloader.sampler = dict(type='FirstImages', first=0)
    with pytest.raises(ValueError, match='it gives no batch'):
        find_training_inputs(config)


def test_samplers_of_other_processes_are_not_run(tmp_path):
    config = config_of(coco(tmp_path, SHAPES), [], sampler=None)
    config.train_dataloader.sampler = FIXED
    assert find_training_inputs(config, processes=2)[1:3] == (120, 120)


def test_images_of_a_small_set_come_twice(tmp_path):
    config = config_of(coco(tmp_path, [(40, 120)], boxes=4), [], sampler=None)  # of the second image, one more
    config.train_dataloader.sampler = dict(type='InfiniteSampler', shuffle=True)
    assert find_training_inputs(config).boxes == 4


def test_a_slice_of_a_data_set(tmp_path):
    """Images are those of the slice of a data set that mmengine's runner makes for ``num_batch_per_epoch``."""
    config = config_of(coco(tmp_path, SHAPES), [], sampler=None)
    config.train_dataloader.sampler = FIXED
    config.train_dataloader.num_batch_per_epoch = 1
    init_default_scope('mmdet')
    dataset = Runner.build_dataloader(config.train_dataloader).dataset
    assert sorted(set(sample_pipeline(dataset, config).images)) == [0, 1]
    assert find_training_inputs(config, dataset=dataset)[1:3] == (50, 120)


@pytest.mark.parametrize('kind', ['rotated', 'larger'])
def test_a_single_file_of_another_size_than_its_annotations(kind, tmp_path):
    """Files are read where their headers differ: not only if the first of them do."""
    folder = coco(tmp_path, [(40, 120)] * 6)
    if kind == 'larger':
        cv2.imwrite(str(folder / '4.png'), np.zeros((90, 120, 3), np.uint8))
        wanted = (90, 120)
    else:
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was held upright
        Image.new('RGB', (120, 40)).save(folder / '4.png', format='JPEG', exif=exif)
        wanted = (120, 120)
    assert find_training_inputs(config_of(folder, [], sampler=None))[1:3] == wanted


@FUNCTIONS.register_module(force=True)
def twice_and_padded(batch):
    """Each image twice, with a margin."""
    inputs = [torch.nn.functional.pad(one['inputs'], (0, 8, 0, 24)) for one in batch for _ in range(2)]
    return dict(inputs=inputs, data_samples=[one['data_samples'] for one in batch for _ in range(2)])


@TRANSFORMS.register_module(force=True)
class PacksMore(PackDetInputs):
    """Packs numbers of the user's own: in the ground truth, in the meta information, beside the images, or alone."""

    def __init__(self, where):
        super().__init__(meta_keys=('img_id', 'img_shape'))
        self.where = where

    def transform(self, results):
        packed = super().transform(results)
        sample = packed['data_samples']
        if self.where == 'truth':
            sample.gt_instances.distances = torch.ones(len(sample.gt_instances))
        elif self.where == 'meta':
            sample.set_metainfo(dict(altitude=3.0))
        elif self.where == 'beside':
            packed['depth'] = torch.zeros(1, *packed['inputs'].shape[1:])
        else:
            return dict(picture=packed['inputs'])
        return packed


def rehearsed(config):
    init_default_scope('mmdet')
    loader = Runner.build_dataloader(config.train_dataloader, seed=7)
    return loader, *build_largest_batch(SimpleNamespace(train_dataloader=loader, cfg=config))


def test_a_collation_of_ones_own_makes_the_batch(tmp_path):
    config = config_of(coco(tmp_path, [(40, 60), (50, 80), (30, 90)]), [], sampler=None, batch=1)
    config.train_dataloader.collate_fn = dict(type='twice_and_padded')
    loader, batch, shape = rehearsed(config)
    assert not has_usual_structure(loader) and len(batch['inputs']) == 2
    assert (shape['batch'], shape['height'], shape['width'], shape['boxes']) == (2, 50 + 24, 80 + 8, 3)


class Clips(Dataset):
    """Clips of two frames as mmdet's data sets of videos give them. Each second frame has one box more."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        clip = TrackDataSample()
        clip.video_data_samples = [DetDataSample(metainfo=dict(img_shape=(40, 60))) for _ in range(2)]
        for number, frame in enumerate(clip.video_data_samples, (1, 4, 2)[index] - 1):
            frame.gt_instances = InstanceData(bboxes=torch.zeros(number, 4), labels=torch.zeros(number))
        return dict(inputs=torch.zeros(2, 3, 40, 60), data_samples=clip)


def test_boxes_of_clips_are_those_of_their_frames():
    loader = DataLoader(Clips(), batch_size=2, collate_fn=pseudo_collate)
    batch, shape = build_real_batch(loader, Config(dict(model=dict(), train_dataloader=dict(batch_size=2))), 2)
    assert len(batch['data_samples']) == 2
    assert (shape['batch'], shape['height'], shape['width'], shape['boxes']) == (4, 40, 60, 4)


def test_pictures_that_are_not_here_are_not_needed(tmp_path):
    folder = coco(tmp_path, [(40, 60), (50, 80), (30, 90)])
    for file in folder.glob('*.png'):
        file.unlink()
    config = config_of(folder, [], sampler=None)
    config.model.bbox_head = dict(num_classes=1)
    loader, _, shape = rehearsed(config)
    assert has_usual_structure(loader) and (shape['height'], shape['width']) == (50, 90)


@pytest.mark.parametrize('where', ['truth', 'meta', 'beside', 'alone'])
def test_what_the_users_transform_packs_is_in_the_batch(where, tmp_path):
    config = config_of(coco(tmp_path, [(40, 60), (50, 80), (30, 90)]), [], sampler=None)
    config.train_dataloader.dataset.pipeline[-1] = dict(type='PacksMore', where=where)
    state, (_, batch, shape) = np.random.get_state()[1].copy(), rehearsed(config)
    assert (np.random.get_state()[1] == state).all()
    assert (shape['batch'], shape['channels']) == (2, 3) and (50, 80) <= (shape['height'], shape['width'])
    if where == 'truth':
        assert all(one.gt_instances.distances.sum() == len(one.gt_instances) for one in batch['data_samples'])
    elif where == 'meta':
        assert all(one.altitude == 3.0 for one in batch['data_samples'])
    else:
        key = 'depth' if where == 'beside' else 'picture'
        assert len(batch[key]) == 2 and batch.keys() >= {key}


@DATASETS.register_module(force=True)
class CountsReads(CocoDataset):
    """A data set that counts what is read of it."""

    def __init__(self, *args, **kwargs):
        self.reads = {}
        super().__init__(*args, **kwargs)

    def __getitem__(self, i):
        self.reads[i] = self.reads.get(i, 0) + 1
        return super().__getitem__(i)


@pytest.mark.parametrize('collate', ['pseudo_collate', 'twice_and_padded'])
def test_a_data_set_does_not_notice(collate, tmp_path):
    config = config_of(coco(tmp_path, SHAPES), [], sampler=None)
    config.train_dataloader.dataset.type = 'CountsReads'
    config.train_dataloader.collate_fn = dict(type=collate)
    config.model.bbox_head = dict(num_classes=1)
    assert rehearsed(config)[0].dataset.reads == {}


@DATASETS.register_module(force=True)
class OfTorch(Dataset):
    """A data set that is none of mmengine's: without annotations to ask, and without a pipeline."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        results = dict(img=np.zeros((40 + 10 * i, 60, 3), np.uint8), img_id=i, img_shape=(40 + 10 * i, 60))
        return PackDetInputs(meta_keys=('img_id', 'img_shape')).transform(results)


def test_a_data_set_of_torch(tmp_path):
    config = config_of(tmp_path, [], sampler=None)
    config.train_dataloader.dataset = dict(type='OfTorch')
    assert find_training_inputs(config)[:3] == (2, 80, 60)
    loader, _, shape = rehearsed(config)
    assert (shape['height'], shape['width']) == (80, 60) and has_usual_structure(loader)
    objects = SimpleNamespace(train_dataloader=loader, cfg=Config())  # a runner of objects has no config
    assert build_largest_batch(objects)[1]['height'] == 80
