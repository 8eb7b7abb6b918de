"""Trains small versions of detectors from outside on images of nuclei, plain and with ``LeanHook``: their losses.

    python research/outside_losses.py FOLDER --data NUCLEI --json docs/results/outside_losses.json

FOLDER contains the sources, see ``outside_models.py``; NUCLEI is a folder with images/ and train.json. All training
runs have the same weights, images and random numbers; 'last bit changed' is the plain detector with weights that differ
in their last bit. They use one thread, and each runs in a process of its own. Existing results are kept.
"""

import argparse
import random
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from isolated import read_rows, run_apart, sweep
from mmdet.registry import DATASETS
from mmengine.config import Config
from outside_models import TEXT
from outside_sources import sources
from tables import markdown_table

from sbp_mmdet.hooks import LeanHook
from sbp_mmdet.plan.batch import at_the_first_step
from sbp_mmdet.plan.detector import build_detector
from sbp_mmdet.plan.tables import Column
from sbp_mmdet.plan.variants import load_config, make_plain
from sbp_mmdet.presets import PRESETS

RUNS = ('none', 'exact', 'last bit changed')
IMAGES, SIDE, SECONDS = 2, 96, 3600


class Small(NamedTuple):
    """A small version of a detector: the path of its config in the folder of sources, and overrides."""

    config: str
    options: dict


_R18 = {'model.backbone.depth': 18, 'model.backbone.frozen_stages': -1, 'model.backbone.norm_eval': False}
_R18 |= {'model.backbone.base_channels': 32, 'model.backbone.norm_cfg': dict(type='BN', requires_grad=True)}
_FEW_RPN, _FEW_ROIS = dict(nms_pre=100, max_per_img=50), dict(num=32)

MODELS = {
    'Co-DETR': Small(
        'mmdet/projects/CO-DETR/configs/codino/co_dino_5scale_r50_8xb2_1x_coco.py',
        _R18
        | {
            'model.neck.in_channels': [32, 64, 128, 256],
            'model.query_head.num_query': 60,
            'model.query_head.in_channels': 256,
            'model.query_head.transformer.encoder.num_layers': 2,
            'model.query_head.transformer.decoder.num_layers': 2,
            'model.query_head.transformer.encoder.transformerlayers.feedforward_channels': 256,
            'model.query_head.transformer.decoder.transformerlayers.feedforward_channels': 256,
            'model.roi_head.0.bbox_head.fc_out_channels': 128,
            'model.train_cfg.1.rpn_proposal': _FEW_RPN,
            'model.train_cfg.1.rcnn.sampler': _FEW_ROIS,
        },
    ),
    'ViTDet': Small(
        'mmdet/projects/ViTDet/configs/vitdet_mask-rcnn_vit-b-mae_lsj-100e.py',
        {
            'model.data_preprocessor.batch_augments': None,
            **{f'model.backbone.{key}': value for key, value in dict(
                img_size=SIDE, embed_dim=96, depth=4, num_heads=4, window_size=4, window_block_indexes=[0, 2]
            ).items()},
            'model.neck.backbone_channel': 96,
            'model.neck.in_channels': [24, 48, 96, 96],
            'model.neck.out_channels': 64,
            'model.rpn_head.in_channels': 64,
            'model.rpn_head.feat_channels': 64,
            **{f'model.roi_head.{part}.{key}': 64 for part, key in (
                ('bbox_roi_extractor', 'out_channels'), ('mask_roi_extractor', 'out_channels'),
                ('bbox_head', 'in_channels'), ('bbox_head', 'conv_out_channels'), ('bbox_head', 'fc_out_channels'),
                ('mask_head', 'in_channels'), ('mask_head', 'conv_out_channels'),
            )},
            'model.train_cfg.rpn_proposal': _FEW_RPN,
            'model.train_cfg.rcnn.sampler': _FEW_ROIS,
        },
    ),
    'Grounding DINO': Small(
        'mmdet/configs/grounding_dino/grounding_dino_r50_scratch_8xb2_1x_coco.py',
        _R18
        | TEXT
        | {
            'model.language_model.depth': 2,
            'model.language_model.width': 128,
            'model.language_model.heads': 4,
            'model.encoder.fusion_layer_cfg.dropout': 0.0,
            'model.encoder.num_layers': 2,
            'model.decoder.num_layers': 2,
            'model.encoder.layer_cfg.ffn_cfg.feedforward_channels': 256,
            'model.decoder.layer_cfg.ffn_cfg.feedforward_channels': 256,
            'model.neck.in_channels': [64, 128, 256],
            'model.num_queries': 60,
        },
    ),
}  # fmt: skip


