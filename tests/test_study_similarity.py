"""Weights against numpy, pairs against all permutations, detections against mmdet's inference, annotations against the
file that they come from."""

import copy
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, make_project
from mmdet.apis import inference_detector, init_detector
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData

from sbp_mmdet.study.similarity import agreement, cosines, match, picture, relabel, table, updates

sys.path[:0] = [str(ROOT / 'tools/analysis_tools')]
import compare_models  # noqa: E402

CLASSES = ('ellipse', 'rectangle', 'triangle', 'star')


def objects(boxes, labels, scores=None):
    """Boxes x1, y1, x2, y2."""
    scores = [0.9] * len(labels) if scores is None else scores
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return InstanceData(bboxes=boxes, labels=torch.tensor(labels, dtype=torch.long), scores=torch.tensor(scores))


def test_cosines_by_layer_part_and_whole():
    shapes = {
        'backbone.stages.0.0.depthwise_conv.weight': (3, 1, 7, 7),
        'backbone.stages.0.0.depthwise_conv.bias': (3,),
        'backbone.stages.0.0.gamma': (3,),
        'neck.lateral_convs.0.conv.weight': (4, 3, 1, 1),
        'frozen.weight': (2, 2),
    }
    a = {name: torch.randn(shape) for name, shape in shapes.items()}
    b = {name: a[name] + torch.randn(shape) for name, shape in shapes.items()}
    b['frozen.weight'] = torch.zeros(2, 2)
    a['only_a'] = b['neck.other_shape'] = torch.ones(3)
    a['neck.other_shape'] = torch.ones(4)

    def expected(names):
        x, y = (np.concatenate([side[n].numpy().astype(np.float64).ravel() for n in names]) for side in (a, b))
        cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        return dict(cosine=cosine, norm_ratio=np.linalg.norm(y) / np.linalg.norm(x), weights=x.size)

    names = list(shapes)
    found = cosines(a, b)
    assert found['whole'] == pytest.approx(expected(names), rel=1e-12)
    assert list(found['parts']) == ['stage 1', 'neck', 'frozen']
    assert found['parts']['stage 1'] == pytest.approx(expected(names[:3]), rel=1e-12)
    layers = {
        'backbone.stages.0.0.depthwise_conv': names[:2],
        'backbone.stages.0.0.gamma': names[2:3],
        'neck.lateral_convs.0.conv': names[3:4],
    }
    assert found['layers'].pop('frozen') == dict(cosine=None, norm_ratio=0.0, weights=4)
    assert found['layers'].keys() == layers.keys()
    for layer, members in layers.items():
        assert found['layers'][layer] == pytest.approx(expected(members), rel=1e-12)


def test_cosines_of_updates_do_not_see_the_start():
    """Two steps at right angles from a start far away: the weights look alike, the updates do not."""
    start = {'layer.weight': torch.full((2,), 1000.0), 'head.weight': torch.ones(3)}
    a, b = {'layer.weight': torch.tensor([1001.0, 1000.0])}, {'layer.weight': torch.tensor([1000.0, 998.0])}
    assert cosines(a, b)['whole']['cosine'] > 0.99999
    found = cosines(updates(a, start), updates(b, start))['whole']
    assert found == dict(cosine=0.0, norm_ratio=2.0, weights=2)


def test_cosines_refuses_different_architectures():
    with pytest.raises(ValueError, match='different architectures'):
        cosines({'a': torch.ones(2)}, {'a': torch.ones(3), 'b': torch.ones(2)})


def overlap(p, q):
    width, height = (min(p[i + 2], q[i + 2]) - max(p[i], q[i]) for i in (0, 1))
    shared = max(width, 0) * max(height, 0)
    area = [(box[2] - box[0]) * (box[3] - box[1]) for box in (p, q)]
    return shared / (sum(area) - shared)


