"""If a user replaces a function of a class or a module for the whole process, the replacement runs."""

import copy
import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from conv_models import randomize_norms
from mmcv.cnn.bricks import transformer
from mmcv.ops import multi_scale_deform_attn
from mmdet.models.backbones import resnet, swin
from mmdet.models.dense_heads import RetinaHead, RPNHead
from mmdet.models.layers import CSPLayer, ResLayer
from mmdet.models.layers.csp_layer import DarknetBottleneck
from mmdet.models.necks import FPN, PAFPN
from mmdet.models.task_modules.assigners import BboxOverlaps2D, SimOTAAssigner
from mmengine.logging import MMLogger
from mmengine.structures import InstanceData
from test_hooks_of_others import warnings_of
from torch import nn
from unusual_models import (
    CALLS,
    MODELS,
    assert_same,
    assert_same_step,
    find_lean_modules,
    random_images,
    run_step,
)

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters import ADAPTERS, LeanModule
from sbp_mmdet.adapters.predicate import unsupported
from sbp_mmdet.adapters.roles import ROLES
from sbp_mmdet.chunked_targets.assigners import assigners_in_chunks
from sbp_mmdet.library_code import replaced_code
from sbp_mmdet.models import layers, vit
from sbp_mmdet.surgery import stock_class


@pytest.fixture(autouse=True)
def quiet():
    CALLS.clear()
    MMLogger.get_current_instance().setLevel('ERROR')
    yield
    MMLogger.get_current_instance().setLevel('INFO')


def doubled(function):
    """Return a function that doubles and records the original one, with its name and module, as decorators do."""

    @functools.wraps(function)
    def patched(*args, **kwargs):
        CALLS.append(function.__qualname__)
        out = function(*args, **kwargs)
        return tuple(1.25 * o for o in out) if isinstance(out, tuple) else 1.25 * out

    return patched


def first_doubled(function):
    return lambda *args, **kwargs: (1.5 * function(*args, **kwargs)[0], None)


def soft(norm):
    """Return another norm behind a property."""
    return property(lambda block: nn.Sequential(norm.fget(block), nn.Softplus()))


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.neck = FPN([4, 4], 8, 3)
        self.head = RPNHead(8, feat_channels=8)

    def forward(self, x):
        x = self.conv(x)
        maps = self.neck((x, F.avg_pool2d(x, 2)))
        return [o for outs in self.head(maps) for o in outs]


FAMILIES = MODELS | {'pyramid': lambda: randomize_norms(Pyramid())}
# Patched class or module, patched name, replacement, and the model that would bypass it.
PATCHES = {
    'layer norm': (nn.LayerNorm, 'forward', doubled, 'Swin'),
    'linear layer': (nn.Linear, 'forward', doubled, 'ViT'),
    'linear layer of a network': (nn.Linear, 'forward', doubled, 'FFN'),
    'GELU': (nn.GELU, 'forward', doubled, 'ConvNeXt'),
    'layer norm of this package': (layers.LayerNorm2d, 'tokens', doubled, 'ConvNeXt'),
    'softmax': (nn.Softmax, 'forward', doubled, 'Swin'),
    'group norm': (nn.GroupNorm, 'forward', doubled, 'ConvModule'),
    'SiLU': (nn.SiLU, 'forward', doubled, 'ConvModule'),
    'convolution': (nn.Conv2d, 'forward', doubled, 'ResNet'),
    'convolution of a neck and a head': (nn.Conv2d, 'forward', doubled, 'pyramid'),
    'helper of convolutions': (nn.Conv2d, '_conv_forward', doubled, 'ResNet'),
    'helper of convolutions of a pyramid': (nn.Conv2d, '_conv_forward', doubled, 'pyramid'),
    'batch norm by its base': (nn.modules.batchnorm._BatchNorm, 'forward', doubled, 'ResNet'),
    'batch norm, though its base defines it': (nn.BatchNorm2d, 'forward', doubled, 'ResNet'),
    'bottleneck': (resnet.Bottleneck, 'forward', doubled, 'ResNet'),
    'property of a bottleneck': (resnet.Bottleneck, 'norm2', soft, 'ResNet'),
    'backbone': (resnet.ResNet, 'forward', doubled, 'ResNet'),
    'window attention': (swin.WindowMSA, 'forward', doubled, 'Swin'),
    'helper of shifted windows': (swin.ShiftWindowMSA, 'window_partition', doubled, 'Swin'),
    'Swin block': (swin.SwinBlock, 'forward', doubled, 'Swin'),
    'FFN, whose forward is decorated': (transformer.FFN, 'forward', doubled, 'FFN'),
    'mmcv attention': (transformer.MultiheadAttention, 'forward', doubled, 'attention'),
    'torch attention': (
        nn.MultiheadAttention,
        'forward',
        lambda f: lambda *a, **k: (1.5 * f(*a, **k)[0], 1),
        'attention',
    ),
    'deformable attention': (multi_scale_deform_attn.MultiScaleDeformableAttention, 'forward', doubled, 'deformable'),
    'pyramid': (FPN, 'forward', doubled, 'pyramid'),
    'helper of a head': (RPNHead, 'forward_single', doubled, 'pyramid'),
    'block of this package': (vit.ViTBlock, 'feed', doubled, 'ViT'),
    'method of another class of its module': (nn.ReLU, 'forward', lambda f: nn.SiLU.forward, 'ResNet'),
    'call of all modules': (nn.Module, '__call__', doubled, 'ConvNeXt'),
    'function GELU': (F, 'gelu', doubled, 'ConvNeXt'),
    'function layer norm': (F, 'layer_norm', doubled, 'ViT'),
    'function linear': (F, 'linear', doubled, 'Swin'),
    'function convolution': (F, 'conv2d', doubled, 'ResNet'),
    'function batch norm': (F, 'batch_norm', doubled, 'ResNet'),
    'another function of torch': (F, 'relu', lambda f: F.relu6, 'ResNet'),
    'an object in the place of a function': (F, 'gelu', lambda f: functools.partial(f, approximate='tanh'), 'ConvNeXt'),
    'helper function of a library': (
        multi_scale_deform_attn,
        'multi_scale_deformable_attn_pytorch',
        doubled,
        'deformable',
    ),
}


