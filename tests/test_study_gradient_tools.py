"""The tools of the gradient study, typed as a user types them, on our configs and on one that is not ours."""

import json
import subprocess
import sys

import cv2
import pytest
import torch
from helpers import TOOLS, make_project

sys.path[:0] = [str(TOOLS / 'analysis_tools')]
import draw_object_masks  # noqa: E402
import gradient_norms  # noqa: E402
import gradient_study  # noqa: E402

from sbp_mmdet.study import report as study_report  # noqa: E402

# A stock config: nothing but the lines of its backbone differ.
STOCK = """
_base_ = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
model = dict(backbone=dict(type='SBPConvNeXt', sbp_cfg=dict(keep_ratio=0.5)))
"""
# COCO's place is taken by the images that are here, and the model is made small, so that the test is quick.
DATA = """
_base_ = 'stock.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, depths=[1, 1, 2, 1], channels=[8, 16, 32, 64])),
    neck=dict(in_channels=[8, 16, 32, 64]),
    roi_head=dict(bbox_head=dict(fc_out_channels=16)),
)
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    dataset=dict(
        data_root='data/shapes/',
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='images/train/'),
        metainfo=dict(classes=('ellipse', 'rectangle', 'triangle', 'star')),
        filter_cfg=dict(min_size=2),
        pipeline=pipeline,
    )
)
"""


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp('project')
    make_project(folder)
    return folder