def _with_one_class(node):
    """Set all numbers of classes in a config to 1, in place."""
    if isinstance(node, dict):
        if 'num_classes' in node:
            node['num_classes'] = 1
        node = [*node.values()]
    if isinstance(node, (list, tuple)):
        for item in node:
            _with_one_class(item)


def _images(data: Path):
    """Build the data set of crops."""
    steps = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        dict(type='RandomCrop', crop_size=(SIDE, SIDE)),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackDetInputs'),
    ]
    keys = dict(metainfo=dict(classes=('nucleus',)), data_prefix=dict(img='images/'), filter_cfg=dict(min_size=2))
    return DATASETS.build(
        dict(type='mmdet.CocoDataset', data_root=str(data), ann_file='train.json', pipeline=steps, **keys)
    )


def _seed(step):
    random.seed(step), np.random.seed(step), torch.manual_seed(step)


def train(folder: Path, data: Path, name: str, run: str, steps: int) -> dict:
    """Train a small detector.

    Args:
        folder (Path): The sources.
        data (Path): The images.
        name (str): A key of ``MODELS``.
        run (str): One of ``RUNS``.
        steps (int): Number of steps.

    Returns:
        dict: ``losses``, one for each step, and what was changed, if anything.
    """
    small, losses, row = MODELS[name], [], {}
    with sources(folder, small.config), at_the_first_step():
        config: Config = make_plain(load_config(str(folder / small.config), small.options))
        _with_one_class(config.model)
        config.optim_wrapper = dict(
            type='OptimWrapper', optimizer=dict(type='AdamW', lr=2e-4, weight_decay=1e-4), clip_grad=dict(max_norm=1.0)
        )
        _seed(0)
        model, wrapper = build_detector(config, 'cpu')
        model.init_weights()
        if run == 'last bit changed':
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
        elif run != 'none':
            row['said'] = LeanHook(preset=run, skip_dropped_images=False).apply(model).splitlines()[0]
        images = _images(data)
        order = np.random.default_rng(0).permutation(len(images))
        for step in range(steps):
            _seed(step)
            chosen = [images[int(order[(IMAGES * step + i) % len(order)])] for i in range(IMAGES)]
            batch = dict(inputs=[c['inputs'] for c in chosen], data_samples=[c['data_samples'] for c in chosen])
            for sample in batch['data_samples']:
                sample.set_metainfo(dict(text=('nucleus',), custom_entities=True))
            losses.append(float(model.train_step(batch, wrapper)['loss']))
    return dict(row, losses=losses)


def report(rows: dict[str, dict]) -> str:
    """Format how far the losses of each training are from the plain ones.

    Args:
        rows (dict[str, dict]): Rows by 'detector, run'.
    """

    def apart_by(row, steps):
        plain_losses = rows[f'{row["name"]}, none']['losses']
        distances = [abs(a - b) / abs(b) for a, b in zip(row['losses'], plain_losses, strict=True)]
        return f'{max(distances[:steps]):.0e}'

    columns = [
        Column('detector', lambda row: row['name']),
        Column('training', lambda row: row['run'] if row['run'] not in PRESETS else f'`{row["run"]}`'),
        Column('loss, first 50 steps', lambda row: f'{statistics.mean(row["losses"][:50]):.2f}'),
        Column('last 50', lambda row: f'{statistics.mean(row["losses"][-50:]):.2f}'),
        Column('off plain, first step', lambda row: apart_by(row, 1)),
        Column('first 10', lambda row: apart_by(row, 10)),
        Column('first 30', lambda row: apart_by(row, 30)),
    ]
    found = []
    for label, row in rows.items():
        name, run = label.split(', ')
        if 'losses' in row:
            found.append(dict(row, name=name, run=run))
    return markdown_table(columns, found)


def main():
    """Run the trainings that are missing and print how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='the sources')
    parser.add_argument('--data', type=Path, required=True, help='folder of the images')
    parser.add_argument('--json', type=Path, required=True, help='file of results; existing ones are kept')
    parser.add_argument('--steps', type=int, default=200, help='number of steps of each training run (default: 200)')
    parser.add_argument('--only', nargs='+', default=[*MODELS], metavar='NAME', help='train no others')
    args = parser.parse_args()
    names = [f'{name}, {run}' for name in args.only for run in RUNS]

    def compute(label):
        return run_apart(train, args.folder, args.data, *label.split(', '), args.steps, seconds=SECONDS)

    there = read_rows(args.json)
    rows = sweep(args.json, [name for name in names if 'losses' not in there.get(name, {})], compute)
    print(report(rows))


if __name__ == '__main__':
    main()
