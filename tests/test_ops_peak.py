"""The most that an operation holds at a time, counted at full size on a GPU that is not there."""

import pytest
import torch
from fake_cuda import backward, gpu_that_is_not_there

from sbp_mmdet import ops
from sbp_mmdet.ops.precision import Stored
from sbp_mmdet.plan.memory import LiveBytes

MB = 1e6
# Stage 1 of ConvNeXt-B, a batch of two images of 800 x 1344.
SHAPE = (2, 128, 200, 336)
MAP = 2 * 128 * 200 * 336


def peaks(layout, dtype):
    """Bytes above the inputs, the gradient that comes in among them: of the forward and of the backward pass."""

    def tensor(*shape, dtype=torch.float32):
        x = torch.empty(*shape, dtype=dtype, device='cuda')
        return x.to(memory_format=layout) if len(shape) == 4 else x

    c = SHAPE[1]
    rerun = ops.Conv(
        Stored(tensor(*SHAPE, dtype=dtype)),
        *(tensor(c, 1, 7, 7), tensor(c)),
        ops.ConvSettings((1, 1), (3, 3), (1, 1), c, dtype),
    )
    parameters = [tensor(*shape) for shape in [(c,), (c,), (4 * c, c), (4 * c,), (c, 4 * c), (c,), (c,)]]
    x, shortcut = tensor(*SHAPE, dtype=dtype).requires_grad_(), tensor(*SHAPE).requires_grad_()
    tensors = ops.MLPTensors(x, shortcut, *(p.requires_grad_() for p in parameters), tensor(2), None, rerun)
    settings = ops.MLPSettings(dtype=dtype)
    with LiveBytes() as forward_pass:
        out = ops.channel_mlp(settings, tensors)
    held = forward_pass.live - out.untyped_storage().nbytes()
    with LiveBytes() as backward_pass:
        backward([out])
    return forward_pass.peak, backward_pass.peak + held, out


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last], ids=['nchw', 'nhwc'])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_exact_block(dtype, layout):
    """Once 576 MB, of which the output in fp32 and the gradients of shortcut and input are 172."""
    with gpu_that_is_not_there():
        *found, out = peaks(layout, dtype)
    assert out.dtype == torch.float32
    # Forwards the output and a chunk; backwards the gradient that comes in, the map and a chunk.
    assert found[0] < 4 * MAP + 60 * MB and found[1] < 4 * MAP + 2 * MAP + 80 * MB, [f / MB for f in found]
    assert max(found) < 576 * MB / 2