@pytest.fixture(params=PATCHES)
def patch(request, monkeypatch):
    owner, name, change, family = PATCHES[request.param]

    def apply():
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))

    return apply, monkeypatch.undo, family


def test_patched_before(patch):
    apply, _, family = patch
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    apply()
    try:
        report = apply_lean(lean, verify=False)
    except ValueError as error:  # nothing is left to change
        assert 'was replaced' in str(error)
        return
    assert any('was replaced' in reason for reason in report.left.values()), report
    assert_same(lean, plain, random_images())


def test_patched_between_steps_and_back(patch, monkeypatch):
    """After the patch is removed, all called modules are lean again: chains, or the modules that they bypass."""
    (apply, undo, family), ran, own = patch, [], LeanModule.runs_lean
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    before = apply_lean(lean, verify=False)
    assert not any('was replaced' in reason for reason in before.left.values())
    assert_same(lean, plain, random_images())
    apply()
    assert_same(lean, plain, random_images())
    undo()
    bindings = [set(lean.get_submodule(name)._lean.bound.bindings) for name in find_lean_modules(lean)]
    monkeypatch.setattr(LeanModule, 'runs_lean', lambda module: ran.append(module) or own(module))
    assert_same(lean, plain, random_images())
    now = [set(lean.get_submodule(name)._lean.bound.bindings) for name in find_lean_modules(lean)]
    assert sum(map(len, now)) >= sum(map(len, bindings))
    assert ran and not any(module._lean.bound.reason for module in ran)


def named_alike(function):
    """Return a function that doubles the original one, which is one of this package in a changed class."""

    def patched(*args, **kwargs):
        CALLS.append('patched')
        out = function(*args, **kwargs)
        return tuple(1.25 * o for o in out) if isinstance(out, tuple) else 1.25 * out

    return patched


# Class, function and a model that has changed modules only of this class.
LIVE = {
    'bottleneck': (resnet.Bottleneck, 'forward', 'ResNet'),
    'property of a bottleneck': (resnet.Bottleneck, 'norm2', 'ResNet'),
    'layer of bottlenecks': (ResLayer, 'forward', 'ResNet'),
    'CSP layer': (CSPLayer, 'forward', 'CSP layer'),
    'block of a CSP layer': (DarknetBottleneck, 'forward', 'CSP layer'),
    'Swin block': (swin.SwinBlock, 'forward', 'Swin'),
    'helper of a ViT block': (vit.ViTBlock, 'attend', 'ViT'),
    'pyramid': (FPN, 'forward', 'pyramid'),
    'FFN': (transformer.FFN, 'forward', 'FFN'),
}


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('name', LIVE)
def test_patched_by_the_class_of_a_live_module(name, preset, monkeypatch):
    """``type(model.layer1[0]).forward = mine`` patches a class that this package made."""
    (kind, function, family), steps = LIVE[name], []
    lean = FAMILIES[family]()
    plain = copy.deepcopy(lean)
    apply_lean(lean, preset, verify=False)
    assert_same(lean, plain, random_images())
    for model in (lean, plain):
        (owner,) = {type(m) for m in model.modules() if stock_class(type(m)) is kind}
        change = soft if 'property' in name else named_alike
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, change(getattr(owner, function)), raising=False)
            steps.append(run_step(model, random_images()))
    assert_same_step(*steps)
    assert 'property' in name or 'patched' in steps[0][2]
    assert_same(lean, plain, random_images())


