"""What a GPU would refuse, found without one: devices, data types and shapes of every preset in CUDA's branches."""

import pytest
import torch
from fake_cuda import backward, fake_backbone, gpu_that_is_not_there

from sbp_mmdet.settings import PRESETS

PRECISIONS = {'fp32': None, 'fp16': torch.float16, 'bf16': torch.bfloat16}
LAYOUTS = {'nchw': torch.contiguous_format, 'nhwc': torch.channels_last}


@pytest.fixture(scope='module')
def mode():
    with gpu_that_is_not_there() as mode:
        yield mode


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('preset', PRESETS)
def test_every_preset_on_a_gpu(preset, precision, layout, mode):
    """Forward and backward pass of the backbone, images of odd sizes."""
    dtype, size = PRECISIONS[precision], (75, 101)
    backbone = fake_backbone(mode, **PRESETS[preset].arguments())
    x = torch.empty(2, 3, *size, device='cuda').to(memory_format=LAYOUTS[layout])
    with torch.autocast('cuda', dtype, enabled=dtype is not None):
        outs = backbone(x)
    assert [out.shape[2:] for out in outs] == [torch.Size(s) for s in backbone.stage_sizes(*size)]
    assert all(out.is_cuda and out.dtype == torch.float32 for out in outs)
    found = backward(outs)
    assert set(found) == set(backbone.parameters())
    assert all(grad.dtype == torch.float32 and grad.is_cuda for grad in found.values())


def test_what_a_gpu_would_refuse_is_refused(mode):
    """The tests above would fail where a tensor stays on the CPU."""
    backbone = fake_backbone(mode, sbp_cfg=dict(recompute=True))
    block = backbone.stages[0][0]
    block.gamma = torch.nn.Parameter(torch.empty(8))
    with pytest.raises(RuntimeError, match='device'):
        backbone(torch.empty(2, 3, 64, 64, device='cuda'))
