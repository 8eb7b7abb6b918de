"""Models with every preset run in the branches of CUDA with fake tensors: devices, data types and shapes agree."""

import pytest
import torch
from cases import FAMILIES, OWN, VIT, build
from fake_cuda import backward, move_to_gpu, simulate_gpu, unset_fake_temporarily

from sbp_mmdet.presets import PRESETS

PRECISIONS = {'fp32': None, 'fp16': torch.float16, 'bf16': torch.bfloat16}
LAYOUTS = {'nchw': torch.contiguous_format, 'nhwc': torch.channels_last}


# As few blocks as a preset can treat in each way: thinned and exact ones, and downsampling layers of both kinds.
_CONVNEXT = dict(arch=dict(depths=[1, 1, 1], channels=[8, 12, 16]), out_indices=[0, 1, 2])
_SWIN = dict(depths=(2, 1, 1), num_heads=(1, 2, 2), strides=(4, 2, 2), out_indices=(0, 1, 2))
SIZES = {
    'SBPConvNeXt': _CONVNEXT,
    'stock ConvNeXt': _CONVNEXT,
    'SBPSwinTransformer': _SWIN,
    'stock Swin': _SWIN,
    'SBPViT': dict(arch=VIT['arch'] | dict(num_layers=2)),
}


@pytest.fixture(scope='module')
def mode():
    with simulate_gpu() as mode:
        yield mode


def on_gpu(mode, family, sbp_cfg, **options):
    with unset_fake_temporarily():
        model = build(family, sbp_cfg, dtype=torch.float32, **SIZES.get(family, {}), **options)
    move_to_gpu(mode, model)
    return model


# All presets in fp16, whose range needs most care. Other precisions with a preset each, and channels last with those
# that store all positions and that drop some: test_fake_cuda_ops.py runs each operation in each of them. The package's
# own classes have the operations of the stock ones. Checkpointing is torch's own, and slow here, so one family has it.
CASES = [
    *((family, preset, 'fp16', 'nchw') for family in OWN for preset in PRESETS if preset != 'with_cp'),
    *((family, preset, 'fp16', 'nchw') for family in FAMILIES if family not in OWN for preset in ('exact_min', 'sbp')),
    *(('SBPConvNeXt', preset, 'fp16', 'nhwc') for preset in ('exact', 'int8', 'sbp')),
    ('stock ConvNeXt', 'exact_min', 'fp16', 'nhwc'),
    ('SBPConvNeXt', 'with_cp', 'fp16', 'nchw'),
    ('SBPConvNeXt', 'exact', 'fp32', 'nhwc'),
    ('SBPSwinTransformer', 'int8', 'bf16', 'nchw'),
    ('SBPConvNeXt', 'sampled', 'fp32', 'nhwc'),
    ('SBPSwinTransformer', 'sampled', 'fp32', 'nchw'),
    ('SBPViT', 'exact', 'fp32', 'nchw'),
    ('SBPViT', 'sbp', 'bf16', 'nchw'),
]


@pytest.mark.parametrize(('family', 'preset', 'precision', 'layout'), CASES)
def test_every_preset_on_a_gpu(family, preset, precision, layout, mode):
    """The backbone runs forward and backward on images of odd sizes, with stochastic depth."""
    dtype = PRECISIONS[precision]
    model = on_gpu(mode, family, dict(preset=preset), drop_path_rate=0.5)
    x = torch.empty(2, 3, 75, 101, device='cuda').to(memory_format=LAYOUTS[layout])
    with torch.autocast('cuda', dtype, enabled=dtype is not None):
        outs = model(x)
    assert all(out.is_cuda for out in outs)
    gradients = backward(list(outs))
    assert set(gradients) == set(model.parameters())
    assert all(grad.dtype == torch.float32 and grad.is_cuda for grad in gradients.values())


def test_what_a_gpu_would_refuse_is_refused(mode):
    """The tests above would fail if a tensor stayed on the CPU."""
    model = on_gpu(mode, 'SBPConvNeXt', dict(preset='exact'))
    model.stages[0][0].gamma = torch.nn.Parameter(torch.empty(8))
    with pytest.raises(RuntimeError, match='device'):
        model(torch.empty(2, 3, 64, 64, device='cuda'))
