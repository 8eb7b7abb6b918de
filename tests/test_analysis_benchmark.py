"""The block benchmark against bytes worked out by hand, and the tables that are made from it."""

import json
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run
from torch import nn

from sbp_mmdet.analysis import peak_bytes
from sbp_mmdet.analysis.benchmark import build_unit, measure
from sbp_mmdet.families import FAMILIES
from sbp_mmdet.settings import preset_named
from sbp_mmdet.study.gradients import gradient_errors

ROOT = Path(__file__).parents[1]
FLOAT = 4
SHAPE = (1, 40, 16, 16)  # stage 1 of atto


CONVNEXT = FAMILIES['ConvNeXt']


def unit_of(unit, preset, **options):
    return build_unit(CONVNEXT, unit, 'atto', preset, 0, SHAPE, 'cpu', **options)


def bytes_of(unit, preset, **options):
    rows = dict(measure({preset: unit_of(unit, preset, **options)}, SHAPE, device='cpu', dtype=None, rounds=0))
    return rows[preset]['saved_bytes']


def test_shape_of_a_stage():
    assert CONVNEXT.stage_shape('tiny', 0, 2, 800, 1344) == (2, 96, 200, 336)
    assert CONVNEXT.stage_shape('base', 3, 1, 800, 1333) == (1, 1024, 25, 41)


def test_fused_mlp_stores_what_the_design_says():
    positions, c = 16 * 16, 40
    index = positions // 2 * 8
    kept = positions // 2 * (c + 1) * FLOAT + index  # x-hat, reciprocal deviation, int64 indices
    assert bytes_of('mlp', 'recompute') == kept
    assert bytes_of('mlp', 'fused') == kept + positions // 2 * 4 * c * FLOAT
    assert bytes_of('mlp', 'exact') == positions * (c + 1) * FLOAT
    assert bytes_of('mlp', 'recompute', keep_ratio=0.25) == (kept - index) // 2 + index // 2


def test_a_block_that_is_recomputed_stores_its_input_only():
    index, entries = 16 * 16 // 2 * 8, 16 * 16 * 40
    assert bytes_of('block', 'block') == index + entries * FLOAT
    assert bytes_of('block', 'exact-block') == entries * FLOAT
    assert bytes_of('block', 'with_cp') == entries * FLOAT
    assert bytes_of('block', 'int8-block') == entries + 40 * FLOAT  # a scale for each channel


def test_int8_stores_a_byte_for_what_is_native_otherwise():
    entries, deviations, scales = 16 * 16 * 40, 16 * 16 * FLOAT, 40 * FLOAT
    assert bytes_of('block', 'exact') == 2 * entries * FLOAT + deviations
    assert bytes_of('block', 'int8') == 2 * (entries + scales) + deviations


def test_gradient_errors():
    """Relative to the first preset: nothing for what is exact, something for the rest; dropping is worse."""
    units = {name: unit_of('block', name) for name in ('none', 'with_cp', 'exact', 'nearest', 'fused')}
    rows = dict(gradient_errors(units, SHAPE, device='cpu', dtype=None))
    assert rows['none']['relative_error'] == rows['with_cp']['relative_error'] == 0
    assert rows['exact']['relative_error'] < 1e-4
    assert 0.001 < rows['nearest']['relative_error'] < 0.5 * rows['fused']['relative_error']
    assert rows['nearest']['cosine'] > rows['fused']['cosine']


def test_rows_of_a_timed_run():
    units = {name: unit_of('block', name) for name in ('none', 'fused')}
    steps = list(measure(units, SHAPE, device='cpu', dtype=torch.bfloat16, rounds=2))
    assert [name for name, _ in steps] == ['progress'] * (2 * (1 + 3)) + ['none', 'fused']
    rows = dict(steps)
    assert rows['none']['total_ratio'] == 1.0
    assert rows['fused']['peak_bytes'] < rows['none']['peak_bytes']
    assert rows['fused']['forward_s'] > 0


def test_a_preset_that_cannot_be_is_named():
    with pytest.raises(ValueError, match="'fast' is unknown.*with_cp"):
        preset_named('fast')
    with pytest.raises(ValueError, match="'exact-block' does not apply to the mlp of ConvNeXt"):
        unit_of('mlp', 'exact-block')


def test_peak_counts_what_lives_at_the_same_time():
    x = torch.zeros(1000)

    def run():
        for _ in range(3):
            y = x + 1
            y = y * 2  # two at a time, never six
            y.add_(1)  # in place: nothing new
        del y

    assert peak_bytes(run) == 2 * 1000 * FLOAT


def test_peak_of_a_training_step():
    layer = nn.Linear(30, 20, bias=False)
    x = torch.zeros(7, 30)
    scalar, weight = 1, 20 * 30
    # At the end: the sum, its gradient and the weight's. Nothing needs the output, whose gradient is expanded.
    assert peak_bytes(lambda: layer(x).sum().backward()) == (2 * scalar + weight) * FLOAT


def test_command_and_tables(tmp_path):
    results = tmp_path / 'results.json'
    command = [sys.executable, ROOT / 'tools/analysis_tools/benchmark_block.py', '--arch', 'atto', '--stage', '1', '4']
    command += ['--size', '64', '64', '--rounds', '1', '--presets', 'none', 'recompute', '--json', results]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert 'block of atto stage 4, 2 x 320 x 2 x 2' in output
    written = json.loads(results.read_text())
    assert [row['preset'] for row in written['rows']] == ['none', 'recompute'] * 2
    assert written['machine']['torch'] == torch.__version__

    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- table: results.json -->\nstale figures\n<!-- end -->\nafter\n')
    update = runpy.run_path(str(ROOT / 'tools/analysis_tools/update_tables.py'))
    assert 'recompute' in update['table'](written)
    subprocess.run([sys.executable, ROOT / 'tools/analysis_tools/update_tables.py', page], check=True)
    text = page.read_text()
    assert (
        text.startswith('before\n<!-- table') and text.endswith('<!-- end -->\nafter\n') and 'stale figures' not in text
    )
    assert f'| `none` | {written["rows"][0]["saved_bytes"] / 1e6:.0f} MB | 1.000 |' in text


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='about glibc')
@pytest.mark.parametrize('keeps', [True, False])
def test_freed_memory_is_kept(keeps, tmp_path):
    """In a process of its own: pages that stay when 200 MB at the end of the heap are freed, as the kernel sees it."""
    lines = [
        'import ctypes',
        'from sbp_mmdet.analysis.benchmark import keep_freed_memory',
        'def pages(): return int(open("/proc/self/statm").read().split()[1])',
        'keep_freed_memory()' if keeps else '',
        'libc, size = ctypes.CDLL(None), ctypes.c_size_t(200_000_000)',
        'libc.malloc.restype = ctypes.c_void_p',
        'before = pages()',
        'block = ctypes.c_void_p(libc.malloc(size))',
        'ctypes.memset(block, 1, size.value)',
        'libc.free(block)',
        'print((pages() - before) * 4096)',
    ]
    left = int(run(sys.executable, '-c', '\n'.join(lines), cwd=tmp_path, PYTHONPATH=ROOT).stdout.split()[-1])
    assert (left > 150e6) == keeps