def test_match_finds_as_many_pairs_as_there_can_be():
    """Against every way of pairing, on crowds of boxes that overlap."""
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(60):
        sides = []
        for _ in range(2):
            corner, side = rng.uniform(0, 6, (rng.integers(0, 6), 2)), rng.uniform(8, 12, 2)
            sides.append(objects(np.hstack([corner, corner + side]), rng.integers(0, 2, len(corner)).tolist()))
        few, many = sorted(sides, key=len)
        best = (0, 0.0)
        for order in itertools.permutations(range(len(many)), len(few)):
            ious = [
                overlap(few.bboxes[i].tolist(), many.bboxes[j].tolist())
                for i, j in enumerate(order)
                if few.labels[i] == many.labels[j]
            ]
            ious = [iou for iou in ious if iou >= 0.5]
            best = max(best, (len(ious), sum(ious)))
        for a, b in (sides, sides[::-1]):
            rows, columns = match(a, b)
            assert len(set(rows.tolist())) == len(set(columns.tolist())) == len(rows) == best[0]
            assert (a.labels[rows] == b.labels[columns]).all()
            pairs = zip(a.bboxes[rows].tolist(), b.bboxes[columns].tolist(), strict=True)
            ious = [overlap(p, q) for p, q in pairs]
            assert all(iou >= 0.5 for iou in ious) and sum(ious) == pytest.approx(best[1], rel=1e-5)
        sizes.append(best[0])
    assert max(sizes) >= 4 and min(sizes) == 0


def test_match_prefers_three_fair_pairs_to_two_good_ones():
    """Six boxes in a row; pairs of neighbours have IoUs of 0.55, 0.95, 0.55, 0.95 and 0.55, all other pairs less."""
    boxes = [[x, 0, x + 10, 10] for x in (0, 2.9, 3.16, 6.06, 6.32, 9.22)]
    rows, columns = match(objects(boxes[::2], [0] * 3), objects(boxes[1::2], [0] * 3))
    assert rows.tolist() == columns.tolist() == [0, 1, 2]


def test_agreement_counted_by_hand():
    square, near, far = [0, 0, 10, 10], [0, 0, 10, 8], [50, 50, 60, 60]  # IoU of the first two: 0.8
    a = {
        1: objects([square, far], [0, 1], [0.9, 0.8]),
        2: objects([square], [0], [0.7]),
        3: objects([], []),
        4: objects([far], [1], [0.6]),
    }
    b = {
        1: objects([near, far, [0, 0, 9, 10]], [0, 1, 0], [0.5, 0.9, 0.6]),  # one of A's can have one partner only
        2: objects([square], [1], [0.7]),  # another class
        3: objects([], []),
        4: objects([far], [1], [0.6]),
    }
    found = agreement(a, b, ['cat', 'dog', 'cow'])
    assert (found['images'], found['same_images']) == (4, 0.5)
    # The nearer of the two cats, IoU 0.9, is the partner: scores 0.9 and 0.6.
    # The dogs: 0.8 and 0.9, 0.6 and 0.6.
    counts = dict(a=4, b=5, matched=3, a_in_b=3 / 4, b_in_a=3 / 5, agreement=(3 / 4 + 3 / 5) / 2)
    assert found['all'] == pytest.approx(dict(counts, score_difference=0.4 / 3, score_shift=-0.2 / 3))
    counts = dict(a=2, b=2, matched=1, a_in_b=0.5, b_in_a=0.5, agreement=0.5)
    assert found['by_class']['cat'] == pytest.approx(dict(counts, score_difference=0.3, score_shift=-0.3))
    assert found['by_class']['dog']['matched'] == 2 and 'cow' not in found['by_class']
    swapped = agreement(b, a, ['cat', 'dog', 'cow'])
    assert swapped['all']['agreement'] == pytest.approx(found['all']['agreement'])
    with pytest.raises(ValueError, match='other images: 1 '):
        agreement(a, {image: b[image] for image in (1, 2, 3)}, ['cat', 'dog'])


def test_relabel_goes_by_name():
    found = relabel({7: objects([[0, 0, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]], [0, 1, 2])}, ('a', 'b', 'c'), ['c', 'a'])
    assert found[7].labels.tolist() == [1, 0]
    assert found[7].bboxes[:, 0].tolist() == [0, 2]


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A small set and config; checkpoints that have learnt nothing: with and without SBP, and one of other weights."""
    folder = tmp_path_factory.mktemp('similarity')
    config = Config.fromfile(make_project(folder, train=1, val=3))
    for loader in (config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(folder / 'data/shapes') + '/'
        loader.batch_size = 2
    config.dump(folder / 'config.py')
    init_default_scope('mmdet')
    for name, seed, setting in (('plain', 0, None), ('sbp', 0, config.model.backbone.sbp_cfg), ('other', 1, None)):
        torch.manual_seed(seed)
        changed = copy.deepcopy(config.model)
        changed.backbone.sbp_cfg = setting
        model = MODELS.build(changed)
        model.init_weights()
        meta = dict(dataset_meta=dict(CLASSES=CLASSES, classes=CLASSES))
        torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / f'{name}.pth')
    return folder


def run(project, monkeypatch, *arguments, config='config.py'):
    """What typing the command in the project's folder does."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, 'argv', ['compare_models.py', config, *map(str, arguments)])
    compare_models.main()


