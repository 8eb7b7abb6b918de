"""Focal losses in chunks of priors have the values and gradients of their own code in fp64."""

import copy

import pytest
import torch
from mmdet.models.losses import FocalLoss, QualityFocalLoss, VarifocalLoss
from torch import nn

from sbp_mmdet.chunked_targets import targets_in_chunks
from sbp_mmdet.chunked_targets.dense_losses import losses_in_chunks
from sbp_mmdet.plan.memory import LiveBytes

NUMBER, CLASSES = 50, 4


def _labels():
    return torch.randint(0, CLASSES + 1, (NUMBER,), generator=torch.Generator().manual_seed(1))


def _soft():
    return torch.rand(NUMBER, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def _scores():
    return torch.rand(NUMBER, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


LOSSES = {
    'focal': (FocalLoss(gamma=1.5, loss_weight=2.0), _labels),
    'focal, one-hot': (FocalLoss(), lambda: _soft().round()),
    'quality': (QualityFocalLoss(loss_weight=0.5), lambda: (_labels(), _scores())),
    'quality, soft': (QualityFocalLoss(), _soft),
    'varifocal': (VarifocalLoss(), _soft),
}
# Weight, factor, reduction.
ARGUMENTS = {
    'mean with a factor': dict(avg_factor=7.0),
    'weights of priors': dict(avg_factor=torch.tensor(3.0, dtype=torch.float64), weight=_scores()),
    'sum': dict(reduction_override='sum'),
    'mean of all': {},
    'none': dict(reduction_override='none'),
}


def step(loss, target, **arguments):
    pred = torch.randn(NUMBER, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pred.requires_grad_()
    value = loss(pred, target, **arguments)
    (3 * value).sum().backward()
    return value.detach(), pred.grad


@pytest.mark.parametrize('rows', [1, 7, NUMBER])
@pytest.mark.parametrize('arguments', ARGUMENTS)
@pytest.mark.parametrize('name', LOSSES)
def test_value_and_gradient_are_those_of_the_losses_own_code(name, arguments, rows):
    own, target = LOSSES[name]
    chunked = copy.deepcopy(own)
    given = ARGUMENTS[arguments]
    if 'weight' in given and name == 'varifocal':
        given = dict(given, weight=given['weight'][:, None].expand(-1, CLASSES))
    for _ in range(2):  # twice is once
        assert losses_in_chunks(chunked, rows * CLASSES) == ['the model']
    for actual, expected in zip(step(chunked, target(), **given), step(own, target(), **given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_targets_that_need_gradients_and_no_gradients_at_all():
    own, chunked = LOSSES['varifocal'][0], copy.deepcopy(LOSSES['varifocal'][0])
    losses_in_chunks(chunked, CLASSES)
    for loss in (own, chunked):
        loss.given = _soft().requires_grad_()
        loss(torch.zeros(NUMBER, CLASSES, dtype=torch.float64, requires_grad=True), loss.given, avg_factor=2).backward()
    torch.testing.assert_close(chunked.given.grad, own.given.grad)
    with torch.no_grad():
        assert chunked(torch.zeros(NUMBER, CLASSES), _soft().float(), avg_factor=2).requires_grad is False


def test_a_loss_of_ones_own_is_left_alone():
    class Own(FocalLoss):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    head = nn.ModuleDict(dict(own=Own(), stock=FocalLoss()))
    assert 'losses in stock' in targets_in_chunks(head)


def test_half_precision_and_scaled_losses():
    """The recomputed chunks run under the same autocast, and a scaled gradient arrives before the cast."""
    own, chunked = FocalLoss(), FocalLoss()
    losses_in_chunks(chunked, 7 * CLASSES)
    results = []
    for loss in (own, chunked):
        pred = torch.randn(NUMBER, CLASSES, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        with torch.autocast('cpu', torch.bfloat16):
            value = loss(pred, _labels(), avg_factor=1e6)
        (value * 2.0**16).backward()
        results.append((value.dtype, pred.grad))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[1][1], results[0][1])


def test_maps_of_all_priors_do_not_exist_at_a_time():
    peaks = []
    for pairs in (None, 2**14):
        loss = QualityFocalLoss()
        if pairs:
            losses_in_chunks(loss, pairs)
        pred, label = torch.randn(2**14, 16).requires_grad_(), torch.randint(0, 16, (2**14,))
        with LiveBytes() as counter:
            loss(pred, (label, torch.rand(2**14)), avg_factor=9).backward()
        peaks.append(counter.peak / (4 * pred.numel()))
    assert peaks[0] > 5 and peaks[1] < 2.5


def test_a_weight_that_is_broadcast_over_all_priors_runs_the_losses_own_code():
    torch.manual_seed(0)
    pred, labels, scores = torch.randn(40, 3, dtype=torch.float64), torch.arange(40) % 4, torch.rand(40).double()
    weight = torch.rand(40, 1).double()  # times 40 losses: a matrix
    lean = nn.ModuleList([QualityFocalLoss()])
    losses_in_chunks(lean, 12)
    found = []
    for loss in (QualityFocalLoss(), lean[0]):
        x = pred.clone().requires_grad_()
        value = loss(x, (labels, scores), weight, avg_factor=7)
        value.backward()
        found.append((value.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize('name', LOSSES)
def test_settings_may_change_before_the_backward_pass(name):
    """A loss weight of each branch, as of a teacher and a student, is the one of the forward pass."""
    own, target = LOSSES[name]
    found = []
    for chunked in (False, True):
        loss = copy.deepcopy(own)
        if chunked:
            losses_in_chunks(loss, pairs=7 * CLASSES)
        pred = torch.randn(NUMBER, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        pred.requires_grad_()
        total = 0
        for weight in (1.0, 0.25):
            loss.loss_weight = weight
            total = total + loss(pred, target(), avg_factor=7.0)
        total.backward()
        assert loss.loss_weight == 0.25
        found.append(pred.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('name', LOSSES)
def test_a_weight_that_is_trained_gets_its_gradient(name, when):
    """A loss with a trained weight runs its own code, because a loss in chunks computes gradients of scores only."""
    own, target = copy.deepcopy(LOSSES[name][0]), LOSSES[name][1]
    chunked, found = copy.deepcopy(own), []
    if when == 'after':
        losses_in_chunks(chunked, CLASSES)
    for loss in (own, chunked):
        loss.loss_weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    if when == 'before':
        assert losses_in_chunks(chunked, CLASSES) == []
    for loss in (own, chunked):
        step(loss, target(), avg_factor=7.0)
        found.append(loss.loss_weight.grad)
    torch.testing.assert_close(found[1], found[0])
