"""The quick start prints its summary at the end."""

import json
import sys

import pytest
from helpers import ROOT

import quickstart_summary  # isort: skip  (helpers puts tools/ on the path)


def test_summary(tmp_path, monkeypatch, capsys):
    """The visualizers of these training runs wrote the same files as mmengine's."""
    for name in ('plain', 'lean', 'sbp'):
        folder = tmp_path / name / '20261123'
        (folder / 'vis_data').mkdir(parents=True)
        (folder / 'now.log').touch()
        rows = [*(dict(loss=3 / step, iter=step, step=step) for step in range(1, 33)), {'coco/bbox_mAP': 0.2}]
        (folder / 'vis_data/scalars.json').write_text('\n'.join(map(json.dumps, rows)))
    scores = tmp_path / 'test/20261123/20261123.json'
    scores.parent.mkdir(parents=True)
    (scores.parent / 'predictions').mkdir()
    scores.write_text(json.dumps({f'coco/{kind}_mAP{size}': 0.25 for kind in ('bbox', 'segm') for size in ('', '_50')}))
    config = ROOT / 'configs/nuclei/mask-rcnn_convnext-atto_fpn_lean-15e_nuclei.py'
    monkeypatch.setattr(sys, 'argv', ['tool', str(config), str(tmp_path)])
    with pytest.raises(SystemExit, match='last_checkpoint'):
        quickstart_summary.main()
    (tmp_path / 'lean/last_checkpoint').write_text('epoch_15.pth')
    quickstart_summary.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ['plain', 'LeanHook', 'SBPConvNeXt']
    assert said[2].split() == ['loss,', 'step', '5', '0.6000', '0.6000', '0.6000']
    (none, lean, sbp), (checkpointed,) = (
        [float(word) for word in line.split('MB')[1].split()] for line in said if 'MB' in line
    )
    assert lean < checkpointed < 0.8 * none and sbp < checkpointed
    assert 'box AP              0.250' in '\n'.join(said) and (tmp_path / 'losses.png').stat().st_size > 5000
