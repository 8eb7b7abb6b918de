"""Predicted sizes of batches agree with those of a real loader with mmdet's own samplers."""

import json
import time

import cv2
import numpy as np
import pytest
import torch
from helpers import RESEARCH  # noqa: F401  puts research/ on the path
from mmcv.transforms import BaseTransform
from mmdet.registry import MODELS, TRANSFORMS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner

from sbp_mmdet.plan.inputs import find_training_inputs
from sbp_mmdet.plan.pipeline import build_train_dataset, sample_pipeline

import pipeline_sizes  # isort: skip  (helpers puts research/ on the path)

SHAPES = [(48, 64)] * 4 + [(64, 48)] * 3 + [(43, 64), (30, 100), (64, 64), (100, 30)]
SCALES = [(133, side) for side in range(48, 81, 8)]
RESIZE = dict(type='Resize', scale=(133, 80), keep_ratio=True)
CHOICE = dict(type='RandomChoiceResize', scales=SCALES, keep_ratio=True)
CROP = dict(type='RandomCrop', crop_type='absolute_range', crop_size=(38, 60), allow_negative_crop=True)
LOAD = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
PACK = [dict(type='PackDetInputs')]


@TRANSFORMS.register_module(force=True)
class MyUpscale(BaseTransform):
    """A user's transform."""

    def __init__(self, factor):
        self.factor = factor

    def transform(self, results):
        results['img'] = cv2.resize(results['img'], None, fx=self.factor, fy=self.factor)
        results['img_shape'] = results['img'].shape[:2]
        return results


@TRANSFORMS.register_module(force=True)
class NeverEnds(BaseTransform):
    """A transform that redraws forever."""

    def transform(self, results):
        while True:
            np.random.rand()


@TRANSFORMS.register_module(force=True)
class Waits(BaseTransform):
    """Transform that waits without using the CPU."""

    def transform(self, results):
        time.sleep(0.012)
        return results


def coco(folder, shapes, channels=3, boxes=2):
    """Write images of given shapes, with rectangles as objects."""
    rng = np.random.default_rng(0)
    content = dict(images=[], annotations=[], categories=[dict(id=1, name='thing')])
    for i, (height, width) in enumerate(shapes):
        cv2.imwrite(str(folder / f'{i}.png'), np.zeros((height, width, channels), np.uint8))
        content['images'].append(dict(id=i, file_name=f'{i}.png', height=height, width=width))
        for _ in range(boxes + (i == 1)):
            x, y = rng.uniform(0, 0.5, 2) * (width, height)
            w, h = 0.4 * width, 0.4 * height
            polygon = [x, y, x + w, y, x + w, y + h]
            told = dict(id=len(content['annotations']), image_id=i, category_id=1, iscrowd=0, area=w * h)
            content['annotations'].append(dict(told, bbox=[x, y, w, h], segmentation=[polygon]))
    (folder / 'a.json').write_text(json.dumps(content))
    return folder


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    return coco(tmp_path_factory.mktemp('pictures'), SHAPES)


def config_of(folder, steps, load=LOAD, sampler='AspectRatioBatchSampler', batch=2, **preprocessor):
    dataset = dict(
        type='CocoDataset', data_root=f'{folder}/', ann_file='a.json', data_prefix=dict(img=''),
        metainfo=dict(classes=('thing',)), pipeline=[*load, *steps, *PACK],
    )  # fmt: skip
    if steps and steps[0]['type'] == 'Mosaic':
        dataset = dict(type='MultiImageMixDataset', dataset=dict(dataset, pipeline=load), pipeline=[*steps, *PACK])
    loader = dict(
        batch_size=batch, num_workers=0, batch_sampler=sampler and dict(type=sampler), dataset=dataset,
        sampler=dict(type='DefaultSampler', shuffle=True),
    )  # fmt: skip
    return Config(dict(model=dict(data_preprocessor=preprocessor), train_dataloader=loader))


