"""Batches, and what an untrained detector is made to find: proposals near the ground truth, of its RPN's boxes."""

import pytest
import torch
from mmdet.models.task_modules.assigners import DynamicSoftLabelAssigner
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import HorizontalBoxes, register_box, register_box_converter
from mmengine.structures import InstanceData
from torch import nn

from sbp_mmdet.plan.batch import as_if_trained, build_batch, while_as_if_trained

HEIGHT, WIDTH, NUMBER = 200, 300, 100


@register_box('turned', force=True)
class Turned(HorizontalBoxes):
    """Boxes as mmrotate has them: centre, width, height, angle."""

    box_dim = 5


@register_box('corners', force=True)
class Corners(HorizontalBoxes):
    """Four points, as mmrotate's quadrilaterals."""

    box_dim = 8


@register_box_converter(Turned, HorizontalBoxes, force=True)
def around(boxes):
    """Return the rectangles around boxes, of which none is turned here."""
    return torch.cat([boxes[:, :2] - boxes[:, 2:4] / 2, boxes[:, :2] + boxes[:, 2:4] / 2], 1)


@register_box_converter(Turned, Corners, force=True)
def corners(boxes):
    x1, y1, x2, y2 = around(boxes).unbind(1)
    return torch.stack([x1, y1, x2, y1, x2, y2, x1, y2], 1)


class RPN(nn.Module):
    """Finds nothing, in boxes of one kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def loss_and_predict(self, x, samples, proposal_cfg=None):
        found = torch.zeros(3, 4) if self.kind is torch.Tensor else self.kind(torch.zeros(3, self.kind.box_dim))
        return {}, [InstanceData(bboxes=found, scores=torch.zeros(3)) for _ in samples]


def propose(kind, truth):
    detector = nn.Module()
    detector.rpn_head = RPN(kind)
    sample = DetDataSample(metainfo=dict(img_shape=(HEIGHT, WIDTH)), gt_instances=InstanceData(bboxes=truth))
    with while_as_if_trained(detector):
        return detector.rpn_head.loss_and_predict(None, [sample], proposal_cfg=dict(max_per_img=NUMBER))[1][0]


@pytest.mark.parametrize('kind', [Turned, Corners, HorizontalBoxes, torch.Tensor])
def test_proposals_are_boxes_of_the_rpns_kind_near_the_truth(kind):
    truth = Turned(torch.tensor([[50.0, 60, 40, 20, 0], [150, 100, 30, 50, 0]]))
    found = propose(kind, truth)
    assert type(found.bboxes) is kind and len(found) == NUMBER
    boxes = found.bboxes if kind is torch.Tensor else found.bboxes.tensor
    if kind is Turned:
        assert {tuple(row) for row in boxes[:, 2:].tolist()} == {(40.0, 20.0, 0.0), (30.0, 50.0, 0.0)}
        centres = boxes[:, :2]
    else:
        centres = boxes.view(NUMBER, -1, 2).mean(1)
    for centre, sides in ((truth.tensor[i, :2], truth.tensor[i, 2:4]) for i in range(2)):
        near = ((centres - centre).abs() <= 0.05 * sides + 1e-3).all(1)
        assert near[:16].sum() == 8  # eight for each box, first of all
    assert (centres >= 0).all() and (centres <= torch.tensor([WIDTH, HEIGHT])).all()
    assert centres[16:].std(0).min() > 20  # the others lie anywhere


def test_an_image_without_boxes_has_proposals_too():
    assert len(propose(Turned, Turned(torch.zeros(0, 5)))) == NUMBER


def test_a_detector_without_rpn_is_left_alone():
    detector = nn.Linear(1, 1)
    before = dict(vars(detector))
    as_if_trained(detector)
    assert vars(detector) == before


def test_a_trained_head_assigns_eight_predictions_to_a_box():
    """An untrained head, whose predictions overlap no box, assigns one."""
    cost = torch.rand(100, 5) + 10 * (torch.arange(100)[:, None] // 20 != torch.arange(5))
    head = nn.Module()
    head.assigner = DynamicSoftLabelAssigner()
    for number in (1, 8):
        assigned = head.assigner.dynamic_k_matching(cost, torch.zeros(100, 5), 5, torch.ones(100, dtype=torch.bool))
        assert assigned[1].bincount(minlength=5).tolist() == [number] * 5
        as_if_trained(head)


def test_a_small_image_with_fewer_predictions():
    head = nn.Module()
    head.assigner = DynamicSoftLabelAssigner()
    as_if_trained(head)
    cost = torch.rand(4, 1)
    assigned = head.assigner.dynamic_k_matching(cost, torch.zeros(4, 1), 1, torch.ones(4, dtype=torch.bool))
    assert len(assigned[1]) == 4


def test_the_batch_is_what_the_pipeline_gives():
    data = build_batch(2, 90, 120, 30, 4, with_masks=True)
    assert [image.shape for image in data['inputs']] == [(3, 90, 120)] * 2
    for sample in data['data_samples']:
        boxes, masks = sample.gt_instances.bboxes.tensor, sample.gt_instances.masks
        assert len(boxes) == 30 and masks.masks.shape == (30, 90, 120)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= 120).all() and (boxes[:, 3] <= 90).all()
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        assert area.max() > 20 * area.min()
        assert masks.areas == pytest.approx(area.numpy() * torch.pi / 4, rel=0.3, abs=8)
        assert 0 <= sample.gt_instances.labels.min() and sample.gt_instances.labels.max() < 4
        assert {'img_shape', 'pad_shape', 'ori_shape', 'scale_factor', 'img_id'} <= set(sample.metainfo_keys())