def test_tool(project, monkeypatch, tmp_path, capsys):
    outputs = '--json', tmp_path / 'new/x.json', '--plot', tmp_path / 'new/x.png'
    run(project, monkeypatch, 'plain.pth', 'sbp.pth', 'other.pth', '--start', 'plain.pth', '--score-thr', 0, *outputs)
    results = json.loads((tmp_path / 'new/x.json').read_text())
    twin, other = results['pairs']
    assert (twin['name'], other['name']) == ('plain - sbp', 'plain - other')
    # The same weights in the plain network and in the one with SBP.
    assert twin['weights']['whole']['cosine'] == pytest.approx(1, abs=1e-12)
    assert twin['updates']['whole']['cosine'] is None
    found = twin['detections']
    assert (found['images'], found['same_images'], found['all']['agreement']) == (3, 1, 1)
    assert found['all']['score_difference'] == 0
    assert abs(other['weights']['whole']['cosine']) < 0.9

    model = init_detector('config.py', 'other.pth', device='cpu')
    images = sorted((project / 'data/shapes/images/val').iterdir())
    expected = [len(inference_detector(model, str(path)).pred_instances) for path in images]
    assert other['detections']['all']['b'] == sum(expected) > 0
    coco = json.loads((project / 'data/shapes/annotations/instances_val.json').read_text())
    for name in ('plain', 'sbp', 'other'):
        assert results['annotations'][f'{name} - annotations']['all']['b'] == len(coco['annotations'])
    assert (tmp_path / 'new/x.png').stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert 'cosine of weights' in printed and 'plain - annotations' in printed


def test_detections_are_those_of_mmdet_in_pixels_of_the_file(project):
    """The images of 64 pixels are enlarged to 128 before the network sees them."""
    config = Config.fromfile(project / 'config.py')
    model, classes = compare_models.load_model(config, str(project / 'other.pth'))
    assert tuple(classes) == CLASSES
    found, dataset = compare_models.find(config, model, 0.0, 2, 'cpu')
    assert len(found) == 2
    assert list(compare_models.find(config, model, 0.0, 1, 'cpu')[0]) == list(found)[:1]
    assert compare_models.find(config, model, 0.999, None, 'cpu')[0].keys() == {1, 2, 3}
    reference = init_detector(copy.deepcopy(config), str(project / 'other.pth'), device='cpu')
    for i, one in enumerate(found.values()):
        expected = inference_detector(reference, dataset.get_data_info(i)['img_path']).pred_instances
        torch.testing.assert_close(one.bboxes, expected.bboxes, rtol=1e-4, atol=1e-3)
        assert len(one) and one.bboxes.max() <= 64


def test_annotations_are_those_of_the_file(project):
    config = Config.fromfile(project / 'config.py')
    dataset = compare_models.Runner.build_dataloader(config.test_dataloader, seed=0).dataset
    coco = json.loads((project / 'data/shapes/annotations/instances_val.json').read_text())
    found = compare_models.annotations(dataset)
    for image in coco['images']:
        own = [x for x in coco['annotations'] if x['image_id'] == image['id']]
        boxes = [[x, y, x + width, y + height] for x, y, width, height in (one['bbox'] for one in own)]
        assert found[image['id']].bboxes.tolist() == boxes
        assert found[image['id']].labels.tolist() == [one['category_id'] - 1 for one in own]


def test_weights_of_a_pretrained_backbone_as_start(project, monkeypatch, capsys):
    state = torch.load(project / 'plain.pth')['state_dict']
    torch.save({name: value for name, value in state.items() if name.startswith('backbone.')}, project / 'backbone.pth')
    run(project, monkeypatch, 'other.pth', 'sbp.pth', '--start', 'backbone.pth', '--weights-only')
    printed = capsys.readouterr().out
    assert 'cosine of updates' in printed and 'detections' not in printed
    assert 'neck' not in printed.split('cosine of updates')[1]


def fails(project, monkeypatch, capsys, *arguments, **options):
    with pytest.raises(SystemExit):
        run(project, monkeypatch, *arguments, **options)
    return capsys.readouterr().err.splitlines()[-1]


