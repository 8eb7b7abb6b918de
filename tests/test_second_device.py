"""Tests with a second device find tensors that are mixed between host and device."""

import sys

import pytest
from helpers import ROOT, run

TESTS = ROOT / 'tests'


def on_second_device(*words, check=True):
    options = '-q -o addopts= -p second_device -p no:cacheprovider --tb=short'.split()
    variables = dict(SBP_TEST_DEVICE='meta', PYTHONPATH=TESTS)
    return run(sys.executable, '-m', 'pytest', *options, *words, cwd=ROOT, check=check, **variables)


@pytest.mark.parametrize(
    ('file', 'names'),
    [
        ('test_ops', 'values_and_gradients or any_shape'),
        ('test_ops_operation', 'test_operation'),
        ('test_ops_images', 'multiplying_by_zero'),
        ('test_training', 'those_of_the_definition'),
    ],
)
def test_nothing_is_mixed(file, names):
    done = on_second_device(TESTS / f'{file}.py', '-k', names)
    assert ' passed' in done.stdout and 'failed' not in done.stdout


def test_what_is_mixed_fails(tmp_path):
    """As on a GPU, only copies and indices may come from the host."""
    (tmp_path / 'test_mixed.py').write_text(
        'import torch\n'
        'x = torch.arange(3.0)\n'
        'def test_copy(): assert x.to("meta").mul(2).to("cpu").tolist() == [0, 2, 4]\n'
        'def test_index(): assert x.to("meta")[torch.tensor([2, 0])].tolist() == [2, 0]\n'
        'def test_sum(): x.to("meta") + x\n'
        'def test_select(): x.to("meta").index_select(0, torch.tensor([1]))\n'
    )
    done = on_second_device(tmp_path, check=False)
    assert '2 failed, 2 passed' in done.stdout, done.stdout
    assert 'mixes tensors of the second device' in done.stdout
