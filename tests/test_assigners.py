"""Dynamic assigners assign the same, however many priors they compare at a time."""

import copy

import pytest
import torch
from cases import Largest
from mmdet.registry import TASK_UTILS
from mmengine.structures import InstanceData
from torch import nn

from sbp_mmdet import assigners
from sbp_mmdet.chunked_targets import targets_in_chunks

CONFIGS = [dict(type='DynamicSoftLabelAssigner', topk=13), dict(type='SimOTAAssigner', center_radius=2.5)]


def instances(boxes: int, classes: int = 7, size: int = 160, masks: bool = False):
    """Priors of three strides with predictions, and boxes, some of which overlap."""
    g = torch.Generator().manual_seed(boxes)
    priors = []
    for stride in (8, 16, 32):
        y, x = torch.meshgrid(*(torch.arange(size // stride) * float(stride),) * 2, indexing='ij')
        level = torch.full_like(x, stride)
        priors.append(torch.stack([x, y, level, level], -1).reshape(-1, 4))
    priors = torch.cat(priors)
    low = priors[:, :2] - 40 * torch.rand(len(priors), 2, generator=g)
    predicted = torch.cat([low, low + 20 + 60 * torch.rand(len(priors), 2, generator=g)], 1)
    scores = torch.randn(len(priors), classes, generator=g)
    corner = 100 * torch.rand(boxes, 2, generator=g)
    truth = torch.cat([corner, corner + 10 + 50 * torch.rand(boxes, 2, generator=g)], 1)
    gts = InstanceData(bboxes=truth, labels=torch.randint(classes, (boxes,), generator=g))
    if masks:
        gts.masks = (torch.rand(boxes, size, size, generator=g) > 0.5).float()
    return InstanceData(priors=priors, bboxes=predicted, scores=scores.sigmoid()), gts


def model(cfg) -> nn.Module:
    head = nn.Module()
    head.assigner = TASK_UTILS.build(cfg)
    return head


@pytest.mark.parametrize('masks', [False, True])
@pytest.mark.parametrize('boxes', [0, 1, 12])
@pytest.mark.parametrize('cfg', CONFIGS, ids=lambda cfg: cfg['type'])
def test_same_assignment_in_less_memory(cfg, boxes, masks, monkeypatch):
    if masks and cfg['type'] == 'SimOTAAssigner':
        pytest.skip('it knows no masks')
    monkeypatch.setattr(assigners, '_PIECE', 40 * 12 * 7)
    head, (predicted, gts) = model(cfg), instances(boxes, masks=masks)
    with Largest() as before:
        expected = head.assigner.assign(copy.deepcopy(predicted), copy.deepcopy(gts))
    targets_in_chunks(head)
    targets_in_chunks(head)  # twice is once
    assert type(head.assigner).__name__ == cfg['type']
    with Largest() as after:
        found = copy.deepcopy(head).assigner.assign(predicted, gts)
    for key in ('gt_inds', 'max_overlaps', 'labels'):
        assert torch.equal(getattr(found, key), getattr(expected, key)), key
    assert found.num_gts == expected.num_gts == boxes
    if boxes == 12:
        assert expected.gt_inds.max() > 0
        assert masks or after.most < 0.5 * before.most


@pytest.mark.parametrize('cfg', CONFIGS, ids=lambda cfg: cfg['type'])
def test_no_prior_in_a_box(cfg, monkeypatch):
    monkeypatch.setattr(assigners, '_PIECE', 1)
    head, (predicted, gts) = model(cfg), instances(2)
    gts.bboxes = torch.tensor([[1e4, 1e4, 1.1e4, 1.1e4]] * 2)
    expected = head.assigner.assign(predicted, gts)
    targets_in_chunks(head)
    assert torch.equal(head.assigner.assign(predicted, gts).gt_inds, expected.gt_inds)
