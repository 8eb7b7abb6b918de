"""What the quick start shows at its end: predictions beside ground truth, and the summary."""

import json
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, make_project
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

import quickstart_summary  # isort: skip  (helpers puts tools/ on the path)
import show_predictions


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project, its config, and the weights of an untrained detector."""
    folder = tmp_path_factory.mktemp('quick')
    path = make_project(folder, train=2, val=2)
    config = Config.fromfile(path)
    init_default_scope('mmdet')
    for name in ('a', 'b'):
        (folder / name).mkdir()
        meta = dict(dataset_meta=config.train_dataloader.dataset.metainfo.to_dict())
        torch.save(dict(state_dict=MODELS.build(config.model).state_dict(), meta=meta), folder / f'{name}/last.pth')
    return folder, path, config


def test_pictures(project, monkeypatch, capsys):
    """Two models side by side; what cannot be drawn is one line."""
    folder, path, _ = project
    monkeypatch.chdir(folder)
    models, out = [str(folder / f'{name}/last.pth') for name in 'ab'], folder / 'new/out.png'
    words = ['tool', str(path), *models, '--out', str(out), '--num', '2', '--score-thr', '0', '--device', 'cpu']
    monkeypatch.setattr(sys, 'argv', words)
    show_predictions.main()
    assert out.stat().st_size > 10_000
    monkeypatch.setattr(sys, 'argv', ['tool', str(path), models[0], models[0], '--out', str(out)])
    with pytest.raises(SystemExit):
        show_predictions.main()
    assert 'folders of checkpoints differ in name' in capsys.readouterr().err


def test_ground_truth_of_each_kind_of_mask():
    square = np.zeros((8, 8), bool)
    square[2:6, 1:5] = True
    runs = [1 * 8 + 2, 4, 4, 4, 4, 4, 4, 4, 3 * 8 + 2]  # down the columns
    polygon = [[1, 2, 5, 2, 5, 6, 1, 6]]
    instances = [dict(bbox_label=0, bbox=[1, 2, 5, 6], mask=mask) for mask in (polygon, dict(size=[8, 8], counts=runs))]
    for _, _, mask, score in show_predictions.ground_truth(dict(instances=instances, height=8, width=8)):
        assert np.array_equal(mask, square) and score is None


def test_summary(tmp_path, monkeypatch, capsys):
    """Of trainings whose visualizers wrote what mmengine's do."""
    for name, extra in (
        ('plain', []),
        ('lean', [{'lean/stored_mb_now': 80.0, 'lean/stored_mb_before': 220.0, 'step': 1}]),
    ):
        folder = tmp_path / name / '20261123'
        (folder / 'vis_data').mkdir(parents=True)
        (folder / 'now.log').touch()
        rows = [*extra, *(dict(loss=3 / step, iter=step, step=step) for step in range(1, 33)), {'coco/bbox_mAP': 0.2}]
        (folder / 'vis_data/scalars.json').write_text('\n'.join(map(json.dumps, rows)))
    scores = tmp_path / 'test/20261123/20261123.json'
    scores.parent.mkdir(parents=True)
    scores.write_text(json.dumps({f'coco/{kind}_mAP{size}': 0.25 for kind in ('bbox', 'segm') for size in ('', '_50')}))
    config = ROOT / 'configs/nuclei/mask-rcnn_convnext-atto_fpn_quickstart.py'
    monkeypatch.setattr(sys, 'argv', ['tool', str(config), str(tmp_path)])
    with pytest.raises(SystemExit, match='last_checkpoint'):
        quickstart_summary.main()
    (tmp_path / 'lean/last_checkpoint').write_text('epoch_15.pth')
    quickstart_summary.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ['plain', 'LeanHook'] and said[2].split() == ['loss,', 'step', '5', '0.6000', '0.6000']
    stored, peak = (line.split()[-2:] for line in said if 'MB' in line)
    assert stored == ['220.0', '80.0'] and float(peak[1]) < 0.8 * float(peak[0])
    assert 'box AP              0.250' in '\n'.join(said) and (tmp_path / 'losses.png').stat().st_size > 5000
