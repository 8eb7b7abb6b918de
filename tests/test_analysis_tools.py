"""The picture tools write pictures that show what they should."""

import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.masks import mask_generator, sample_mask, stage_masks

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / 'configs/sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
sys.path[:0] = [str(ROOT / 'tools'), str(ROOT / 'tools/analysis_tools')]
import draw_masks  # noqa: E402
import quickstart_summary  # noqa: E402
import show_predictions  # noqa: E402
from make_synthetic_coco import make_set  # noqa: E402


def run(monkeypatch, tool, *arguments):
    """What typing the command does, without starting another python."""
    monkeypatch.setattr(sys, 'argv', [tool.__file__, *map(str, arguments)])
    tool.main()


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A folder with a small set, a config for it, and the checkpoint of a model that has learnt nothing."""
    folder = tmp_path_factory.mktemp('project')
    make_set(folder / 'data/shapes', train=4, val=3, size=64)
    config = Config.fromfile(CONFIG)
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        config[name].update(num_workers=0, persistent_workers=False, batch_size=2)
        config[name].dataset.data_root = str(folder / 'data/shapes/')
    config.dump(folder / 'config.py')
    init_default_scope('mmdet')
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    model.init_weights()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, folder / 'model.pth')
    return folder


def test_dim_fades_the_dropped_positions_only():
    image = np.full((34, 37, 3), 100, np.uint8)
    mask = np.zeros((4, 4), bool)
    mask[1, 2] = True
    faded = draw_masks.dim(image, mask, 8)
    assert (faded[8:16, 16:24] == 100).all()
    assert (faded == 100).sum() == 8 * 8 * 3


def test_stage_sizes_are_those_of_the_layers():
    layers = [torch.nn.Conv2d(1, 1, 4, 4), torch.nn.Conv2d(1, 1, 2, 2), torch.nn.Conv2d(1, 1, 2, 2)]
    for height, width in ((64, 64), (63, 97), (800, 1333)):
        x, sizes = torch.zeros(1, 1, height, width), []
        for layer in layers:
            x = layer(x)
            sizes.append(tuple(x.shape[-2:]))
        assert draw_masks.stage_sizes(height, width) == sizes


@pytest.mark.parametrize('height, width', [(64, 64), (63, 97), (44, 36)])
def test_base_mask_is_what_the_stages_were_enlarged_from(height, width):
    sizes = draw_masks.stage_sizes(height, width)
    masks = [mask.numpy() for mask in stage_masks(sizes, 0.5, 'random', mask_generator(0, 0, 0))]
    base = draw_masks.base_mask(masks)
    # The same draw, at the size that covers every stage.
    drawn = sample_mask(*base.shape, 0.5, 'random', mask_generator(0, 0, 0)).numpy()
    np.testing.assert_array_equal(base, drawn)
    for mask, factor in zip(masks, (4, 2, 1), strict=True):
        for (y, x), kept in np.ndenumerate(mask):
            assert kept == base[y // factor, x // factor]


@pytest.mark.parametrize('samplers', [['grid'], ['random'], ['grid', 'random']])
def test_draw_masks(samplers, project, tmp_path, monkeypatch):
    image = project / 'data/shapes/images/val/000000.jpg'
    for steps in (1, 3):
        out = tmp_path / f'{steps}.png'
        run(monkeypatch, draw_masks, '--image', image, '--out', out, '--sampler', *samplers, '--steps', steps)
    one, three = cv2.imread(str(tmp_path / '1.png')), cv2.imread(str(tmp_path / '3.png'))
    assert one.shape[1] == three.shape[1] and three.shape[0] == 3 * one.shape[0]


def test_draw_masks_of_five_iterations(project, tmp_path, monkeypatch):
    image, out = project / 'data/shapes/images/val/000000.jpg', tmp_path / 'five.png'
    shown = []
    monkeypatch.setattr(draw_masks, 'show', lambda axes, picture, mask, title: shown.append((picture, title)))
    arguments = '--image', image, '--out', out, '--sampler', 'grid', 'random', '--steps', 5, '--base-only'
    run(monkeypatch, draw_masks, *arguments, '--keep-ratio', 0.25)
    assert out.is_file() and len(shown) == 10
    for i, sampler in enumerate(('grid', 'random')):
        visited = np.zeros((4, 4), bool)
        for step, (picture, title) in enumerate(shown[i::2]):
            expected = sample_mask(4, 4, 0.25, sampler, mask_generator(0, 0, step)).numpy()
            np.testing.assert_array_equal((picture == draw_masks.TONES[1]).all(-1), expected)
            visited |= expected
            assert title == f'{sampler}, step {step + 1}: {visited.sum() / 16:.0%} visited'


def test_draw_masks_refuses_a_ratio(project, tmp_path, monkeypatch):
    image, out = project / 'data/shapes/images/val/000000.jpg', tmp_path / 'x.png'
    with pytest.raises(SystemExit, match='keep_ratio=1.5'):
        run(monkeypatch, draw_masks, '--image', image, '--out', out, '--keep-ratio', 1.5)
    assert not out.exists()


def test_draw_masks_refuses_tiny_images(tmp_path):
    with pytest.raises(ValueError, match='16 x 64 pixels'):
        draw_masks.draw_masks(np.zeros((16, 64, 3), np.uint8), tmp_path / 'x.png')


def test_show_predictions(project, tmp_path):
    out = tmp_path / 'folder' / 'picture.png'
    show_predictions.show_predictions(
        load_config(project / 'config.py'), dict(prediction=str(project / 'model.pth')), out, num=2, threshold=0
    )
    picture = cv2.imread(str(out))
    assert picture is not None and picture.std() > 10


def test_show_predictions_names_a_missing_file(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit):
        run(monkeypatch, show_predictions, 'config.py', 'none.pth', '--out', 'x.png')
    assert 'CHECKPOINT: none.pth does not exist' in capsys.readouterr().err


def test_ground_truth_reads_every_kind_of_mask():
    square = np.zeros((10, 12), np.uint8)
    square[2:6, 3:9] = 1
    polygon = [[3, 2, 9, 2, 9, 6, 3, 6]]
    counts, run, value = [], 0, 0  # COCO's run lengths go down the columns and begin with zeros
    for pixel in square.T.ravel():
        if pixel != value:
            counts.append(run)
            run, value = 0, pixel
        run += 1
    run_lengths = {'size': [10, 12], 'counts': [*counts, run]}
    box = dict(bbox=[3, 2, 9, 6], bbox_label=1)
    info = dict(height=10, width=12, instances=[dict(box, mask=mask) for mask in (polygon, run_lengths)] + [box])
    *with_mask, without = show_predictions.ground_truth(info)
    for label, found, mask, score in with_mask:
        assert (label, found, score) == (1, [3, 2, 9, 6], None)
        np.testing.assert_array_equal(mask, square.astype(bool))
    assert without[2] is None


def test_summary_counts_less_with_sbp(project):
    config = Config.fromfile(project / 'config.py')
    batch = dict(
        inputs=[torch.zeros(3, 64, 64, dtype=torch.uint8)] * 2,
        data_samples=None,
    )
    with_sbp, shape = quickstart_summary.backbone_bytes(config, dict(batch))
    config.model.backbone.sbp_cfg = None
    without, _ = quickstart_summary.backbone_bytes(config, dict(batch))
    assert tuple(shape) == (2, 3, 64, 64)
    assert 0 < with_sbp < 0.75 * without


def test_summary_names_what_is_missing(project, monkeypatch):
    with pytest.raises(SystemExit, match='last_checkpoint'):
        run(monkeypatch, quickstart_summary, project / 'config.py', project)
