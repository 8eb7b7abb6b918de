"""Verification finds a wrong line in each operation, and the training goes on with the own code."""

import copy

import pytest
import torch
from helpers import FP16, needs_fp16
from planted_faults import FAULTS, IN_HALF, plant
from verify_models import apply_and_get_log, assert_plain_training, build_in_training

from sbp_mmdet.ops import residual_layer
from sbp_mmdet.ops.common import folded_convolution, layouts
from sbp_mmdet.verify import parts_of_inputs
from sbp_mmdet.verify.eight_bits import check_eight_bits
from sbp_mmdet.verify.random_parts import Disagreement

VERIFIES = True


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    for size in layouts.CHUNK:
        monkeypatch.setitem(layouts.CHUNK, size, 2**13)


FIRST = {(fault.where.partition(':')[0], fault.model): name for name, fault in reversed(FAULTS.items())}


@pytest.mark.parametrize(
    ('name', 'least'),
    [
        *(pytest.param(name, 2**22, id=f'{name}-whole') for name in FAULTS),
        # One of each file and model: which rows are compared does not depend on the line.
        *(pytest.param(name, 2**13, id=f'{name}-part') for name in FIRST.values()),
    ],
)
def test_a_wrong_line(name, least, monkeypatch, caplog):
    """Gradients are compared on the whole input, or on the first rows of a large one."""
    monkeypatch.setitem(parts_of_inputs._LEAST, 'cpu', least)
    fault = FAULTS[name]
    model = build_in_training(fault.model)
    plain = copy.deepcopy(model)
    plant(monkeypatch, fault)
    report, records = apply_and_get_log(model, caplog, preset=fault.preset)
    assert_plain_training(model, plain, report, records, tolerance=0.06 if fault.preset == 'int8' else 2e-3)


@pytest.mark.parametrize(
    ('name', 'amp'),
    [
        pytest.param('fixed norm: gradient', torch.float16, marks=needs_fp16),
        ('chain: gradient of the shortcut', torch.bfloat16),
        ('windows: folded scale', torch.bfloat16),
        pytest.param('windows: folded scale', torch.float16, marks=needs_fp16),
        ('GRN: bias', torch.bfloat16),
        pytest.param('GRN: bias', torch.float16, marks=needs_fp16),
        ('FFN: activation', torch.bfloat16),
        pytest.param('FFN: activation', torch.float16, marks=needs_fp16),
    ],
    ids=str,
)
def test_a_wrong_line_in_half_precision(name, amp, monkeypatch, caplog):
    """Rounding flips ReLUs, which hides a small error, so both sides are also compared in full precision."""
    fault = (FAULTS | IN_HALF)[name]
    model = build_in_training(fault.model)
    plain = copy.deepcopy(model)
    plant(monkeypatch, fault)
    assert_plain_training(model, plain, *apply_and_get_log(model, caplog, amp=amp))


@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16], ids=str)
def test_a_wrong_line_of_half_precision_alone(dtype, monkeypatch, caplog):
    """The comparison in full precision misses it, but the norm of gradients shows it, which flipped ReLUs hardly
    change."""
    original = folded_convolution.convolve_backward

    def backward(*args):
        dx, found = original(*args)
        return (dx if dx is None or dx.dtype == torch.float32 else 1.12 * dx), found

    monkeypatch.setattr(residual_layer, 'convolve_backward', backward)
    _, records = apply_and_get_log(build_in_training('ResNet'), caplog, amp=dtype)
    assert any(r.levelname == 'WARNING' and 'off' in r.message for r in records)


@pytest.mark.parametrize('shape', [(2, 2048, 4, 4), (2, 512, 5, 4), (1, 64, 40, 40)], ids=str)
def test_eight_bits_of_maps_with_few_positions(shape, monkeypatch):
    """In a channel of few positions, values at the end of the last step are common and do not indicate a fault."""
    x = torch.randn(shape)
    check_eight_bits(x)
    plant(monkeypatch, FAULTS['int8 map: end of the step'])
    with pytest.raises(Disagreement, match='int8 output of a ReLU: 1.00 steps off'):
        check_eight_bits(x)
