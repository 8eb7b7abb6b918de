"""Inputs that operations do not take: the modules run their own code, with its result or its error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conv_models import BACKBONES, build_module
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.conv_ws import ConvAWS2d
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.resnet import BasicBlock
from mmdet.models.layers import CSPLayer, ResLayer
from mmdet.models.necks import FPN
from mmengine.logging import MMLogger
from test_class_patches import FAMILIES
from test_unusual_steps import compute_loss, get_gradients, run_model
from torch import nn
from unusual_models import find_lean_modules, random_images

from sbp_mmdet import apply_lean
from sbp_mmdet.checkpointing import checkpoint_modules


@pytest.fixture(autouse=True, scope='module')
def quiet():
    MMLogger.get_current_instance().setLevel('ERROR')
    yield
    MMLogger.get_current_instance().setLevel('INFO')


class Steep(torch.Tensor):
    """Tensor whose functions compute something else, like one that carries a scale, a mask or units."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        steep = function in (F.relu, F.gelu, F.linear, F.conv2d, torch.conv2d, F.layer_norm, F.batch_norm, F.group_norm)
        return 1.5 * out if steep else out


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('family', [name for name in FAMILIES if name not in ('attention', 'deformable')])
def test_tensors_of_other_classes(family, preset):
    lean = FAMILIES[family]()
    plain, found = copy.deepcopy(lean), []
    apply_lean(lean, preset, verify=False)
    for model in (lean, plain):
        loss = compute_loss(run_model(model, random_images().as_subclass(Steep)))
        loss.as_subclass(torch.Tensor).backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name


@pytest.mark.parametrize('preset', ['exact_min', 'with_cp', None])
def test_tensors_of_other_classes_in_checkpoints(preset):
    """A tensor's ``backward`` runs without the functions of its class, and so would a recomputation."""
    lean = build_module(BACKBONES['plugins'][0])
    plain, found = copy.deepcopy(lean), []
    if preset is None:
        checkpoint_modules(lean, ['layer1', 'layer2'])
    else:
        apply_lean(lean, preset, verify=False)
    for model in (lean, plain):
        compute_loss(run_model(model, random_images().as_subclass(Steep))).backward()
        found.append({name: grad.as_subclass(torch.Tensor) for name, grad in get_gradients(model).items()})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert (found[0][name] - grad).norm() <= 1e-9 * grad.norm(), name


@pytest.mark.parametrize('dtype', [torch.float32, torch.uint8])
@pytest.mark.parametrize('family', [name for name in FAMILIES if name not in ('attention', 'deformable', 'FFN')])
def test_images_in_another_precision_are_an_error(family, dtype):
    """Images in another precision than the weights raise the same error as in the plain model."""
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    apply_lean(lean, verify=False)
    messages = []
    for model in (plain, lean):
        with pytest.raises(RuntimeError) as error:
            model(random_images().to(dtype))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_precision_of_a_model_may_change():
    """A model that is cast to another precision stays lean, and its operations take inputs of that precision."""
    model = nn.ModuleDict(dict(conv=nn.Conv2d(3, 4, 3), neck=FPN([3, 3], 4, 2))).double().train()
    apply_lean(model, verify=False)
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        x = random_images().to(dtype)
        outs = model['conv'](x), *model['neck']((x, F.avg_pool2d(x, 2)))
        assert {type(out.grad_fn).__name__ for out in outs} == {'ConvNormBackward', '_PyramidBackward'}
        with pytest.raises(RuntimeError, match='type'):
            model['conv'](x.to(torch.float32 if dtype is torch.float64 else torch.float64))


def test_an_image_without_a_batch():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GELU()).double().train()
    lean, found = copy.deepcopy(plain), []
    apply_lean(lean, verify=False)
    for model in (lean, plain):
        compute_loss(run_model(model, random_images()[0])).backward()
        found.append(get_gradients(model))
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('norm', ['BN', 'GN'])
def test_a_norm_of_one_value_is_an_error(norm):
    plain = nn.Sequential(ConvModule(3, 4, 1, norm_cfg=dict(type=norm, **(dict(num_groups=4) if norm == 'GN' else {}))))
    lean = copy.deepcopy(plain.train())
    apply_lean(lean, verify=False)
    for model in (plain, lean):
        with pytest.raises(ValueError, match='more than 1 value per channel'):
            model(torch.randn(1, 3, 1, 1))


