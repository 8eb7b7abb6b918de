"""What it costs to issue a step, counted: calls of Python, operations of torch's dispatcher, and autograd's nodes."""

import json

import pytest
import torch
from helpers import ROOT
from mmengine.registry import init_default_scope
from torch import nn

import issue_time  # isort: skip  (helpers puts research/ on the path)


# At most so many calls and operations of a step, relative to plain. Plain's own are about 5,000 and 600 in ResNet-50.
LIMITS = {
    'ResNet-50': dict(exact=(1.72, 1.51), exact_min=(1.77, 1.75), int8=(1.82, 1.79)),
    'CSPNeXt': dict(exact=(1.72, 1.27), exact_min=(1.83, 1.53), int8=(2.03, 2.36)),
    'Swin': dict(exact=(1.6, 0.88), exact_min=(4.15, 1.19), int8=(2.05, 1.4), sampled=(2.03, 1.56), sbp=(1.95, 0.95)),
    'ConvNeXt': dict(exact=(2.2, 1.13), int8=(2.82, 1.42), sampled=(2.84, 2.12), sbp=(2.57, 1.34)),
    "DINO's encoder": dict(exact=(1.66, 1.15), int8=(1.78, 1.39), sampled=(1.76, 1.3)),
}


def count_calls(name, preset):
    model, (_, run) = issue_time.build(name, preset), issue_time.models()[name]
    return issue_time.counts(lambda: (model.zero_grad(), run(model))[1])


@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='torch 2.3 and older are issued by other calls')
@pytest.mark.parametrize('name', LIMITS)
def test_counts_of_a_step(name):
    init_default_scope('mmdet')
    plain = count_calls(name, 'none')
    for preset, limits in LIMITS[name].items():
        counts = count_calls(name, preset)
        relative = [counts[key] / plain[key] for key in ('calls', 'operations')]
        assert relative[0] <= limits[0] and relative[1] <= limits[1], (preset, relative)
        assert counts['nodes'] <= plain['nodes'], preset


def test_what_is_counted():
    """A product and its backward pass are counted; two of their operations are transposed views."""
    layer = nn.Linear(2, 3, bias=False)
    x = torch.ones(1, 2)
    counts = issue_time.counts(lambda: (layer.zero_grad(), layer(x).sum())[1])
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
