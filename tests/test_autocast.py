"""Convolutions and layers of transformer detectors train under autocast, on the device of the tests and on a fake
GPU.
"""

import copy
import functools

import conv_models as conv
import pytest
import test_adapters_dino as detectors
import test_adapters_transformer as transformer
import torch
from fake_cuda import backward, copy_to_gpu, move_to_gpu, simulate_gpu, unset_fake_temporarily
from helpers import needs_fp16
from mmdet.models.backbones import ResNet
from mmdet.registry import MODELS
from oracles import DEVICE
from torch import Tensor, nn

from sbp_mmdet import apply_lean

BACKBONES = ['ResNet-18, training', 'ResNet-50', 'ResNet-50, GN', 'ResNeXt-50', 'HRNet', 'Res2Net']
BACKBONES += ['CSPNeXt', 'CSPNeXt, GN']
DTYPES = dict(fp16=torch.float16, bf16=torch.bfloat16)
LAYERS = ['FFN', 'attention', 'Mask2Former decoder']
KERNELS = ['deformable encoder', 'deformable decoder', 'Grounding DINO decoder', 'Mask2Former']  # mmcv's, none fake
# Each model with a preset in a precision; one model of each operation with both presets in both.
BOTH = ['ResNet-18, training', 'ResNet-50', 'ResNet-50, GN', *LAYERS, 'deformable encoder']
CASES = [
    *((name, *pair) for name in BACKBONES + LAYERS + KERNELS for pair in (('exact', 'fp16'), ('int8', 'bf16'))),
    *((name, *pair) for name in BOTH for pair in (('exact', 'bf16'), ('int8', 'fp16'))),
]
KIND = 'cuda' if DEVICE == 'cuda' else 'cpu'


def build_with_inputs(name, seed=0):
    """Return a plain module in fp32 with random parameters, and its inputs."""
    torch.manual_seed(seed)
    if name in BACKBONES:
        size = 64 if name == 'HRNet' else 48
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))
        config = conv.BACKBONES[name][0]
        if issubclass(MODELS.get(config['type']), ResNet):  # two of its four like stages
            config = config | dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
        norm_eval = dict(norm_eval=True) if name == 'Res2Net' else {}  # in training mode fp16 overflows, plain as well
        return conv.build_module(config | norm_eval).float(), dict(x=images)
    if name == 'Mask2Former':
        return remove_kinks(detectors.Mask2Former()).train(), detectors.maps()
    module, inputs = (make() for make in transformer.LAYERS[name])
    ordinary = transformer.randomize(module).float()
    return remove_kinks(ordinary), {key: transformer._float(value) for key, value in inputs.items()}


def remove_kinks(module):
    """Replace ReLUs and remove dropout.

    With so few tokens, one flipped ReLU would change the gradient by 5 %, and dropout draws other numbers in fp64.
    """
    for m in module.modules():
        for name, child in m.named_children():
            if isinstance(child, nn.ReLU):
                setattr(m, name, nn.GELU())
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    return module


def run_module(module, inputs):
    out = module(**inputs)
    return [o for o in (out if isinstance(out, tuple | list) else [out]) if o.requires_grad]  # not of frozen stages


def run_step(module, inputs, dtype):
    """Return the gradients of all parameters as one vector, and the outputs likewise, in fp64."""
    with torch.autocast(KIND, dtype, enabled=dtype is not None):
        outs = run_module(module, inputs)
    # The mean of squares would not do, because after a norm it is the same for all inputs.
    loss = sum((o * torch.linspace(-1, 1, o.numel()).view(o.shape).to(o)).sum() for o in outs)
    module.zero_grad()
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [torch.cat([x.detach().double().flatten() for x in found]) for found in (grads, outs)]


def build_on_device(name, seed):
    """Return the module and its inputs on the device of the tests."""
    module, inputs = build_with_inputs(name, seed)
    inputs = {key: x.detach().to(DEVICE) if isinstance(x, Tensor) else x for key, x in inputs.items()}
    return module.to(DEVICE), inputs