def largest_real(config, batches):
    """Return the pixels of the largest of several batches of the real loader, padded to a common size."""
    init_default_scope('mmdet')
    np.random.seed(7), torch.manual_seed(7)
    loader, most, seen, epoch = Runner.build_dataloader(config.train_dataloader, seed=7), 0, 0, 0
    while seen < batches:
        getattr(loader.batch_sampler, 'sampler', loader.sampler).set_epoch(epoch := epoch + 1)
        for data in loader:
            shapes = np.array([image.shape[-2:] for image in data['inputs']])
            most, seen = max(most, len(shapes) * shapes.max(0).prod()), seen + 1
    return most


MOSAIC = [dict(type='Mosaic', img_scale=(50, 40)), dict(type='RandomAffine', border=(-25, -20))]
CASES = {
    'resize': [RESIZE],
    'several scales': [CHOICE],
    'crop that turns': [dict(type='RandomChoice', transforms=[[CHOICE], [CROP, CHOICE]])],
    'jitter and crop': [
        dict(type='RandomResize', scale=(64, 64), ratio_range=(0.1, 2.0), keep_ratio=True),
        dict(type='RandomCrop', crop_size=(64, 64), allow_negative_crop=True),
        dict(type='Pad', size=(64, 64)),
    ],
    'shortest edge': [dict(type='ResizeShortestEdge', scale=80)],
    'mosaic': [*MOSAIC, dict(type='Resize', scale=(60, 60), keep_ratio=True), dict(type='Pad', pad_to_square=True)],
    'of my own': [RESIZE, dict(type='MyUpscale', factor=2)],
    'nothing': [],
}


@pytest.mark.parametrize('name', CASES)
def test_as_large_as_those_of_the_loader(pictures, name):
    config = config_of(pictures, CASES[name])
    inputs = find_training_inputs(config)
    real = largest_real(config, 100)
    assert 0.97 * real <= 2 * inputs.height * inputs.width <= 1.25 * real, (inputs[:3], real / 2)
    pixels = [height * width for height, width in ((inputs.height, inputs.width), inputs.rare, inputs.usual)]
    assert pixels == sorted(pixels, reverse=True)
    assert inputs.boxes >= 3 or name == 'jitter and crop'


def test_sizes_behind_the_switch_of_the_last_epochs(pictures):
    """Batches are mosaics of 24 x 24, and single images when a hook makes the data set skip the mosaic."""
    steps = [dict(type='Mosaic', img_scale=(24, 24)), dict(type='RandomAffine', border=(-12, -12))]
    config = config_of(pictures, steps, sampler=None)
    assert find_training_inputs(config)[1:3] == (24, 24)
    config.custom_hooks = [dict(type='YOLOXModeSwitchHook')]
    assert find_training_inputs(config)[1:3] == (100, 100)
    config.custom_hooks = [dict(type='YOLOXModeSwitchHook', skip_type_keys=('MixUp',))]
    assert find_training_inputs(config)[1:3] == (24, 24)


def test_square_images_are_not_padded_to_what_they_are_not(tmp_path):
    config = config_of(coco(tmp_path, [(64, 64)] * 4), [RESIZE])
    assert find_training_inputs(config)[1:3] == (80, 80)


def test_the_remainders_of_an_epoch_share_a_batch(tmp_path):
    """With three landscape and three portrait images, each epoch ends with one of both."""
    folder = coco(tmp_path, [(80, 133)] * 3 + [(133, 80)] * 3)
    assert find_training_inputs(config_of(folder, []))[1:3] == (133, 133)
    even = config_of(folder, [])
    even.train_dataloader.dataset.indices = [0, 1, 3, 4]  # nothing remains, unless processes share them by chance
    assert sorted(find_training_inputs(even)[1:3]) == [80, 133]
    assert find_training_inputs(even, processes=2)[1:3] == (133, 133)
    config = config_of(folder, [])
    config.train_dataloader.sampler.type = 'InfiniteSampler'  # its epoch has no end
    assert sorted(find_training_inputs(config)[1:3]) == [80, 133]
    assert find_training_inputs(config_of(folder, [], sampler=None))[1:3] == (133, 133)


