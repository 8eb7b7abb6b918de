"""Tests with a second device find tensors that are mixed between host and device."""

import sys

import torch
from cases import FAMILIES, LEAN, OWN
from helpers import ROOT, run
from torch.utils.checkpoint import checkpoint

TESTS = ROOT / 'tests'


def _checkpoints_on_meta():
    """Return whether torch's checkpoints run on the meta device: those of torch 2.1 do not."""
    try:
        checkpoint(torch.sin, torch.ones(1, device='meta', requires_grad=True), use_reentrant=False)
    except AttributeError:
        return False
    return True


# One test of each kind, first those of operations: stock models are changed into the same ones.
TRAINED = [(family, preset) for family in FAMILIES for preset in (LEAN if family in OWN else ['sbp'])]
NAMES = [
    'test_ops.py::test_values_and_gradients',
    'test_ops.py::test_mlp_of_any_shape',
    'test_ops.py::test_downsample_of_any_shape',
    'test_ops_operation.py::test_operation',
    'test_ops_images.py::test_gradients_are_those_of_multiplying_by_zero',
    *(f'test_training.py::test_gradients_are_those_of_the_definition[odd-{p}-{f}]' for f, p in TRAINED),
    # Whole modules, with stock modules, inputs and running statistics beside the operations.
    'test_adapters_codetr.py::test_an_encoder_layer[True-True]',
    'test_adapters_conv.py::test_a_norm_on_both_paths_of_a_block[ResNet-18, training-exact]',
    *(['test_adapters_conv.py::test_checkpoints_around_lean_modules[exact]'] if _checkpoints_on_meta() else []),
    'test_adapters_conv.py::test_modules[False-ConvModule]',
    'test_adapters_dino.py::test_dino',
    'test_adapters_encoder.py::test_a_plain_encoder_drops_tokens[DetrTransformerEncoder-0.1]',
    'test_adapters_transformer.py::test_layers[deformable decoder, dropout]',
    'test_models.py::test_swin_is_mmdets[size2-exact-{}]',
    'test_models_vit.py::test_the_plain_vit_is_torchs_encoder[1.0]',
    'test_ops_transformer.py::test_two_encoder_layers[dropout-True-4]',
    'test_residual_chain.py::test_requires_grad_changes_between_steps[False]',
]
# As on a GPU, only copies and indices may come from the host.
MIXED = """
import torch
x = torch.arange(3.0)
def test_copy(): assert x.to("meta").mul(2).to("cpu").tolist() == [0, 2, 4]
def test_index(): assert x.to("meta")[torch.tensor([2, 0])].tolist() == [2, 0]
def test_sum(): x.to("meta") + x
def test_select(): x.to("meta").index_select(0, torch.tensor([1]))
"""


def test_only_what_is_mixed_fails(tmp_path):
    """One process runs all of these tests, beside two that mix tensors."""
    (tmp_path / 'test_mixed.py').write_text(MIXED)
    options = f'-q -rA -c {ROOT}/pyproject.toml --rootdir {ROOT} -o addopts= -p second_device -p no:cacheprovider'
    words = [*options.split(), '--tb=short', *(TESTS / name for name in NAMES), tmp_path]
    done = run(sys.executable, '-m', 'pytest', *words, cwd=ROOT, check=False, SBP_TEST_DEVICE='meta', PYTHONPATH=TESTS)
    outcomes = [line.split(' ', 1) for line in done.stdout.splitlines()]
    passed = [line[1] for line in outcomes if line[0] == 'PASSED']
    failed = [line[1] for line in outcomes if line[0] in ('FAILED', 'ERROR')]
    assert sorted(name.partition(' - ')[0].rpartition('_')[2] for name in failed) == ['select', 'sum'], failed
    errors = [line for line in done.stdout.splitlines() if line.startswith('E  ')]
    assert ['mixes tensors of the second device' in line for line in errors] == [True, True], errors
    skipped = ' '.join(line[1] for line in outcomes if line[0] == 'SKIPPED')  # by their files; DINO of mmdet 3.3
    missing = [name for name in NAMES if not any(name in there for there in passed)]
    assert all(f'{name.partition("::")[0]}:' in skipped for name in missing), (missing, done.stdout[-3000:])
    assert sum('test_mixed' in name for name in passed) == 2
