"""What it costs to issue a step, counted: calls of Python, operations of torch's dispatcher, and autograd's nodes."""

import functools
import json
from unittest import mock

import pytest
import torch
from helpers import ROOT
from mmengine.registry import init_default_scope
from torch import nn

import issue_time  # isort: skip  (helpers puts research/ on the path)


# At most so many calls and operations of a step, relative to plain. Plain's own are about 5,000 and 600 in ResNet-50.
LIMITS = {
    'ResNet-50': dict(exact=(1.71, 1.53), exact_min=(1.77, 1.77), int8=(1.82, 1.82)),
    'CSPNeXt': dict(exact=(1.72, 1.26), exact_min=(1.83, 1.53), int8=(2.0, 2.2)),
    'Swin': dict(exact=(1.6, 0.87), exact_min=(1.99, 1.01), int8=(1.8, 1.13), sampled=(1.99, 1.46), sbp=(1.79, 0.93)),
    'ConvNeXt': dict(exact=(2.31, 1.11), int8=(2.92, 1.38), sampled=(2.93, 1.98), sbp=(2.67, 1.31)),
    "DINO's encoder": dict(exact=(1.35, 1.15), int8=(1.47, 1.39), sampled=(1.45, 1.28)),
}


# The same under autocast, where weights are cast and norms are folded.
LIMITS_IN_HALF = {
    'ResNet-50': dict(exact=(1.74, 1.69), exact_min=(1.78, 1.92), int8=(1.85, 2.0)),
    'CSPNeXt': dict(exact=(1.86, 1.39), exact_min=(1.98, 1.7), int8=(2.2, 2.5)),
    'Swin': dict(exact=(1.9, 1.14), int8=(2.0, 1.26), sampled=(2.33, 1.77), sbp=(2.08, 1.19)),
    'ConvNeXt': dict(exact=(2.84, 1.54), int8=(3.47, 1.76), sampled=(3.5, 2.35), sbp=(3.18, 1.68)),
}


@functools.cache
def count_calls(name, preset, in_half=False, **options):
    with mock.patch.dict(issue_time._CONFIGS.get(name, {}), options):
        model, (_, run) = issue_time.build(name, preset), issue_time.models()[name]

    def step():
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=in_half):
            return run(model)

    return issue_time.count(step)


@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='torch 2.3 and older are issued by other calls')
@pytest.mark.parametrize(('name', 'in_half'), [(n, False) for n in LIMITS] + [(n, True) for n in LIMITS_IN_HALF])
def test_counts_of_a_step(name, in_half):
    init_default_scope('mmdet')
    plain = count_calls(name, 'none', in_half)
    for preset, limits in (LIMITS_IN_HALF if in_half else LIMITS)[name].items():
        counts = count_calls(name, preset, in_half)
        relative = [counts[key] / plain[key] for key in ('calls', 'operations')]
        assert relative[0] <= limits[0] and relative[1] <= limits[1], (preset, relative)
        assert counts['nodes'] <= plain['nodes'], preset


@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='torch 2.3 and older are issued by other calls')
@pytest.mark.parametrize('in_half', [False, True])
@pytest.mark.parametrize(('name', 'blocks', 'most'), [('ConvNeXt', 18, 3), ('Swin', 12, 8)])
def test_stochastic_depth_takes_few_operations(name, blocks, most, in_half):
    """Images that are kept have one factor, which the additions and products of a block take as a number."""
    init_default_scope('mmdet')
    without = count_calls(name, 'exact', in_half)
    counts = count_calls(name, 'exact', in_half, drop_path_rate=1e-9)  # no image is ever dropped
    assert counts['operations'] <= without['operations'] + most * blocks


def test_what_is_counted():
    """A product and its backward pass are counted; two of their operations are transposed views."""
    layer = nn.Linear(2, 3, bias=False)
    x = torch.ones(1, 2)
    counts = issue_time.count(lambda: (layer.zero_grad(), layer(x).sum())[1])
    # t, mm, sum; ones_like, expand, t, mm, t, detach or not.
    assert 8 <= counts['operations'] <= 12
    assert counts['nodes'] == 4  # sum, mm, t, and where the weight's gradient goes
    assert counts['calls'] > 10


ROWS = [
    dict(model='A', preset='none', seconds=0.002, operations=100, ratio=1.0, operations_ratio=1.0),
    dict(model='A', preset='exact', seconds=0.003, operations=120, ratio=1.5, operations_ratio=1.2),
    dict(model='B', preset='none', seconds=0.001, operations=10, ratio=1.0, operations_ratio=1.0),
]


def test_table_of_the_page(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- results: issue_time -->\nold\n<!-- end -->\nafter\n')
    issue_time.write(page, issue_time.table(ROWS))
    table = '| model | plain | `exact` |\n|---|---|---|\n| A | 2.0 ms (100) | 1.50 (1.20) |\n| B | 1.0 ms (10) |  |'
    assert page.read_text() == f'before\n<!-- results: issue_time -->\n{table}\n<!-- end -->\nafter\n'


def test_page_of_costs_has_the_table_of_its_file():
    rows = json.loads(issue_time.FILE.read_text())['rows']
    assert (
        f'<!-- results: issue_time -->\n{issue_time.table(rows)}\n<!-- end -->' in (ROOT / 'docs/costs.md').read_text()
    )