def test_a_data_set_without_images_is_called_one(tmp_path):
    config = config_of(coco(tmp_path, [(48, 64)]), [RESIZE])
    config.train_dataloader.dataset.filter_cfg = dict(min_size=1000)
    with pytest.raises(ValueError, match='it has no image; look at ann_file.*metainfo.*filter_cfg'):
        find_training_inputs(config)


def test_wrappers_in_wrappers_need_no_data(tmp_path):
    """mmdet's VOC configs nest wrappers."""
    config = config_of(tmp_path, [RESIZE], sampler=None)
    one = config.train_dataloader.dataset
    both = dict(type='ConcatDataset', datasets=[dict(type='RepeatDataset', times=2, dataset=one), one])
    config.train_dataloader.dataset = dict(type='RepeatDataset', times=3, dataset=both)
    inputs = find_training_inputs(config)
    assert inputs[1:3] == (133, 133) and "COCO's" in inputs.source


def test_channels_are_those_of_the_pictures(tmp_path):
    folder = coco(tmp_path, [(48, 64)], channels=4)
    load = [dict(type='LoadImageFromFile', color_type='unchanged'), LOAD[1]]
    assert find_training_inputs(config_of(folder, [RESIZE], load)).channels == 4
    assert find_training_inputs(config_of(folder, [RESIZE])).channels == 3


def test_masks_need_not_be_bitmaps(pictures):
    load = [LOAD[0], dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]
    inputs = find_training_inputs(config_of(pictures, [CHOICE, CROP], load))
    assert inputs.masks and max(inputs[1:3]) <= 60


def test_polygons_in_larger_images(pictures):
    """YOLACT's pipeline has a transform that mmdet implements for bitmaps only."""
    load = [LOAD[0], dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]
    steps = [
        dict(type='Expand', mean=[0, 0, 0], ratio_range=(2, 3), prob=1),
        dict(type='RandomCrop', crop_size=(60, 60)),
    ]
    config = config_of(pictures, steps, load)
    inputs, real = find_training_inputs(config), largest_real(config, 100)
    assert inputs.masks and 0.97 * real <= 2 * inputs.height * inputs.width <= 1.25 * real


def test_files_that_are_larger_than_their_annotations_say(pictures, tmp_path):
    content = json.loads((pictures / 'a.json').read_text())
    for image in content['images']:
        cv2.imwrite(str(tmp_path / image['file_name']), np.zeros((90, 120, 3), np.uint8))
    (tmp_path / 'a.json').write_text(json.dumps(content))
    assert find_training_inputs(config_of(tmp_path, []))[1:3] == (90, 120)


def test_branches(pictures):
    branches = dict(type='MultiBranch', branch_field=['sup', 'weak', 'strong'])
    half = dict(type='Resize', scale_factor=0.5, keep_ratio=True)
    dataset = config_of(pictures, []).train_dataloader.dataset
    sup = dict(dataset, pipeline=[*LOAD, RESIZE, dict(branches, sup=PACK)])
    views = dict(branches, weak=PACK, strong=[half, *PACK])
    other = dict(dataset, pipeline=[LOAD[0], dict(type='LoadEmptyAnnotations'), RESIZE, views])
    config = config_of(pictures, [], sampler=None, batch=4)
    config.train_dataloader.dataset = dict(type='ConcatDataset', datasets=[sup, other])
    config.train_dataloader.sampler = dict(type='GroupMultiSourceSampler', batch_size=4, source_ratio=[1, 3])
    found = find_training_inputs(config).branches
    assert {name: one.images for name, one in found.items()} == dict(sup=1, weak=3, strong=3)
    assert (found['weak'].height, found['weak'].width) == (80, 133) or found['weak'].height == 133
    assert found['strong'].height * found['strong'].width <= 0.3 * found['weak'].height * found['weak'].width
    assert found['weak'].boxes == found['strong'].boxes == 0


def test_a_batch_has_an_image(pictures):
    with pytest.raises(ValueError, match='batch size 0 must be a whole number of 1 or more'):
        find_training_inputs(config_of(pictures, [RESIZE], batch=0))