def test_bad_input_ends_in_one_line(project, monkeypatch, tmp_path, capsys):
    state = torch.load(project / 'plain.pth')['state_dict']
    torch.save({name: value[..., :1] if value.ndim else value for name, value in state.items()}, project / 'thin.pth')
    meta = dict(dataset_meta=dict(classes=('w', 'x', 'y', 'z')))
    torch.save(dict(state_dict=state, meta=meta), project / 'letters.pth')
    torch.save({name: value for name, value in state.items() if 'mask_head' not in name}, project / 'boxes.pth')
    for arguments, message in (
        (['plain.pth', 'boxes.pth'], 'boxes.pth lacks'),
        (['plain.pth', 'none.pth'], 'CKPT_B: none.pth does not exist'),
        (['none.pth', 'plain.pth'], 'CKPT_A: none.pth does not exist'),
        (['plain.pth', 'thin.pth'], 'thin.pth is of another model'),
        (['plain.pth', 'sbp.pth', '--start', 'none.pth'], '--start: none.pth does not exist'),
        (['plain.pth', 'letters.pth', '--num', 1], 'no class in common: ellipse, rectangle, triangle, ... and w, x, y'),
        (['plain.pth', 'sbp.pth', '--config-b', 'none.py'], 'none.py does not exist'),
        (['plain.pth', 'sbp.pth', '--score-thr', 1], '--score-thr 1.0 must be'),
        (['plain.pth', 'sbp.pth', '--num', 0], '--num 0 must be'),
        (['plain.pth', 'sbp.pth', '--plot', 'x.jpg'], '--plot x.jpg must end in .png'),
    ):
        assert message in fails(project, monkeypatch, capsys, *arguments, '--json', tmp_path / 'x.json')
        assert not (tmp_path / 'x.json').exists()


def test_other_architecture_is_compared_by_what_it_finds(project, monkeypatch, capsys):
    config = Config.fromfile(project / 'config.py')
    config.model = dict(
        type='RetinaNet',
        data_preprocessor=config.model.data_preprocessor,
        backbone=dict(type='ResNet', depth=18, base_channels=8, norm_cfg=dict(type='BN')),
        neck=dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=8, start_level=1, num_outs=3),
        bbox_head=dict(
            type='RetinaHead',
            num_classes=4,
            in_channels=8,
            stacked_convs=1,
            feat_channels=8,
            anchor_generator=dict(type='AnchorGenerator', scales=[4], ratios=[1.0], strides=[8, 16, 32]),
            bbox_coder=dict(type='DeltaXYWHBBoxCoder'),
        ),
        test_cfg=dict(nms_pre=20, score_thr=0.0, nms=dict(type='nms', iou_threshold=0.5), max_per_img=10),
    )
    config.dump(project / 'retina.py')
    torch.save(dict(state_dict=MODELS.build(config.model).state_dict()), project / 'retina.pth')
    arguments = 'plain.pth', 'retina.pth', '--config-b', 'retina.py', '--score-thr', 0
    assert 'different architectures' in fails(project, monkeypatch, capsys, *arguments, '--weights-only')
    run(project, monkeypatch, *arguments)
    printed = capsys.readouterr().out
    assert 'weights not compared: ' in printed and 'plain - retina' in printed and 'cosine of' not in printed


def test_names_tell_checkpoints_apart():
    assert compare_models.labels(['runs/a.pth', 'runs/b.pth']) == ['a', 'b']
    assert compare_models.labels(['a/epoch_1.pth', 'b/epoch_1.pth']) == ['a/epoch_1', 'b/epoch_1']
    assert compare_models.labels(['a/x/epoch_1.pth', 'b/x/epoch_1.pth', 'b/x/epoch_1.pth'])[1] == 'b/x/epoch_1'


def test_picture_and_table_of_what_is_undefined(tmp_path):
    """A class that only one of the models found, and a layer that was never trained."""
    square = [0, 0, 10, 10]
    found = agreement({1: objects([square], [0])}, {1: objects([square, square], [0, 1])}, ['cat', 'dog'])
    assert found['by_class']['dog'] == dict.fromkeys(found['all']) | dict(a=0, b=1, matched=0, b_in_a=0.0)
    zero = cosines({'a.weight': torch.zeros(2), 'b.weight': torch.ones(2)}, {'a.weight': torch.zeros(2)})
    assert zero['whole'] == dict(cosine=None, norm_ratio=None, weights=2)
    results = dict(pairs=[dict(name='x - y', weights=zero, updates=None, detections=found)], annotations={})
    picture(results, tmp_path / 'x.png')
    assert (tmp_path / 'x.png').is_file() and 'x - y' in table(results)
