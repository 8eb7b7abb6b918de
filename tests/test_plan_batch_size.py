"""The largest batch that fits is found for needs that are known."""

import json

import pytest
from mmengine.config import Config

from sbp_mmdet.plan import command
from sbp_mmdet.plan.batch_size import LARGEST, BatchRow, find_largest_batch, find_largest_batches, learning_rate
from sbp_mmdet.plan.planner import CONTEXT, MARGIN, WORKSPACES

GB = 10**9
FRCNN = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'


@pytest.mark.parametrize(
    'need',
    [
        lambda images: 2 * GB + images * GB // 3,
        lambda images: max(9 * GB, images * GB),  # the optimizer's step is the peak of small batches
        lambda images: GB + images**2 * GB // 50,
        lambda images: GB + int(images**0.8 * GB),
        lambda images: 7 * GB + (images + images % 3) * GB // 8,
    ],
)
@pytest.mark.parametrize('budget', [8, 11, 24])
def test_largest_batch(need, budget):
    asked = []

    def once(images):
        assert images not in asked
        asked.append(images)
        return need(images)

    images, said = find_largest_batch(once, budget * GB)
    if not images:
        assert need(1) > budget * GB
        return
    assert said == need(images) <= budget * GB
    assert need(images + 1) > budget * GB or images == LARGEST
    assert len(asked) <= 16


def test_where_counts_lie_on_a_line_one_image_more_is_not_counted():
    def need(images):
        return GB + images * GB // 2

    counted = {}
    assert find_largest_batch(need, 24 * GB + GB // 4, counted)[0] == 46 and max(counted) == 46
    # Another card's counts serve as well: the answer is counted, and nothing else.
    before = set(counted)
    assert find_largest_batch(need, 12 * GB + GB // 4, counted) == (22, 12 * GB)
    assert set(counted) - before == {22}


def test_a_line_is_not_extended_far():
    """A line through one and two images predicts 99, because the optimizer's step dominates both."""
    asked = []

    def need(images):
        asked.append(images)
        return max(10 * GB + images * GB // 100, images * GB)

    assert find_largest_batch(need, 11 * GB)[0] == 11
    assert asked[:3] == [1, 2, 8] and max(asked) <= 32


def test_no_more_than_anybody_asks_for():
    assert find_largest_batch(lambda images: images, GB) == (LARGEST, LARGEST)
    assert find_largest_batch(lambda images: 2, 1) == (0, 2)


def test_a_model_that_cannot_run_one_image():
    """The search goes on with more images if one raises an error, as a batch norm after a global pooling does."""

    def need(images):
        if images == 1:
            raise ValueError('Expected more than 1 value per channel when training')
        return images * GB

    assert find_largest_batch(need, 9 * GB) == (9, 9 * GB)
    assert find_largest_batch(need, GB) == (0, 2 * GB)
    with pytest.raises(ZeroDivisionError):
        find_largest_batch(lambda images: images / 0, GB)


def _config(**keys):
    return Config(
        dict(model=dict(), optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02)), **keys)
    )


def test_equal_counts_of_neighbours_do_not_lead_far_beyond_the_answer():
    counted = {}
    images, _ = find_largest_batch(lambda n: 100 * (n - (n > 45)), 4590, counted)
    assert images == 46 and max(counted) < 2 * images


def test_rows_and_lines():
    images = {'none': 2, 'exact': 1, 'none+amp': 1, 'exact+amp': 0.5, 'int8': 0.5}

    def measure(variant, number):
        peak = int(number * images[variant] * GB)
        return dict(peak=peak, capacity=peak, expandable=peak, gradients=GB, peaks={})

    budget = int(8 * GB * (1 + MARGIN) + WORKSPACES + CONTEXT)
    config = _config(auto_scale_lr=dict(base_batch_size=16))
    found = []
    rows = find_largest_batches(config, budget, measure, ('none', 'exact', 'int8'), gpus=1, found=found.append)
    assert found == rows
    assert [(row.variant, row.gradients, row.images) for row in rows] == [
        ('none', 'exact', 4),
        ('exact', 'exact', 8),
        ('int8', 'int8', 16),
        ('none+amp', 'exact, fp16', 8),
        ('exact+amp', 'exact, fp16', 16),
    ]
    assert [row.learning_rate for row in rows] == pytest.approx([0.005, 0.01, 0.02, 0.01, 0.02])
    more = find_largest_batches(config, budget + GB + GB // 10, measure, ('none',), gpus=8)
    assert more[0].images == 4 and more[0].learning_rate == pytest.approx(0.02 * 32 / 16)
    assert learning_rate(_config(), 4) is None


def test_the_command(monkeypatch, capsys):
    rows = [
        BatchRow('none', 'exact', 0, 9 * GB, None),
        BatchRow('exact_min', 'exact', 1, 5 * GB, 0.00125),
        BatchRow('int8', 'int8', 2, 6 * GB, 0.0025),
    ]
    monkeypatch.setattr(command, 'find_largest_batches', lambda *args, found, **keys: [*map(found, rows)] and rows)
    monkeypatch.setattr(command, 'list_presets', lambda base: ['none'])
    command.main(['plan', FRCNN, '--budget', '8GiB', '--batch', 'max', '--size', '800x1333', '--json'])
    printed = capsys.readouterr()
    assert 'none: not one image fits; it needs 8.38 GiB\nexact_min: 1 image in 4.66 GiB\n' in printed.err
    results = json.loads(printed.out)
    assert results['answer'] == 'exact_min' and results['rows'][2]['images'] == 2
    command.main(['plan', FRCNN, '--budget', '8GiB', '--batch', 'max', '--size', '800x1333'])
    page = capsys.readouterr().out
    assert 'none fits' in page and '0.00125' in page and 'accumulative_counts=2' in page
    assert "dict(type='LeanHook', preset='exact_min')" in page and 'batch_size=1' in page
    monkeypatch.setattr(command, 'find_largest_batches', lambda *args, **keys: rows[:1])
    with pytest.raises(SystemExit):
        command.main(['plan', FRCNN, '--budget', '8GiB', '--batch', 'max', '--size', '800x1333'])
    assert 'Not even one image fits into 8.00 GiB. Try smaller images or a smaller model.' in capsys.readouterr().out
    rows[0] = rows[0]._replace(update=int(8.6 * GB))
    with pytest.raises(SystemExit):
        command.main(['plan', FRCNN, '--budget', '8GiB', '--batch', 'max', '--size', '800x1333'])
    assert capsys.readouterr().out.endswith(
        "fits into 8.00 GiB. Weights, gradients and the optimizer's step alone need 8.01 GiB, whatever the batch. Try "
        '--cfg-options optim_wrapper.optimizer.foreach=False or a smaller model.\n'
    )


def test_the_least_of_any_batch_is_that_of_the_optimizers_step():
    def measure(variant, number):
        peaks = {'backward': number * GB, 'optimizer step': 4 * GB}
        return dict(peak=9 * GB, capacity=9 * GB, expandable=9 * GB, gradients=GB, peaks=peaks)

    for gpus, held in ((1, 4 * GB), (8, 5 * GB)):
        (row,) = find_largest_batches(_config(), GB, measure, ('none',), gpus=gpus)[:1]
        assert row.update == pytest.approx(held * (1 + MARGIN) + WORKSPACES + CONTEXT, abs=1)