@pytest.mark.parametrize(
    'steps', [[dict(type='NoSuchTransform')], [dict(type='RandomCenterCropPad', crop_size=(1, 1))]]
)
def test_what_cannot_be_run_is_said_in_a_line(pictures, steps):
    config = config_of(pictures, steps)
    with pytest.raises(ValueError, match=r'^its train (data set|pipeline) cannot be (built|run) here \(') as caught:
        find_training_inputs(config)
    assert '\n' not in str(caught.value)
    assert find_training_inputs(config, size=(64, 96))[1:3] == (64, 96)


def test_a_transform_that_does_not_end(pictures, monkeypatch):
    monkeypatch.setattr('sbp_mmdet.plan.pipeline._SECONDS_PER_IMAGE', 0.2)
    with pytest.raises(ValueError, match='no result for image'):
        find_training_inputs(config_of(pictures, [dict(type='NeverEnds')]))


def test_pasted_objects_need_no_pictures(tmp_path):
    """The pipeline runs without data and with the boxes of both images."""
    config = pipeline_sizes.PIPELINES['large-scale jitter and copy-paste'][2](tmp_path)
    assert find_training_inputs(config)[1:3] == (102, 102)
    folder = pipeline_sizes.write_pictures(tmp_path, [(102, 102)] * 4)
    for file in folder.glob('*.png'):
        file.unlink()
    config = pipeline_sizes.PIPELINES['large-scale jitter and copy-paste'][2](folder)
    assert 2 < find_training_inputs(config).boxes <= 4


def test_a_busy_machine_gives_the_same_answer(pictures, monkeypatch):
    """The time limit counts CPU time of the process, so neither other programs nor waiting use it up."""
    monkeypatch.setattr('sbp_mmdet.plan.pipeline._SECONDS', 2)
    config = config_of(pictures, [CHOICE, dict(type='Waits')])
    assert len(sample_pipeline(build_train_dataset(config)[0], config).images) >= 256


def test_nothing_is_drawn_from_the_training(pictures):
    np.random.seed(5), torch.manual_seed(5)
    expected = np.random.rand(), torch.rand(1)
    np.random.seed(5), torch.manual_seed(5)
    actual = find_training_inputs(config_of(pictures, [CHOICE]))
    assert (np.random.rand(), torch.rand(1)) == expected
    assert str(find_training_inputs(config_of(pictures, [CHOICE]))) == str(actual), (
        'another answer to the same question'
    )


def test_what_the_preprocessor_makes_of_batches(tmp_path):
    init_default_scope('mmdet')
    folder, inputs = coco(tmp_path, [(80, 133)] * 2), torch.zeros(2, 3, 80, 133)
    sync = dict(type='BatchSyncRandomResize', random_size_range=(64, 160), size_divisor=32, interval=1)
    found = find_training_inputs(config_of(folder, [], batch_augments=[sync]))
    assert found[1:3] == (160, 256) and found.usual[0] == 96
    for augment, size in (
        (dict(type='BatchFixedSizePad', size=(100, 100), img_pad_value=0), (100, 133)),
        (dict(type='BatchResize', scale=(160, 96), pad_size_divisor=32), (96, 160)),
    ):
        assert MODELS.build(augment)(inputs, None)[0].shape[-2:] == size
        assert find_training_inputs(config_of(folder, [], batch_augments=[augment]))[1:3] == size


@pytest.mark.parametrize('name', pipeline_sizes.PIPELINES)
def test_the_pipelines_of_the_study(name, tmp_path):
    """The study draws 2,000 batches of each."""
    row = pipeline_sizes.compare(name, tmp_path, 30)
    assert row['ratio'] >= 0.97, row
    results = json.loads(pipeline_sizes.RESULTS.read_text())['rows']
    (of_many,) = (one['real'] for one in results if one['name'] == name)
    assert row['real'] <= of_many and row['said'] <= 1.25 * of_many, row
    assert row['size'][2] == pipeline_sizes.PIPELINES[name][1]
