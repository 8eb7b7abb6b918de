"""Steps that are not quite forward, backward and update: gradients are those of the plain model in fp64."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmdet.models.backbones.resnet import BasicBlock
from mmdet.models.dense_heads import RPNHead
from mmdet.models.layers import CSPLayer
from mmdet.models.necks import FPN
from mmdet.models.utils.vlfuse_helper import SingleScaleBiAttentionBlock
from test_class_patches import FAMILIES
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from unusual_models import LoRA, random_images

from sbp_mmdet import apply_lean, remove_lean

pytestmark = pytest.mark.usefixtures('quiet')


def run_model(model, x):
    torch.manual_seed(3)
    outs = model(x)
    return outs if isinstance(outs, (list, tuple)) else [outs]


def compute_loss(outs):
    return sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).cos().view_as(o)).sum() for o in outs)


def get_gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compute_gradients(model, x=None):
    model.zero_grad()
    compute_loss(run_model(model, random_images() if x is None else x)).backward()
    return get_gradients(model)


# Functions that run a step in an unusual way and return its gradients.


def functional_call(model):
    given = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    outs = torch.func.functional_call(model, given, (random_images(),))
    loss = compute_loss(outs if isinstance(outs, (list, tuple)) else [outs])
    grads = torch.autograd.grad(loss, [*given.values()], allow_unused=True)
    return {name: g for name, g in zip(given, grads, strict=True) if g is not None}


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return compute_gradients(torch.load(file, weights_only=False))


def copied_and_both_trained(model):
    compute_gradients(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.05)
    return compute_gradients(model) | {f'other {name}': g for name, g in compute_gradients(other).items()}


def checkpointed_from_outside(model):
    model.zero_grad()
    x = random_images().requires_grad_()
    compute_loss(checkpoint(lambda x: tuple(run_model(model, x)), x, use_reentrant=False)).backward()
    return get_gradients(model) | ({} if x.grad is None else dict(x=x.grad))


def validated_in_between(model):
    compute_gradients(model)
    model.eval()
    with torch.inference_mode():
        model(random_images())
    model.train()
    with torch.no_grad():
        model(random_images())
    return compute_gradients(model)


def saved_tensors_changed(model):
    model.zero_grad()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        images = random_images()
        loss = compute_loss(run_model(model, images))
        with torch.no_grad():
            for tensor in (images, *model.parameters()):
                tensor.mul_(1.5)
        loss.backward()
    return get_gradients(model)


def two_losses(model):
    model.zero_grad()
    outs = run_model(model, random_images())
    compute_loss(outs[:1]).backward(retain_graph=True)
    compute_loss(outs).backward()
    return get_gradients(model)


def two_passes(model):
    model.zero_grad()
    first, second = run_model(model, random_images()), run_model(model, 0.5 * random_images())
    (compute_loss(first) + compute_loss(second)).backward()
    return get_gradients(model)


def some_gradients(model):
    x, some = random_images().requires_grad_(), [*model.parameters()][::3]
    gradients = torch.autograd.grad(compute_loss(run_model(model, x)), [x, *some], allow_unused=True)
    return {str(i): g for i, g in enumerate(gradients) if g is not None}


def hooks_on_parameters(model):
    handles = [p.register_hook(lambda g: 2 * g) for p in model.parameters() if p.requires_grad]
    gradients = compute_gradients(model)
    for handle in handles:
        handle.remove()
    return gradients


def other_parameters(model):
    compute_gradients(model)
    for module in model.modules():
        for name, p in [*module._parameters.items()]:
            if p is not None:
                setattr(module, name, nn.Parameter(1.05 * p.detach(), requires_grad=p.requires_grad))
    return compute_gradients(model)


def frozen_and_thawed(model):
    some = [*model.parameters()][::2]
    for p in some:
        p.requires_grad_(False)
    first = compute_gradients(model)
    for p in some:
        p.requires_grad_(True)
    return compute_gradients(model) | {f'first {name}': g for name, g in first.items()}


def other_sizes(model):
    first = compute_gradients(model, random_images(96)[:1])
    return compute_gradients(model, torch.cat([random_images(), random_images()])) | {
        f'first {name}': g for name, g in first.items()
    }


def other_layouts(model):
    first = compute_gradients(model, random_images().to(memory_format=torch.channels_last))
    return compute_gradients(model, random_images().flip(3).mT) | {f'first {name}': g for name, g in first.items()}


def tied(model):
    seen = {}
    for module in model.modules():
        weight = module._parameters.get('weight')
        if weight is not None:
            module.weight = seen.setdefault((type(module).__name__, weight.shape), weight)
    return compute_gradients(model)


def lora_in_every_linear_layer(model):
    torch.manual_seed(0)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child).__name__ == 'Linear' and not isinstance(module, (LoRA, nn.MultiheadAttention)):
                setattr(module, name, LoRA(child).double())
    return compute_gradients(model)


def other_activations(model):
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, (nn.ReLU, nn.GELU, nn.SiLU)):
                setattr(module, name, nn.Softplus())
    return compute_gradients(model)


STEPS = [functional_call, saved_and_loaded, copied_and_both_trained, checkpointed_from_outside, validated_in_between]
STEPS += [saved_tensors_changed, two_losses, two_passes, some_gradients, hooks_on_parameters, other_parameters]
STEPS += [frozen_and_thawed, other_sizes, other_layouts, tied, lora_in_every_linear_layer, other_activations]


@pytest.mark.parametrize('run', STEPS, ids=lambda run: run.__name__)
@pytest.mark.parametrize('family', FAMILIES)
def test_step(family, run):
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    apply_lean(lean, verify=False)
    actual, expected = run(lean), run(plain)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('family', ['Swin', 'ConvNeXt', 'ViT'])
def test_transforms_of_functions_run_the_own_code(family, preset):
    """torch.func's transforms support neither custom autograd functions nor checkpoints."""
    model = FAMILIES[family]()
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(
        compute_loss(run_model(model, random_images())), [*parameters.values()], allow_unused=True
    )
    apply_lean(model, preset, verify=False)

    def run(parameters):
        actual = torch.func.functional_call(model, parameters, (random_images(),))
        return compute_loss(actual if isinstance(actual, (list, tuple)) else [actual])

    torch.manual_seed(3)
    loss, backward = torch.func.vjp(run, parameters)
    actual = backward(torch.ones_like(loss))[0]
    for (name, g), grad in zip(actual.items(), expected, strict=True):
        grad = torch.zeros_like(g) if grad is None else grad
        assert (g - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


class _Levels(nn.Module):
    """Two maps of the image, of which a feature pyramid needs the coarser one for both of its levels."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.neck = FPN([8, 8], 4, 2)

    def forward(self, x):
        return self.neck((self.layers[0](x), self.layers[1](F.avg_pool2d(x, 2))))


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('layer', ['conv', 'norm', 'block', 'CSP'])
def test_layers_whose_output_no_loss_uses_get_no_gradient(layer, preset):
    layers = dict(
        conv=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.Sequential(ConvModule(3, 8, 3, padding=1, norm_cfg=dict(type='GN', num_groups=2))),
        block=nn.Sequential(nn.Conv2d(3, 8, 1), BasicBlock(8, 8)),
        CSP=nn.Sequential(nn.Conv2d(3, 8, 1), CSPLayer(8, 8, num_blocks=1)),
    )
    plain = _Levels(layers[layer]).double().train()
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    found = []
    for model in (lean, plain):
        compute_loss(run_model(model, random_images())[1:]).backward()
        found.append(get_gradients(model))
    assert any(name.startswith('layers.1') for name in found[1])
    assert not any(name.startswith('layers.0') for name in found[1])
    assert found[0].keys() == found[1].keys()


class Doubling(TorchFunctionMode):
    """Mode that doubles the output of functions of modules."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function in (F.gelu, F.relu, F.layer_norm, F.linear, F.batch_norm, torch.conv2d) else out


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('family', FAMILIES)
def test_modes_of_functions(family, preset):
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    apply_lean(lean, preset, verify=False)
    found = []
    for model in (lean, plain):
        with Doubling():
            loss = compute_loss(run_model(model, random_images()))
        loss.backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('family', ['Swin', 'ConvNeXt', 'ConvModule', 'ResNet', 'pyramid'])
def test_forward_mode_differentiation(family):
    lean = FAMILIES[family]()
    plain, found = copy.deepcopy(lean), []
    apply_lean(lean, 'exact_min', verify=False)
    for model in (lean, plain):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(random_images(), random_images().flip(3))
            found.append([forward_ad.unpack_dual(out).tangent for out in run_model(model, x)])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::torch.jit.TracerWarning')
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('family', ['Swin', 'ConvNeXt', 'ResNet', 'pyramid'])
def test_traced_in_training(family, preset):
    """A traced model runs its own code, because tracing would record the outputs of operations as constants."""
    lean = FAMILIES[family]()
    plain, found, images = copy.deepcopy(lean), [], random_images()
    apply_lean(lean, preset)
    traced = torch.jit.trace(lean, images, check_trace=False)
    for run, model in ((traced, lean), (plain, plain)):
        outs = run(images.flip(3))
        compute_loss(outs if isinstance(outs, (tuple, list)) else [outs]).backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('family', ['Swin', 'ResNet', 'ConvNeXt'])
def test_changed_back_and_forth(family):
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    for preset in ('int8', 'exact'):
        apply_lean(lean, preset, verify=False)
        remove_lean(lean)
    apply_lean(lean, verify=False)
    gradients = compute_gradients(lean)
    for name, grad in compute_gradients(plain).items():
        assert (gradients[name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('family', ['Swin', 'ResNet', 'ConvModule', 'FFN', 'pyramid'])
def test_a_second_derivative_is_an_error(family):
    """The backward passes of operations have no derivative; without an error, the gradient would be silently wrong."""
    lean = FAMILIES[family]()
    apply_lean(lean, verify=False)
    x = random_images().requires_grad_()
    (grad,) = torch.autograd.grad(compute_loss(run_model(lean, x)), [x], create_graph=True)
    with pytest.raises(RuntimeError, match='twice'):
        (grad.square().sum() + compute_loss(run_model(lean, x))).backward()
    loss, parameters = compute_loss(run_model(lean, x)), [p for p in lean.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
    for wanted in (parameters, parameters[:1], [x]):  # these are also reached past the operation that raises the error
        with pytest.raises(RuntimeError, match='twice'):
            torch.autograd.grad(loss + sum(g.square().sum() for g in grads), wanted, retain_graph=True)


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('used', [[0], [1], [0, 1]], ids=['scores', 'boxes', 'both'])
def test_an_output_of_a_head_that_no_loss_uses(used, preset):
    """Weights behind an unused output get no gradient; with one of zero, an optimizer would decay them."""
    torch.manual_seed(0)
    plain = nn.ModuleList([RPNHead(in_channels=4, feat_channels=6)]).double().train()
    lean, found = copy.deepcopy(plain), []
    apply_lean(lean, preset, verify=False)
    maps = [torch.randn(2, 4, size, size, dtype=torch.float64) for size in (32, 8)]
    for model in (lean, plain):
        outs = model[0](maps)
        compute_loss([out for i in used for out in outs[i]]).backward(retain_graph=True)
        compute_loss(outs[used[0]][:1]).backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= (0.02 if preset == 'int8' else 1e-10) * grad.norm(), name


@pytest.mark.parametrize('frozen', ['', 'weight', 'attn'])
@pytest.mark.parametrize('used', [[0], [1], [0, 1]], ids=['image', 'text', 'both'])
def test_an_output_of_a_fusion_that_no_loss_uses(used, frozen):
    torch.manual_seed(0)
    block = SingleScaleBiAttentionBlock(v_dim=8, l_dim=8, embed_dim=8, num_heads=2, dropout=0.0, drop_path=0.0)
    plain = nn.ModuleList([block]).double().train()
    for name, p in plain.named_parameters():
        p.requires_grad_(not frozen or frozen not in name)
    lean, found = copy.deepcopy(plain), []
    apply_lean(lean, verify=False)
    tokens = [torch.randn(2, number, 8, dtype=torch.float64) for number in (12, 5)]
    for model in (lean, plain):
        outs = model[0](*tokens)
        for out in outs:  # outputs may be changed in place
            out.add_(1)
        compute_loss([outs[i] for i in used]).backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name
