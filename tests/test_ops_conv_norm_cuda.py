"""Convolution, norm and activation in CUDA's branches, on fake tensors of a GPU."""

import itertools

import pytest
import torch
from fake_cuda import backward, simulate_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm


@pytest.mark.parametrize('norm', ['none', 'fixed', 'batch', 'group'])
@pytest.mark.parametrize('storage', ['native', 'int8'])
@pytest.mark.parametrize('dtype', [None, torch.float16])
@pytest.mark.parametrize('frozen', [False, True])
def test_what_a_gpu_would_refuse(norm, storage, dtype, frozen):
    """In CUDA's branches, in both layouts and under autocast, gradients have the device, type and shape of their
    tensors."""
    with simulate_gpu():
        for act, layout in itertools.product(('relu', 'silu'), (torch.contiguous_format, torch.channels_last)):
            x = torch.randn(2, 8, 7, 9, device='cuda').contiguous(memory_format=layout)
            leaves = dict(x=x, weight=torch.randn(8, 8, 3, 3, device='cuda'), residual=torch.randn_like(x))
            leaves |= {
                name: torch.randn(8, device='cuda') for name in ('norm_weight', 'norm_bias')[: 2 * (norm != 'none')]
            }
            leaves = {name: t.requires_grad_(not frozen or name != 'weight') for name, t in leaves.items()}
            running = {name: torch.ones(8, device='cuda') for name in ('running_mean', 'running_var')}
            settings = ConvNormSettings(
                Form(storage=storage), padding=(1, 1), norm=norm, num_groups=2, activation=Activation(act)
            )
            with torch.autocast('cuda', dtype, enabled=dtype is not None):
                out = conv_norm(settings, ConvNormTensors(**leaves, **running))
            assert out.is_cuda
            gradients = backward([out])
            for name, t in leaves.items():
                if not t.requires_grad:
                    continue
                assert gradients[t].is_cuda and gradients[t].dtype == t.dtype and gradients[t].shape == t.shape, name


@pytest.mark.parametrize('kernel', ['own', 'cudnn'])
def test_the_kernel_of_a_batch_norm_is_that_of_torch(kernel, monkeypatch):
    """The backward pass of cuDNN's batch norm gets the reserve space of its forward pass."""
    calls = []

    def choose_cudnn(z, *norm_and_settings):
        *norm, training, momentum, eps, enabled = norm_and_settings
        assert enabled and training
        return *torch.ops.aten.cudnn_batch_norm(z, *norm, True, momentum, eps), 1

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            calls.append((func.name(), args))
            return func(*args, **(kwargs or {}))

    def choose_own(z, *norm_and_settings):
        *norm, training, momentum, eps, _ = norm_and_settings
        return *torch.ops.aten.native_batch_norm(z, *norm, True, momentum, eps), z.new_empty(0, dtype=torch.uint8), 0

    monkeypatch.setattr(torch, '_batch_norm_impl_index', choose_cudnn if kernel == 'cudnn' else choose_own)
    monkeypatch.setattr(torch.backends.cudnn, 'enabled', True)
    with simulate_gpu(), Calls():
        leaves = {name: torch.randn(8, device='cuda').requires_grad_() for name in ('norm_weight', 'norm_bias')}
        leaves['x'] = torch.randn(2, 8, 7, 9, device='cuda', requires_grad=True)
        leaves['weight'] = torch.randn(8, 8, 3, 3, device='cuda', requires_grad=True)
        running = {name: torch.ones(8, device='cuda') for name in ('running_mean', 'running_var')}
        settings = ConvNormSettings(padding=(1, 1), norm='batch', activation=Activation('silu'))
        gradients = backward([conv_norm(settings, ConvNormTensors(**leaves, **running))])
        assert all(gradients[t].shape == t.shape for t in leaves.values())
    found = {name: args for name, args in calls if 'batch_norm' in name}
    if kernel == 'own':
        assert {'aten::native_batch_norm', 'aten::native_batch_norm_backward'} <= set(found)
    else:
        reserve = found['aten::cudnn_batch_norm_backward'][-1]
        assert reserve.dtype is torch.uint8 and 'aten::native_batch_norm_backward' not in found