@functools.cache
def compute_truth(name, seed):
    """Return the result of the plain module in fp64, and the masks that it attended to."""
    module, inputs = build_on_device(name, seed)
    exact = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()}
    truth = run_step(module.double(), exact, None)
    return truth, getattr(module, 'masks', [])


@functools.cache
def run_plain(name, seed, dtype):
    """Return the result of the plain module under autocast."""
    module, inputs = build_on_device(name, seed)
    _, module.masks = compute_truth(name, seed)
    return run_step(module, inputs, dtype)


@pytest.mark.parametrize(
    ('name', 'preset', 'precision'),
    [pytest.param(*case, marks=needs_fp16 if case[2] == 'fp16' else ()) for case in CASES],
)
def test_gradients(name, preset, precision):
    """The gradients are hardly further from fp64 than plain ones under autocast; those of eight bits somewhat.

    The forward pass of convolutions has to be as near as the plain one. Otherwise other ReLUs would flip than in the
    plain module, which changes gradients by many times the rounding error.
    """
    dtype = DTYPES[precision]
    errors = []  # of gradients and outputs; lean, plain, size
    for seed in range(3):
        lean, inputs = build_on_device(name, seed)
        apply_lean(lean, preset)
        truth, lean.masks = compute_truth(name, seed)
        every = run_step(lean, inputs, dtype), run_plain(name, seed, dtype), truth
        several = [torch.stack([f - t, r - t, t]).norm(dim=1).cpu() for f, r, t in zip(*every, strict=True)]
        errors.append(torch.stack(several))
    if name in (*BACKBONES, 'deformable decoder'):  # ReLUs turn over, and places get into another cell
        errors = [sum(e.square() for e in errors).sqrt()]
    for (own, other, size), (own_out, other_out, _) in errors:
        assert own < 1.5 * other + (0.05 if preset == 'int8' else 1e-3) * size, (own / size, other / size)
        assert name not in BACKBONES or own_out <= 1.02 * other_out, (own_out, other_out)


@pytest.mark.parametrize(('preset', 'dtype'), [('exact', torch.float16), ('int8', torch.bfloat16)])
@pytest.mark.parametrize('name', BACKBONES + LAYERS)
def test_on_a_gpu_that_is_not_there(name, preset, dtype):
    """Outputs have the types of plain ones, and each parameter gets a gradient of its type and shape, on its device."""
    with simulate_gpu() as mode:
        with unset_fake_temporarily():
            plain, inputs = build_with_inputs(name)
            module = copy.deepcopy(plain)
            apply_lean(module, preset)
        move_to_gpu(mode, module)
        move_to_gpu(mode, plain)
        inputs = copy_to_gpu(mode, inputs)
        with torch.autocast('cuda', dtype):
            outs = run_module(module, inputs)
            expected = run_module(plain, inputs)
        assert [out.dtype for out in outs] == [out.dtype for out in expected]
        gradients = backward(outs)
        for key, p in module.named_parameters():
            if p.requires_grad:
                grad = gradients[p]
                assert grad.is_cuda and grad.dtype == p.dtype and grad.shape == p.shape, key


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
def test_a_gpu_saves_what_is_counted_on_a_cpu(preset):
    """CUDA's autocast runs group norm in full, but what a chain saves has half the precision, as the planner counts."""
    counts = []
    with simulate_gpu() as mode:
        with unset_fake_temporarily():
            plain, inputs = build_with_inputs('ResNet-50, GN')
            module = copy.deepcopy(plain).cpu()
            apply_lean(module, preset)
            with torch.autocast('cpu', torch.bfloat16):
                counts.append(count_saved(lambda: run_module(module, inputs)))
        move_to_gpu(mode, module)
        inputs = copy_to_gpu(mode, inputs)
        with torch.autocast('cuda', torch.bfloat16):
            counts.append(count_saved(lambda: run_module(module, inputs)))
    assert counts[0] == counts[1] > 0


def count_saved(run):
    """Return the bytes of the storages that autograd saves, without those of parameters; of fake tensors, too."""
    saved = []

    def pack(t):
        if not isinstance(t, nn.Parameter):
            saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outs = run()
    del outs
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}.values())