def run(monkeypatch, tool, project, *words):
    """What typing the command in the project does, without starting another python."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, 'argv', [tool.__file__, *map(str, words)])
    tool.main()


def refusal(monkeypatch, capsys, tool, project, *words):
    with pytest.raises(SystemExit):
        run(monkeypatch, tool, project, *words)
    return capsys.readouterr().err


def test_gradient_study(project, tmp_path, monkeypatch, capsys):
    files = tmp_path / 'new' / 'x.json', tmp_path / 'new' / 'x.png'
    more = ['--setting', 'mine: keep_ratio=0.3 sampler=random', '--batches', 2, '--device', 'cpu']
    run(monkeypatch, gradient_study, project, 'tiny.py', *more, '--json', files[0], '--plot', files[1])
    found, printed = json.loads(files[0].read_text()), capsys.readouterr().out
    assert list(found['results']) == list(found['settings']) == ['0.75', '0.5', '0.25', 'mine']
    assert found['settings']['mine'] == dict(keep_ratio=0.3, sampler='random')
    cosines = [found['results'][label]['backbone']['cosine'] for label in found['settings']]
    assert all(len(c['values']) == 2 and sum(c['values']) / 2 == pytest.approx(c['mean'], rel=1e-3) for c in cosines)
    assert cosines[0]['mean'] > cosines[2]['mean']
    assert set(found['results']['0.5']['stages.0.0.norm']['cosine']) == {'mean', 'std'}
    assert all(check['error'] < 1e-4 and check['dropped'] == 0 for check in found['kept'].values())
    assert study_report.study_table(found) in printed
    assert f'| 0.5 | {found["results"]["0.5"]["network"]["cosine"]["mean"]:.3f} ± ' in printed
    assert found['case']['batches'] == 2 and found['machine']['torch']
    picture = cv2.imread(str(files[1]))
    assert picture is not None and picture.std() > 10


def test_gradient_study_takes_a_stock_config(project, tmp_path, monkeypatch):
    (project / 'stock.py').write_text(STOCK)
    (project / 'data.py').write_text(DATA)
    arguments = ['--settings', 'orders', '--batches', 1, '--device', 'cpu', '--json', tmp_path / 'x.json']
    run(monkeypatch, gradient_study, project, 'data.py', *arguments)
    found = json.loads((tmp_path / 'x.json').read_text())
    assert list(found['results'])[:3] == ['uniform 0.5', 'increasing', 'decreasing']
    assert all(0.1 < row['backbone']['cosine']['mean'] < 0.999 for row in found['results'].values())


def test_gradient_study_names_what_is_wrong(project, monkeypatch, capsys):
    def refused(*words):
        return refusal(monkeypatch, capsys, gradient_study, project, *words)

    assert 'none.py does not exist' in refused('none.py')
    assert "'ratio' is unknown" in refused('tiny.py', '--settings', 'ratio')
    assert 'no settings' in refused('tiny.py', '--settings', 'none')
    assert "'0.5' stands twice" in refused('tiny.py', '--setting', '0.5: keep_ratio=0.5')
    assert "setting 'x': sbp_cfg has an unknown key 'ratio'" in refused('tiny.py', '--setting', 'x: ratio=0.5')
    assert '--batches 0 must be' in refused('tiny.py', '--batches', 0)


def test_gradient_norms(project, tmp_path, monkeypatch, capsys):
    files = tmp_path / 'x.json', tmp_path / 'x.png'
    arguments = ['--steps', 2, '--device', 'cpu', '--json', files[0], '--plot', files[1]]
    run(monkeypatch, gradient_norms, project, 'tiny.py', *arguments)
    found, printed = json.loads(files[0].read_text()), capsys.readouterr().out
    results = found['results']
    assert list(results) == ['without SBP', 'keep ratio 0.5', 'disjoint blocks', 'disjoint pointwise layers']
    assert all(len(row['loss']) == 2 == len(row['norms']['backbone']) for row in results.values())
    vanished = [part for part, norms in results['disjoint pointwise layers']['norms'].items() if not any(norms)]
    # Norm, depthwise and first pointwise layer of each of the four blocks of stages 1 to 3.
    assert len(vanished) == 12 and {part.split('.')[-1] for part in vanished} == {
        'depthwise_conv', 'norm', 'pointwise_conv1',
    }  # fmt: skip
    assert study_report.norms_table(found) in printed and '| 12 of ' in printed
    heads = ['backbone', *(f'stage {i}' for i in range(1, 5)), 'layers whose gradient is 0']
    assert f'| last loss | {" | ".join(heads)} |' in printed
    picture = cv2.imread(str(files[1]))
    assert picture is not None and picture.std() > 10
    assert '--steps 0 must be' in refusal(monkeypatch, capsys, gradient_norms, project, 'tiny.py', '--steps', 0)


def test_pages_show_the_results():
    page = ''.join(path.read_text() for path in sorted((TOOLS.parent / 'docs').glob('*.md')))
    files = sorted((TOOLS.parent / 'docs/results').glob('gradient_*.json'))
    assert len(files) >= 5
    for file in files:
        found = json.loads(file.read_text())
        table = study_report.norms_table if 'steps' in found['case'] else study_report.study_table
        assert table(found) in page and found['machine']['command'] in page, file.name


def test_pages_are_filled_from_results(tmp_path):
    """By the tool that fills the other tables: a study and norms."""
    for name in ('orders', 'norms_atto'):
        results = TOOLS.parent / f'docs/results/gradient_{name}.json'
        page = tmp_path / f'{name}.md'
        (tmp_path / results.name).write_text(results.read_text())
        page.write_text(f'<!-- table: {results.name} -->\n<!-- end -->\n')
        subprocess.run([sys.executable, TOOLS / 'analysis_tools/update_tables.py', page], check=True)
        found = json.loads(results.read_text())
        label = 'increasing' if name == 'orders' else 'disjoint blocks'
        assert f'| {label} |' in page.read_text() and found['machine']['command'] in page.read_text()


def test_share_of_the_energy():
    gradient = torch.zeros(2, 2, 3)
    gradient[0, 0, 1], gradient[1, 0, 1], gradient[0, 1, 2] = 3, 4, 5
    heat = draw_object_masks.energy(gradient)
    assert heat.tolist() == [[0, 25, 0], [0, 0, 25]]
    mask = torch.tensor([[True, True, True], [False, False, False]]).numpy()
    assert draw_object_masks.kept_share(heat, mask) == 0.5


def test_draw_object_masks(project, tmp_path, monkeypatch):
    out = tmp_path / 'objects.png'
    run(monkeypatch, draw_object_masks, project, 'tiny.py', '--out', out, '--images', 2, '--stage', 1)
    picture = cv2.imread(str(out))
    assert picture is not None and picture.shape[1] > picture.shape[0]
