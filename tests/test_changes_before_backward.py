"""Modules that change between a forward pass and its backward pass: gradients are those of the plain model in fp64."""

import copy
import functools

import pytest
import torch
from conv_models import BACKBONES, build_module, randomize_norms
from test_adapters_transformer import LAYERS, randomize
from test_chunked_heads import HEADS, random_maps
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from unusual_models import MODELS, random_images

from sbp_mmdet import apply_lean
from sbp_mmdet.checkpointing import run_checkpointed
from sbp_mmdet.ops.common.module_state import ModuleState, submodules
from sbp_mmdet.ops.roi_chunks import run_in_chunks
from sbp_mmdet.passes import is_of_known_library


class Heads(nn.Module):
    """Heads on the maps of 75 RoIs of each image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.roi_head = build_module(
            dict(
                type='StandardRoIHead',
                bbox_head=HEADS['box'],
                mask_head=HEADS['mask'],
                bbox_roi_extractor=_extractor(7),
                mask_roi_extractor=_extractor(6),
            )
        )

    def forward(self, x):
        x, heads = self.conv(x), self.roi_head
        corners = torch.rand(150, 2, dtype=x.dtype, generator=torch.Generator().manual_seed(0)) * 40
        images = torch.arange(150).remainder(2)[:, None]
        rois = torch.cat([images, corners, corners + 20], 1)
        maps = [extract([x], rois) for extract in (heads.bbox_roi_extractor, heads.mask_roi_extractor)]
        return [*heads.bbox_head(maps[0]), heads.mask_head(maps[1])]


def _extractor(size):
    layer = dict(type='RoIAlign', output_size=size, sampling_ratio=1)
    return dict(type='SingleRoIExtractor', roi_layer=layer, out_channels=16, featmap_strides=[1])


class Layer(nn.Module):
    """A layer of a transformer, of which some parts are recomputed."""

    def __init__(self, name):
        super().__init__()
        make, self._inputs = LAYERS[name]
        self.conv, self.layer = nn.Conv2d(3, 1, 3), make()

    def forward(self, x):
        x = self.conv(x).mean()  # all floating inputs depend on the image
        torch.manual_seed(0)
        given = {name: v + x if torch.is_tensor(v) and v.requires_grad else v for name, v in self._inputs().items()}
        out = self.layer(**given)
        return out if isinstance(out, (tuple, list)) else [out]


_RECOMPUTED = ['FFN, three layers', 'FFN, PReLU', 'attention, tokens first', 'Mask2Former decoder', 'PVT']
_RECOMPUTED += ['Conditional DETR']
FAMILIES = {
    'heads': lambda: randomize_norms(Heads()),
    'Swin': MODELS['Swin'],
    'ViT': MODELS['ViT'],
    'Res2Net': lambda: build_module(BACKBONES['Res2Net'][0]),
    **{
        name: functools.partial(lambda name: randomize(Layer(name)), name)
        for name in (*_RECOMPUTED, 'Conditional DETR')
    },
}


pytestmark = pytest.mark.usefixtures('quiet')


def run_model(model):
    torch.manual_seed(3)
    outs = [out for out in model(random_images()) if out.requires_grad]
    return sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).cos().view_as(o)).sum() for o in outs)


def collect(parameters):
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


# Functions that run a step with a change in it, and return its gradients.


def functional_call(model):
    given = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    run_model(lambda x: torch.func.functional_call(model, given, (x,))).backward()
    return collect(given)


def other_parameters(model):
    loss, before = run_model(model), dict(model.named_parameters())
    for module in model.modules():
        for name, p in [*module._parameters.items()]:
            if p is not None:
                setattr(module, name, nn.Parameter(3 * p.detach()))
    after = dict(model.named_parameters())
    loss.backward()
    assert all(after[name] is p and p.grad is None for name, p in model.named_parameters())
    return collect(before)


def evaluation_mode(model):
    loss = run_model(model)
    model.eval()
    loss.backward()
    assert not any(module.training for module in model.modules())
    return collect(dict(model.named_parameters()))


def frozen(model):
    loss = run_model(model)
    model.requires_grad_(False)
    loss.backward()
    assert not any(p.requires_grad for p in model.parameters())
    return collect(dict(model.named_parameters()))


def hooks(model):
    loss, calls = run_model(model), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(1))
    loss.backward()
    assert not calls
    return collect(dict(model.named_parameters()))


def settings(model):
    loss = run_model(model)
    for module in model.modules():
        if hasattr(module, 'eps'):
            module.eps = 0.5
        if isinstance(module, nn.Conv2d):
            module.stride = (3, 3)
    loss.backward()
    assert all(module.stride == (3, 3) for module in model.modules() if isinstance(module, nn.Conv2d))
    return collect(dict(model.named_parameters()))


def hooks_on_parameters(model):
    calls = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: calls.update({name: calls.get(name, 0) + 1}) or 2 * grad)
    run_model(model).backward()
    gradients = collect(dict(model.named_parameters()))
    assert calls == dict.fromkeys(gradients, 1)
    return gradients


def tensors_instead_of_parameters(model):
    """Weights are computed from other parameters, and are attributes of their modules."""
    for module in [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]:
        module.raw = module._parameters.pop('weight')
        module.weight = 1.5 * module.raw
    run_model(model).backward()
    return collect(dict(model.named_parameters()))


def other_names_of_parameters(model):
    """Pruning renames a weight to `weight_orig`, and the module gets the product with a mask as an attribute."""
    loss = run_model(model)
    for module in [m for m in model.modules() if 'weight' in m._parameters and m.weight is not None]:
        prune.l1_unstructured(module, 'weight', 0.5)
    names = [name for name, _ in model.named_parameters()]
    loss.backward()
    assert [name for name, _ in model.named_parameters()] == names
    return collect(dict(model.named_parameters()))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x


@functools.cache
def _checkpoints_run_hooks():
    calls, x, w = [], torch.ones(1, requires_grad=True), nn.Parameter(torch.ones(1))
    w.register_hook(calls.append)
    checkpoint(lambda x: _Scaled.apply(x, w), x, use_reentrant=False).backward()
    return bool(calls)


STEPS = [functional_call, other_parameters, evaluation_mode, frozen, hooks, settings, hooks_on_parameters]
STEPS += [tensors_instead_of_parameters, other_names_of_parameters]


@pytest.mark.parametrize('run', STEPS, ids=lambda run: run.__name__)
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('family', FAMILIES)
def test_change(family, preset, run):
    if run is hooks_on_parameters and preset == 'exact_min' and not _checkpoints_run_hooks():
        pytest.skip('this torch runs no hooks on parameters of custom functions inside of a checkpoint')
    plain = FAMILIES[family]()
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    actual, expected = run(lean), run(plain)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('family', ['heads', 'Swin'])
def test_parameters_that_are_written_to_are_an_error(family):
    """Writing to a parameter before the backward pass is an error, as in the plain model."""
    model = FAMILIES[family]()
    apply_lean(model, 'exact_min', verify=False)
    loss = run_model(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    with pytest.raises(RuntimeError, match=r'modified (by an inplace operation|in place)'):
        loss.backward()


class Scaled(nn.Module):
    """A layer with a scale that only its loss reads, after a recurrent layer, which reads its weights from a list."""

    def __init__(self):
        super().__init__()
        self.linear, self.recurrent = nn.Linear(3, 3), nn.GRU(3, 3)
        self.scale, self.scripted = nn.Parameter(torch.ones(3)), torch.jit.script(nn.Linear(3, 3))

    def forward(self, x):
        return self.scripted(self.recurrent(self.linear(x).sin())[0]).sin()


@pytest.fixture
def scaled():
    torch.manual_seed(0)
    return Scaled().double(), torch.randn(2, 3, dtype=torch.float64)


def test_parameters_that_the_recomputation_does_not_read_may_change(scaled):
    """An optimizer that steps within the backward pass has changed the scale before the layer is recomputed."""
    model, x = scaled
    weights = dict(model.named_parameters())
    loss = (model(x) * model.scale).square().sum()
    expected, found = torch.autograd.grad(loss, [*weights.values()]), {}
    dicts = [module._parameters for module in model.modules()]

    def step(p, name):
        found[name] = p.grad.clone()
        torch.optim.SGD([p], 0.1).step()

    for name, p in weights.items():
        p.register_post_accumulate_grad_hook(functools.partial(step, name=name))
    (run_checkpointed(model, model.forward, (x,), {}) * model.scale).square().sum().backward()
    assert [*found][0] == 'scale'
    for (name, p), gradient in zip(weights.items(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
        assert dict(model.named_parameters())[name] is p
    assert all(m._parameters is own for m, own in zip(model.modules(), dicts, strict=True) if type(own) is dict)


@pytest.mark.parametrize('name', ['linear.weight', 'recurrent.weight_hh_l0', 'scripted.weight'])
def test_parameters_that_the_recomputation_reads_must_not_change(scaled, name):
    model, x = scaled
    loss = run_checkpointed(model, model.forward, (x,), {}).square().sum()
    with torch.no_grad():
        model.scale.mul_(2)
        model.get_parameter(name).mul_(1.1)
    with pytest.raises(RuntimeError, match=r'modified in place'):
        loss.backward()
    assert model.scale[0] == 2 and model.linear.weight is dict(model.named_parameters())['linear.weight']


def test_chunks_of_rois_within_a_recomputation():
    """The recomputation finds parameters in dicts of its own, and the chunks in the usual ones."""
    conv, x = nn.Conv2d(16, 3, 1).double(), random_maps('mask')
    conv.register_parameter('scale', nn.Parameter(torch.ones(()), requires_grad=False))
    expected = torch.autograd.grad(conv(x).sin().sum(), [conv.weight, conv.bias])
    loss = run_checkpointed(conv, lambda x: run_in_chunks(conv.forward, x, [conv]), (x,), {}).sin().sum()
    conv.scale.mul_(2)
    loss.backward()
    for p, gradient in zip((conv.weight, conv.bias), expected, strict=True):
        assert (p.grad - gradient).norm() <= 1e-12 * gradient.norm()


class Flagged(nn.Module):
    """A layer whose factor depends on which flags there are, not on their values."""

    def __init__(self):
        super().__init__()
        self.linear, self.doubles = nn.Linear(3, 3), True

    def forward(self, x):
        return (self.linear(x) * (2 if hasattr(self, 'doubles') else 5)).sin()


def rename_flag(model):
    del model.doubles
    model.other = True


def remove_first(model):
    delattr(model, '0')


@pytest.mark.parametrize(
    ('make', 'change'),
    [
        (Flagged, rename_flag),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid()), remove_first),
    ],
    ids=['same values', 'order'],
)
def test_keys_of_attributes_and_children(make, change):
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3)
    weights = [*model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), weights)
    loss = run_checkpointed(model, model.forward, (x,), {}).sum()
    change(model)
    after = {*vars(model)}, [*model._modules.items()]
    loss.backward()
    assert ({*vars(model)}, [*model._modules.items()]) == after
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)


def test_state_is_restored_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    state, weight = ModuleState(submodules([model])), model[0].weight
    model.eval()
    model[0].weight = new = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    handle = model[0].register_forward_hook(lambda *args: None)
    with pytest.raises(ZeroDivisionError), state.restored():
        assert model.training and model[0].weight is weight and not model[0]._forward_hooks
        raise ZeroDivisionError
    assert not model[1].training and model[0].weight is new and not new.requires_grad
    assert handle.id in model[0]._forward_hooks


def test_activations_that_a_checkpoint_computes_wrongly_are_not_recomputed():
    """A checkpoint stops when the last tensor is saved, and torch saves the noise of RReLU before it is drawn."""
    plain = FAMILIES['Res2Net']()
    for module in plain.modules():
        if hasattr(module, 'relu'):
            module.relu = nn.RReLU(0.3, 0.3)
    lean = copy.deepcopy(plain)
    apply_lean(lean, 'exact_min', verify=False)
    assert not is_of_known_library(nn.RReLU())
    for model in (plain, lean):
        run_model(model).backward()
    for (name, p), expected in zip(lean.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - expected.grad).norm() <= 1e-9 * expected.grad.norm().clamp_min(1e-3), name