def test_a_shallow_copy_with_other_children():
    """The copy has the attributes of the changed module, with the operations that were bound to its children."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double().train()
    apply_lean(model, verify=False)
    assert find_lean_modules(model)
    model(random_images())
    other = copy.copy(model)
    other._modules = {name: copy.deepcopy(child) for name, child in model._modules.items()}
    with torch.no_grad():
        other[0].weight.mul_(2)
    expected = F.relu(
        F.batch_norm(F.conv2d(random_images(), other[0].weight, other[0].bias), None, None, training=True)
    )
    torch.testing.assert_close(other(random_images()), expected, rtol=1e-10, atol=1e-10)
    other(random_images()).square().sum().backward()
    assert model[0].weight.grad is None and other[0].weight.grad is not None


ADAPTED = {
    'Conv2d': (lambda: nn.Conv2d(3, 4, 3), 'input'),
    'ConvAWS2d': (lambda: ConvAWS2d(3, 4, 3), 'x'),
    'sequence': (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), 'input'),
    'stage': (lambda: ResLayer(BasicBlock, 3, 3, 2), 'input'),
    'ConvModule': (lambda: ConvModule(3, 4, 3, norm_cfg=dict(type='BN')), 'x'),
    'CSP layer': (lambda: CSPLayer(3, 4), 'x'),
    'max pool': (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)), 'input'),
    'linear layer': (lambda: nn.Linear(64, 8), 'input'),
    'layer norm': (lambda: nn.LayerNorm(64), 'input'),
    'GELU': (lambda: nn.GELU(), 'input'),
}


@pytest.mark.parametrize('name', ADAPTED)
def test_arguments_have_the_names_of_the_own_forward(name):
    make, argument = ADAPTED[name]
    plain = nn.ModuleDict(dict(first=nn.Conv2d(3, 3, 1), neck=make())).double().train()
    lean, found = copy.deepcopy(plain), []
    apply_lean(lean, verify=False)
    for model in (lean, plain):
        compute_loss([model['neck'](**{argument: model['first'](input=random_images())})]).backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for key, grad in found[1].items():
        torch.testing.assert_close(found[0][key], grad, rtol=1e-8, atol=1e-9)


def test_the_log_names_the_modules_once(caplog):
    model = nn.ModuleDict(dict(neck=nn.Conv2d(3, 4, 3))).double().train()
    apply_lean(model, verify=False)
    logger = MMLogger.get_current_instance()
    logger.setLevel('WARNING')
    logger.addHandler(caplog.handler)
    try:
        for _ in range(2):
            model['neck'](random_images())
            model['neck'](random_images().as_subclass(Steep))
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel('ERROR')
    (message,) = [record.getMessage() for record in caplog.records if 'neck' in record.getMessage()]
    assert 'neck runs its own code for an input' in message


def nested_tokens():
    return torch.nested.nested_tensor([torch.linspace(-1, 1, 8 * n).view(n, 8) for n in (4, 6)], dtype=torch.float64)


LAYOUTS = {
    'nested': (lambda: FFN(8, 16).double(), nested_tokens),
    'MKL-DNN': (lambda: ConvModule(3, 4, 3, norm_cfg=dict(type='BN')), lambda: random_images().float().to_mkldnn()),
    'sparse': (lambda: FFN(8, 16).double(), lambda: torch.eye(8, dtype=torch.float64).to_sparse()),
}


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_tensors_of_other_layouts(layout, preset):
    make, make_input = LAYOUTS[layout]
    lean = nn.ModuleDict(dict(layer=make())).train()
    plain, found = copy.deepcopy(lean), []
    apply_lean(lean, preset, verify=False)
    for model in (lean, plain):
        try:
            out = model.layer(make_input())
        except (RuntimeError, NotImplementedError) as error:
            found.append({'error': type(error)})
            continue
        outs = out.unbind() if out.is_nested else [out.to_dense()]
        compute_loss(outs).backward()
        found.append(get_gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        assert found[0][name] is grad or (found[0][name] - grad).norm() <= 1e-5 * grad.norm().clamp_min(1e-3), name
