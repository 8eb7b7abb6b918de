"""Compares the planner's largest batch with the largest of many batches of the real loader.

    python research/pipeline_sizes.py    # 2,000 batches each; docs/results/pipeline_sizes.json and a table; no GPU

The pictures are small and made on the spot, and so are the scales of the pipelines: a tenth of those of COCO's recipes.
The loader, its samplers and its transforms are mmdet's own, and read the files.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from provenance import CHECKOUT, describe_machine, write_json

from sbp_mmdet.plan.inputs import Inputs, find_training_inputs
from sbp_mmdet.plan.tables import Column, format_table

RESULTS = CHECKOUT / 'docs/results/pipeline_sizes.json'
PHOTOGRAPHS = [(48, 64)] * 6 + [(64, 48)] * 4 + [(43, 64)] * 3 + [(64, 43), (50, 64), (64, 50), (30, 100), (100, 30)]
TILES = [(64, 64)] * 9 + [(64, 17), (9, 64), (9, 17)]  # what is cut from a large picture, its borders last
LOAD = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
PACK = [dict(type='PackDetInputs')]
RESIZE = dict(type='Resize', scale=(133, 80), keep_ratio=True)
CHOICE = dict(type='RandomChoiceResize', scales=[(133, side) for side in range(48, 81, 3)], keep_ratio=True)
FLIP = dict(type='RandomFlip', prob=0.5)


@TRANSFORMS.register_module(force=True)
class Enlarge(BaseTransform):
    """Transform that mmdet does not know, like a user's: it enlarges one image in four."""

    def transform(self, results: dict) -> dict:
        """Enlarge the image, with a probability of one in four."""
        if np.random.rand() < 0.25:
            results['img'] = cv2.resize(results['img'], None, fx=1.5, fy=1.5)
            results['img_shape'] = results['img'].shape[:2]
        return results


def write_pictures(folder: Path, shapes: list[tuple[int, int]], channels: int = 3) -> Path:
    """Write pictures with two rectangles each, as COCO and as VOC have them.

    Args:
        folder (Path): Folder to write to.
        shapes (list[tuple[int, int]]): Height and width of each picture.
        channels (int): Channels of the pictures. Default: 3.

    Returns:
        Path: The folder.
    """
    rng = np.random.default_rng(0)
    content = dict(images=[], annotations=[], categories=[dict(id=1, name='thing')])
    for place in ('JPEGImages', 'Annotations'):
        (folder / 'VOC2007' / place).mkdir(parents=True)
    for i, (height, width) in enumerate(shapes):
        picture = np.zeros((height, width, channels), np.uint8)
        cv2.imwrite(str(folder / f'{i}.png'), picture)
        cv2.imwrite(str(folder / f'VOC2007/JPEGImages/{i}.jpg'), picture[..., :3])
        content['images'].append(dict(id=i, file_name=f'{i}.png', height=height, width=width))
        objects = ''
        for _ in range(2):
            x, y = rng.uniform(0, 0.5, 2) * (width, height)
            w, h = 0.4 * width, 0.4 * height
            polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
            annotation = dict(id=len(content['annotations']) + 1, image_id=i, category_id=1, iscrowd=0, area=w * h)
            content['annotations'].append(dict(annotation, bbox=[x, y, w, h], segmentation=[polygon]))
            corners = dict(xmin=x + 1, ymin=y + 1, xmax=x + w, ymax=y + h)
            corners = ''.join(f'<{key}>{int(value)}</{key}>' for key, value in corners.items())
            objects += f'<object><name>thing</name><difficult>0</difficult><bndbox>{corners}</bndbox></object>'
        size = f'<size><width>{width}</width><height>{height}</height><depth>3</depth></size>'
        (folder / f'VOC2007/Annotations/{i}.xml').write_text(f'<annotation>{size}{objects}</annotation>')
    (folder / 'a.json').write_text(json.dumps(content))
    (folder / 'list.txt').write_text('\n'.join(map(str, range(len(shapes)))))
    return folder


def config_of(
    folder: Path, steps: list[dict], load: list[dict] = LOAD, last: list[dict] = PACK, batch: int = 2
) -> Config:
    """Return a config with a data loader, as COCO's recipes have it.

    Args:
        folder (Path): Folder of :func:`write_pictures`.
        steps (list[dict]): Transforms between those that load and those that pack.
        load (list[dict]): Transforms that load. Default: of image and boxes.
        last (list[dict]): Transforms that pack.
        batch (int): Images of a batch. Default: 2.
    """
    dataset = dict(
        type='CocoDataset', data_root=f'{folder}/', ann_file='a.json', data_prefix=dict(img=''),
        metainfo=dict(classes=('thing',)), pipeline=[*load, *steps, *last],
    )  # fmt: skip
    loader = dict(
        batch_size=batch, num_workers=0, batch_sampler=dict(type='AspectRatioBatchSampler'), dataset=dataset,
        sampler=dict(type='DefaultSampler', shuffle=True),
    )  # fmt: skip
    return Config(dict(model=dict(), train_dataloader=loader))