class Detector(nn.Module):
    """A neck and a head that ``exact_min`` recomputes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3, 4)
        self.neck, self.bbox_head = PAFPN([4, 4], 4, 2), RetinaHead(2, 4, stacked_convs=1, feat_channels=4)

    def forward(self, x):
        x = self.backbone(x)
        return [out for outs in self.bbox_head(self.neck((x, F.avg_pool2d(x, 2)))) for out in outs]


# What a user replaces in parts that are recomputed, and the model that has them.
RECOMPUTED = {
    'neck': (PAFPN, 'forward', 'detector'),
    'function of a head': (RetinaHead, 'forward_single', 'detector'),
    'function in a head': (nn.Conv2d, '_conv_forward', 'detector'),
    'block': (swin.SwinBlock, 'forward', 'Swin'),
    'function in a block': (swin.ShiftWindowMSA, 'window_partition', 'Swin'),
    'function of a block': (vit.ViTBlock, 'attend', 'ViT'),
}


@pytest.mark.parametrize('of', ['class', 'instance'])
@pytest.mark.parametrize('name', RECOMPUTED)
def test_code_of_recomputed_parts_runs_once(name, of, monkeypatch):
    """Parts that were recomputed until then are not, when their own code or that inside of them is replaced."""
    kind, function, family = RECOMPUTED[name]

    def recorded(run):
        return lambda *args, **kwargs: CALLS.append(function) or run(*args, **kwargs)

    torch.manual_seed(0)
    lean = randomize_norms(Detector()) if family == 'detector' else FAMILIES[family]()
    plain = copy.deepcopy(lean)
    apply_lean(lean, 'exact_min', verify=False)
    for model in (lean, plain):
        run_step(model, random_images())
    if of == 'class':
        monkeypatch.setattr(kind, function, recorded(getattr(kind, function)))
    else:
        found = [m for m in [*lean.modules(), *plain.modules()] if stock_class(type(m)) is kind]
        for owner in found if of == 'instance' else {*map(type, found)}:
            monkeypatch.setattr(owner, function, recorded(getattr(owner, function)), raising=False)
    assert_same(lean, plain, random_images())
    assert function in CALLS


def register_hook(module, monkeypatch):
    module.register_forward_hook(lambda *args: None)


def replace_forward(module, monkeypatch):
    monkeypatch.setattr(module, 'forward', lambda x: x)


def replace_forward_of_its_class(module, monkeypatch):
    monkeypatch.setattr(type(module), 'forward', lambda self, x: x, raising=False)


@pytest.mark.parametrize(
    ('change', 'since', 'reason'),
    [
        (register_hook, 'they have hooks', 'a module inside of it has hooks'),
        (replace_forward, 'they were changed since', 'a function that it calls was replaced'),
        (replace_forward_of_its_class, 'they were changed since', 'a function that it calls was replaced'),
    ],
)
def test_the_log_says_why_a_part_is_not_recomputed(change, since, reason, monkeypatch):
    model = randomize_norms(Detector())
    report = apply_lean(model, 'exact_min', verify=False)
    assert warnings_of(model, report) == ([], [])
    change(model.neck.lateral_convs[0], monkeypatch)
    names, (text,) = warnings_of(model, report)
    assert 'neck' in names
    assert f'because {since};' in text and f'neck ({reason}, which would run twice)' in text


@pytest.mark.parametrize('role', ROLES)
def test_reasons_name_no_private_classes(role):
    reason = unsupported(nn.LSTM(1, 1), role)
    assert reason.startswith('it is a') and ' _' not in reason


def known_classes():
    for role in ROLES.values():
        yield from (kind for kind in role if isinstance(kind, type))
    for path in ADAPTERS:
        module, _, name = path.rpartition('.')
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            yield kind


def test_known_classes_are_as_their_libraries_define_them():
    kinds = dict.fromkeys(known_classes())
    assert len(kinds) > 90
    assert not {kind: found for kind in kinds if (found := replaced_code(kind))}


# Targets in chunks call the own code of the class with parts of the arguments.


def heads(assigner):
    model = nn.Module()
    model.assigner = assigner
    return model


def test_a_patched_overlap_gets_all_pairs_at_once(monkeypatch):
    calculator = BboxOverlaps2D()
    boxes = torch.rand(40, 4).cumsum(1)
    model = heads(SimOTAAssigner())
    model.assigner.iou_calculator = calculator
    assert assigners_in_chunks(model, 100)[0]

    def ranked(self, first, second, *args, **kwargs):  # an entry depends on all others
        CALLS.append(len(first))
        return torch.cdist(first, second).argsort(0).argsort(0).float()

    monkeypatch.setattr(BboxOverlaps2D, '__call__', ranked)
    assert (calculator(boxes, boxes[:9]) == ranked(None, boxes, boxes[:9])).all()
    assert CALLS == [40, 40]
    model = heads(SimOTAAssigner())
    changed, unchanged = assigners_in_chunks(model, 100)
    assert not changed and 'was replaced' in unchanged['assigner']


def test_a_patched_assigner_gets_all_priors_at_once(monkeypatch):
    monkeypatch.setattr('sbp_mmdet.chunked_targets.assigners._COSTS', 8)
    model = heads(SimOTAAssigner())
    assigners_in_chunks(model, 100)
    monkeypatch.setattr(SimOTAAssigner, 'assign', lambda self, pred, gt, *args, **kwargs: len(pred))
    assert model.assigner.assign(InstanceData(scores=torch.rand(30, 2)), InstanceData(bboxes=torch.rand(3, 4))) == 30
