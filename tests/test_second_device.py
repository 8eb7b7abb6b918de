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


# Tests of whole modules, with stock modules, inputs and running statistics beside the operations; one of each kind.
WHOLE = [
    'test_adapters_codetr.py::test_an_encoder_layer[True-True]',
    'test_adapters_conv.py::test_a_norm_on_both_paths_of_a_block[ResNet-18, training-exact]',
    'test_adapters_conv.py::test_checkpoints_around_lean_modules[exact]',
    'test_adapters_conv.py::test_modules[False-ConvModule]',
    'test_adapters_dino.py::test_dino',
    'test_adapters_encoder.py::test_a_plain_encoder_drops_tokens[DetrTransformerEncoder-0.1]',
    'test_adapters_transformer.py::test_layers[deformable decoder, dropout]',
    'test_models.py::test_swin_is_mmdets[size2-exact-{}]',
    'test_models_vit.py::test_the_plain_vit_is_torchs_encoder[1.0]',
    'test_ops_transformer.py::test_two_encoder_layers[dropout-True-4]',
    'test_residual_chain.py::test_requires_grad_changes_between_steps[False]',
]


def test_whole_modules_lie_on_the_device():
    done = on_second_device(*(TESTS / name for name in WHOLE))
    assert f'{len(WHOLE)} passed' in done.stdout and 'failed' not in done.stdout


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