def _mixed(folder, load, inner, steps):
    """Return a config of a data set that mixes several images."""
    config = config_of(folder, inner, load, last=[])
    wrapped = dict(type='MultiImageMixDataset', dataset=config.train_dataloader.dataset, pipeline=[*steps, *PACK])
    config.train_dataloader.dataset, config.train_dataloader.batch_sampler = wrapped, None
    return config


def _crops(folder):
    crop = dict(type='RandomCrop', crop_type='absolute_range', crop_size=(38, 60), allow_negative_crop=True)
    small = dict(CHOICE, scales=[(420, 40), (420, 50), (420, 60)])
    return config_of(folder, [FLIP, dict(type='RandomChoice', transforms=[[CHOICE], [small, crop, CHOICE]])])


def _mosaic(folder):
    steps = [
        dict(type='Mosaic', img_scale=(64, 64), pad_val=114.0),
        dict(type='RandomAffine', scaling_ratio_range=(0.1, 2), border=(-32, -32)),
        dict(type='MixUp', img_scale=(64, 64), ratio_range=(0.8, 1.6), pad_val=114.0),
        dict(type='YOLOXHSVRandomAug'), FLIP, dict(type='Resize', scale=(64, 64), keep_ratio=True),
        dict(type='Pad', pad_to_square=True),
    ]  # fmt: skip
    return _mixed(folder, LOAD, [], steps)


def _large_scale_jitter(folder):
    load = [LOAD[0], dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]
    jitter = dict(type='RandomResize', scale=(102, 102), ratio_range=(0.1, 2.0), keep_ratio=True)
    crop = dict(type='RandomCrop', crop_size=(102, 102), recompute_bbox=True, allow_negative_crop=True)
    steps = [jitter, crop, FLIP, dict(type='Pad', size=(102, 102))]
    return _mixed(folder, load, steps, [dict(type='CopyPaste', max_num_pasted=10)])


def _branches(folder):
    split = dict(type='MultiBranch', branch_field=['sup', 'weak', 'strong'])
    views = dict(split, weak=[CHOICE, *PACK], strong=[dict(CHOICE, scales=[(133, 40), (133, 96)]), *PACK])
    labelled = config_of(folder, [CHOICE], last=[dict(split, sup=PACK)])
    others = config_of(folder, [], [LOAD[0], dict(type='LoadEmptyAnnotations')], [views])
    data = [one.train_dataloader.dataset for one in (labelled, others)]
    sampler = dict(type='GroupMultiSourceSampler', batch_size=5, source_ratio=[1, 4])
    loader = dict(labelled.train_dataloader, dataset=dict(type='ConcatDataset', datasets=data), sampler=sampler)
    labelled.train_dataloader = dict(loader, batch_size=5, batch_sampler=None)
    return labelled


def _voc(folder):
    config = config_of(folder, [dict(type='Resize', scale=(100, 60), keep_ratio=True), FLIP])
    prefix = dict(sub_data_root='VOC2007/')
    voc = dict(config.train_dataloader.dataset, type='VOCDataset', ann_file='list.txt', data_prefix=prefix)
    config.train_dataloader.dataset = dict(type='RepeatDataset', times=3, dataset=voc)
    return config


def _four_channels(folder):
    return config_of(folder, [RESIZE, FLIP], [dict(LOAD[0], color_type='unchanged'), LOAD[1]], batch=4)


def _cached_mosaic(folder):
    steps = [
        dict(type='CachedMosaic', img_scale=(64, 64), pad_val=114.0),
        dict(type='RandomResize', scale=(128, 128), ratio_range=(0.1, 2.0), keep_ratio=True),
        dict(type='RandomCrop', crop_size=(64, 64)), dict(type='YOLOXHSVRandomAug'), FLIP,
        dict(type='Pad', size=(64, 64), pad_val=dict(img=(114, 114, 114))),
        dict(type='CachedMixUp', img_scale=(64, 64), ratio_range=(1.0, 1.0), max_cached_images=20),
    ]  # fmt: skip
    config = config_of(folder, steps)
    config.train_dataloader.batch_sampler = None
    return config


def _expansion(folder):
    steps = [
        dict(type='Expand', ratio_range=(1, 4)), dict(type='MinIoURandomCrop', min_crop_size=0.3),
        dict(type='Resize', scale=(30, 30), keep_ratio=False), FLIP,
    ]  # fmt: skip
    config = config_of(folder, steps, batch=8)
    config.train_dataloader.batch_sampler = None
    return config


def _jitter_and_crop(folder):
    steps = [dict(type='RandomResize', scale=(90, 90), ratio_range=(0.1, 2.0), keep_ratio=True)]
    return config_of(folder, [*steps, dict(type='RandomCrop', crop_size=(90, 90)), FLIP])


