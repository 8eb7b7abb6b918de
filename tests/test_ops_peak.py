"""The peak memory of operations, counted at full size with fake tensors of a GPU."""

import pytest
import torch
from fake_cuda import backward, copy_to_gpu, simulate_gpu
from ops_cases import get_fused_mlp, mlp_inputs
from oracles import DEVICE

from sbp_mmdet.ops.channel_mlp import MLPSettings, MLPTensors, channel_mlp
from sbp_mmdet.ops.channel_mlp_grn import GRNSettings, GRNTensors, grn_mlp
from sbp_mmdet.ops.common.kept_maps import KeptMap, keep
from sbp_mmdet.ops.common.precision import Stored
from sbp_mmdet.ops.common.rerun_conv import Conv, ConvSettings
from sbp_mmdet.plan.memory import LiveBytes, peak_bytes
from sbp_mmdet.stochastic_backprop.masks import positions, sample_mask

MB = 1e6
# Stage 1 of ConvNeXt-B, a batch of two images of 800 x 1344.
SHAPE = (2, 128, 200, 336)
MAP = 2 * 128 * 200 * 336


def peaks(layout, dtype):
    """Return the peaks of forward and backward pass in bytes, without the inputs and the incoming gradient."""

    def tensor(*shape, dtype=torch.float32):
        x = torch.empty(*shape, dtype=dtype, device='cuda')
        return x.to(memory_format=layout) if len(shape) == 4 else x

    c = SHAPE[1]
    rerun = Conv(
        Stored(tensor(*SHAPE, dtype=dtype)),
        *(tensor(c, 1, 7, 7), tensor(c)),
        ConvSettings((1, 1), (3, 3), (1, 1), c, dtype),
    )
    parameters = [tensor(*shape) for shape in [(c,), (c,), (4 * c, c), (4 * c,), (c, 4 * c), (c,), (c,)]]
    x, shortcut = tensor(*SHAPE, dtype=dtype).requires_grad_(), tensor(*SHAPE).requires_grad_()
    tensors = MLPTensors(x, shortcut, *(p.requires_grad_() for p in parameters), tensor(2), None, rerun)
    settings = MLPSettings(dtype=dtype)
    with LiveBytes() as forward_pass:
        out = channel_mlp(settings, tensors)
    held = forward_pass.live - out.untyped_storage().nbytes()
    with LiveBytes() as backward_pass:
        backward([out])
    return forward_pass.peak, backward_pass.peak + held, out


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last], ids=['nchw', 'nhwc'])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_exact_block(dtype, layout):
    """The peak of a ConvNeXt block's backward pass is less than 60 % of the 576 MB of an earlier version.

    The output in fp32 and the gradients of shortcut and input are 172 MB of it.
    """
    with simulate_gpu():
        *found, out = peaks(layout, dtype)
    assert out.dtype == torch.float32
    # Forwards the output and a chunk; backwards the gradient that comes in, the map and a chunk.
    chunk = 4 * MAP  # one image's hidden layer; backwards it and its gradient exist, and four maps of an image
    assert found[0] < 4 * MAP + chunk + 55 * MB, [f / MB for f in found]
    assert found[1] < 4 * MAP + 2 * MAP + 2 * chunk + 72 * MB < 576 * MB * 0.6, [f / MB for f in found]


@pytest.mark.parametrize(('ratio', 'in_chunks', 'most'), [(1, False, 10.1), (1, True, 8.2), (4, True, 15.3)])
def test_the_hidden_layer_of_grn_is_freed(ratio, in_chunks, most):
    """A chunk's hidden layer, its gradients and their products are freed as soon as they were used.

    The bound is the peak in maps of half precision; anything that is kept longer exceeds it by a part of a map or more.
    """
    n, c, side = 2, 64, 64
    d, positions_of_image = ratio * c, side * side
    with simulate_gpu():
        x, *given = (
            torch.empty(*shape, device='cuda', requires_grad=True)
            for shape in [(n, c, side, side), (c,), (c,), (d, c), (d,), (d,), (d,), (c, d), (c,)]
        )
        settings = GRNSettings(dtype=torch.bfloat16, chunk=positions_of_image * d if in_chunks else None)
        out = grn_mlp(settings, GRNTensors(x, x, *given))
        with LiveBytes() as counter:
            backward([out])
    assert counter.peak < most * x.numel() * 2


@pytest.mark.skipif(DEVICE != 'cpu', reason='bytes are counted on a CPU')
def test_hidden_rows_are_those_of_a_chunk():
    """The part of the hidden layer that exists at a time is bounded by a chunk."""
    tensors, _ = mlp_inputs(n=1, c=8, d=64, height=32, width=32, dtype=torch.float32)
    keep = positions(sample_mask(32, 32, 0.5, 'random', torch.Generator().manual_seed(0)))
    chunk = 32 * 64
    out = get_fused_mlp(keep, chunk=chunk)(**{name: t.requires_grad_() for name, t in tensors.items()})
    peak = peak_bytes(lambda: out.sum().backward())
    # Maps and weight gradients of this size, and a few chunks.
    assert peak < 8 * out.numel() * 4 + 6 * 64 * 8 * 4 + 5 * chunk * 4


@pytest.mark.parametrize('gpu', [False, True])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_eight_bits_are_read_without_a_copy_in_full_precision(layout, gpu):
    """A map in half precision is the only large tensor that is made, and right; on a GPU it takes one pass."""
    x = torch.randn(2, 64, 96, 128).to(memory_format=layout)
    kept = keep(x, 'int8')
    scale, shift = (torch.rand(1, 64, 1, 1) + 0.5 for _ in range(2))
    for map in (kept, kept._replace(scale=scale, shift=shift), KeptMap(x.bfloat16(), scale=scale, shift=shift)):
        unit, base = (torch.ones(1), torch.zeros(1)) if map.unit is None else (map.unit, map.base)
        rows = map.values.shape[2] // (unit.shape[2] if unit.dim() == 4 else 1)
        spread = [n.double().repeat_interleave(rows, 2) if n.dim() == 4 and n.shape[2] > 1 else n for n in (unit, base)]
        exact = map.values.double() * spread[0] + spread[1]
        exact = exact if map.scale is None else exact * scale + shift
        half = x.numel() * 2
        if gpu:
            with simulate_gpu() as mode:
                fake = [None if n is None else copy_to_gpu(mode, dict(n=n))['n'] for n in map[:5]]
                with LiveBytes() as counter:
                    out = KeptMap(*fake).before_activation(torch.bfloat16)
                assert out.is_cuda and counter.peak < 1.1 * half
        else:
            with LiveBytes() as counter:
                out = map.before_activation(torch.bfloat16)
            assert counter.peak < 1.1 * half + 3 * 4 * 2**19
            error = (out.double() - exact).abs().amax() / exact.abs().amax()
            assert error < 2**-8
        assert out.dtype is torch.bfloat16 and out.is_contiguous(memory_format=layout)
