"""Kernels of CUDA that are called by name: what they refuse, and builds of torch that lack them."""

import functools

import pytest
import torch
from fake_cuda import simulate_gpu
from mmcv.ops import multi_scale_deform_attn

from sbp_mmdet.ops import deformable_attention as deformable
from sbp_mmdet.ops.common import flash, precision

NAMES = dict(flash='_scaled_dot_product_flash_attention', efficient='_scaled_dot_product_efficient_attention')


@pytest.mark.parametrize(
    'missing, dtype, kernel',
    [
        ([], torch.float16, 'flash'),
        (['flash'], torch.bfloat16, 'efficient'),
        (['flash', 'efficient'], torch.float16, 'plain'),
        (['efficient'], torch.float32, 'plain'),
    ],
)
def test_kernels_that_a_build_lacks_are_not_called(missing, dtype, kernel, monkeypatch):
    def refuse(*args):
        raise RuntimeError('USE_FLASH_ATTENTION was not enabled for build.')

    monkeypatch.setattr(flash, '_ampere', lambda index: True)
    for name in missing:
        monkeypatch.setattr(torch.ops.aten, NAMES[name], refuse)
    with simulate_gpu():
        q = torch.empty(2, 50, 3, 64, dtype=dtype, device='cuda').transpose(1, 2)
        assert flash._kernel(q) == kernel
        out, lse = flash.attend(q, q, q)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        gradients = flash.attend_backward(out, q, q, q, out, lse)
        assert [part.shape for part in gradients] == [q.shape] * 3


def test_a_full_memory_is_no_answer_to_what_kernels_exist(monkeypatch):
    """Another answer later would round the gradients of the same step otherwise."""

    def refuse(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    with simulate_gpu():
        monkeypatch.setattr(torch, 'mm', refuse)
        monkeypatch.setattr(torch.ops.aten, NAMES['flash'], refuse)
        for ask in (precision._sums_in_full, functools.partial(flash._is_built, 'flash')):
            arguments = dict(device=torch.device('cuda', 0), dtype=torch.float16)
            with pytest.raises(torch.cuda.OutOfMemoryError):
                ask(**arguments)
        monkeypatch.undo()
        assert flash._is_built('flash', **arguments)


class _Kernel:
    """mmcv's kernel, which takes some images at a time, all equally many."""

    images = ()

    @classmethod
    def _take(cls, value, step):
        step = min(len(value), step)
        assert len(value) % step == 0, f'batch({len(value)}) must divide im2col_step({step})'
        cls.images = *cls.images, len(value)

    @classmethod
    def ms_deform_attn_forward(cls, value, shapes, starts, places, weights, im2col_step):
        cls._take(value, im2col_step)
        return value.new_empty(*places.shape[:2], value.shape[2] * value.shape[3])

    @classmethod
    def ms_deform_attn_backward(cls, value, *_, im2col_step):
        cls._take(value, im2col_step)


@pytest.mark.parametrize('step, images', [(4, [4, 4]), (2, [4, 4]), (3, [3, 3]), (1, [5, 3]), (64, [5, 3])])
def test_parts_of_a_batch_are_multiples_of_the_step(step, images, monkeypatch):
    tokens, width, batch = 6, 8, sum(images)
    monkeypatch.setattr(multi_scale_deform_attn, 'ext_module', _Kernel)
    monkeypatch.setattr(_Kernel, 'images', ())
    monkeypatch.setattr(deformable, 'has_kernel', lambda value: True)
    monkeypatch.setattr(deformable, '_AT_A_TIME', 5 * tokens * width)  # five images, where the step permits
    layers = []
    for outputs in (2 * 2 * 2, 2 * 2, width, width):  # of offsets, weights, values and the output
        layers += [torch.randn(outputs, width, requires_grad=True), torch.randn(outputs, requires_grad=True)]
    x = torch.randn(batch, tokens, width, requires_grad=True)
    shapes, starts = torch.tensor([[2, 3]]), torch.tensor([0])
    given = deformable.DeformableTensors(x, None, x, torch.rand(batch, tokens, 1, 2), None, shapes, starts, *layers)
    settings = deformable.DeformableSettings(num_heads=2, num_levels=1, num_points=2, im2col_step=step)
    deformable.deformable_attention(settings, given).sum().backward()
    assert _Kernel.images == (batch, *images)