def _centre_crops(folder):
    crop = dict(
        type='RandomCenterCropPad', crop_size=(51, 51), ratios=(0.6, 0.8, 1.0, 1.2, 1.4), test_mode=False,
        mean=[0, 0, 0], std=[1, 1, 1], to_rgb=True, test_pad_mode=None,
    )  # fmt: skip
    steps = [dict(type='PhotoMetricDistortion'), crop, FLIP]
    return config_of(folder, steps, [dict(LOAD[0], to_float32=True), LOAD[1]], batch=6)


def _balanced(folder):
    config = config_of(folder, [RESIZE])
    photographs = config.train_dataloader.dataset
    others = dict(photographs, pipeline=[*LOAD, dict(RESIZE, scale=(90, 120)), *PACK])
    balanced = dict(type='ClassBalancedDataset', dataset=photographs, oversample_thr=0.5)
    config.train_dataloader.dataset = dict(type='ConcatDataset', datasets=[balanced, others])
    return config


PIPELINES: dict[str, tuple[list, int, Callable]] = {
    'crops of DETR and ConvNeXt': (PHOTOGRAPHS, 3, _crops),
    'mosaics of YOLOX': (PHOTOGRAPHS, 3, _mosaic),
    'large-scale jitter and copy-paste': (PHOTOGRAPHS, 3, _large_scale_jitter),
    'branches of SoftTeacher': (PHOTOGRAPHS, 3, _branches),
    'multi-scale training': (PHOTOGRAPHS, 3, lambda folder: config_of(folder, [CHOICE, FLIP])),
    'cached mosaics of RTMDet': (PHOTOGRAPHS, 3, _cached_mosaic),
    'expansion and crops of SSD': (PHOTOGRAPHS, 3, _expansion),
    'jitter and crops of EfficientDet': (PHOTOGRAPHS, 3, _jitter_and_crop),
    'crops around centres of CornerNet': (PHOTOGRAPHS, 3, _centre_crops),
    'class balance and two data sets': (PHOTOGRAPHS, 3, _balanced),
    'tiles': (TILES, 3, lambda folder: config_of(folder, [dict(RESIZE, scale=(80, 80))])),
    "a user's transform": (PHOTOGRAPHS, 3, lambda folder: config_of(folder, [RESIZE, dict(type='Enlarge')])),
    'four channels': (PHOTOGRAPHS, 4, _four_channels),
    'line scans': ([(40, 400)] * 5, 3, lambda f: config_of(f, [dict(type='ResizeShortestEdge', scale=80)])),
    'squares': ([(64, 64)] * 5, 3, lambda folder: config_of(folder, [RESIZE])),
    'VOC': (PHOTOGRAPHS, 3, _voc),
}


def get_planned_pixels(inputs: Inputs) -> int:
    """Return the pixels of the planner's largest batch, summed over its branches."""
    parts = inputs.branches.values() if inputs.branches else [(inputs.batch, inputs.height, inputs.width)]
    return sum(images * height * width for images, height, width, *_ in parts)


def largest_real(config: Config, batches: int) -> int:
    """Return the pixels of the largest of several batches of the real loader, padded to one size in each branch."""
    init_default_scope('mmdet')
    np.random.seed(7), torch.manual_seed(7)
    loader, most, seen, epoch = Runner.build_dataloader(config.train_dataloader, seed=7), 0, 0, 0
    while seen < batches:
        epoch += 1
        getattr(loader.batch_sampler, 'sampler', loader.sampler).set_epoch(epoch)
        for data in loader:
            inputs = data['inputs']
            parts = inputs.values() if isinstance(inputs, dict) else [inputs]
            shapes = [np.array([image.shape[-2:] for image in part if image is not None]) for part in parts]
            most = max(most, sum(len(sizes) * sizes.max(0).prod() for sizes in shapes if len(sizes)))
            seen += 1
            if seen == batches:
                break
    return int(most)


def compare(name: str, folder: Path, batches: int) -> dict:
    """Compare the planner's largest batch of a pipeline with the batches of its loader.

    Args:
        name (str): Key of ``PIPELINES``.
        folder (Path): Empty folder.
        batches (int): Number of batches of the loader.
    """
    shapes, channels, make = PIPELINES[name]
    config = make(write_pictures(folder, shapes, channels))
    inputs = find_training_inputs(config)
    pixels, real = get_planned_pixels(inputs), largest_real(config, batches)
    size = [inputs.height, inputs.width, inputs.channels]
    return dict(name=name, size=size, said=pixels, real=real, ratio=pixels / real, batches=batches)


def main():
    """Compare all pipelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--batches', type=int, default=2000, help='number of batches of the real loader (default: 2000)'
    )
    args = parser.parse_args()
    register_all_modules()
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    rows = []
    for name in PIPELINES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, Path(folder), args.batches))
        write_json(RESULTS, dict(machine=describe_machine(), rows=rows))
    columns = [
        Column('pipeline', lambda row: row['name']),
        Column('largest, said', lambda row: ' x '.join(map(str, row['size'][:2]))),
        Column('pixels of the largest real batch', lambda row: str(row['real'])),
        Column('ratio', lambda row: f'{row["ratio"]:.3f}'),
    ]
    print(format_table(columns, rows))


if __name__ == '__main__':
    main()
