"""apply_lean, remove_lean and LeanHook report what they change, refuse what they cannot, and can be undone."""

import logging
import types

import pytest
import torch
from cases import FAMILIES, SWIN, build, get_draws
from mmdet.models.backbones import ResNet, SwinTransformer
from oracles import assert_near, compute_gradients, compute_loss, random_images
from torch import nn

from sbp_mmdet import LeanHook, SBPConvNeXt, apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.apply import keep_ratios
from sbp_mmdet.checkpointing import Checkpointed
from sbp_mmdet.models import lean_backbone as lean_models
from sbp_mmdet.presets import PRESETS
from sbp_mmdet.report import UNKNOWN
from sbp_mmdet.surgery import Mixin

X = (2, 37, 52)
DEPTH = dict(drop_path_rate=0.5)


class Detector(nn.Module):
    """A detector with the attributes that apply_lean reads."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.neck = backbone, nn.Linear(8, 8)

    def forward(self, x):
        return self.backbone(x)


def backward(model, x):
    """Return gradients by ``backward()``, which reentrant checkpoints need."""
    model.zero_grad()
    torch.manual_seed(0)
    compute_loss(model(x)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def is_plain(model):
    hooks = any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    return not hooks and not any(isinstance(m, Mixin) or '_lean' in vars(m) for m in model.modules())


def test_report():
    model = Detector(build('stock Swin'))
    report = apply_lean(model, 'sbp')
    done = report.changed
    assert done['backbone.stages.0.blocks.0'] == 'gradients from 0.5 of the positions, preset sbp'
    assert (
        done['backbone.stages.0.downsample'] == done['backbone.stages.2.blocks.1'] == done['backbone.stages.0.blocks.0']
    )
    assert (
        done['backbone.stages.3.blocks.0']
        == done['backbone.patch_embed']
        == done['backbone.norm3']
        == 'exact, stores less'
    )
    assert len(done) == 13 and report.left == dict(neck=UNKNOWN)
    assert str(report).startswith('13 modules changed, 1 unchanged\nchanged: 4 SwinBlock, 2 PatchMerging: gradients')
    assert f'unchanged: 1 Linear (neck): {UNKNOWN}' in str(report)


def test_reports_of_presets():
    found = {name: apply_lean(build('stock Swin'), name).changed for name in PRESETS}
    assert found['none'] == {}
    assert set(found['int8'].values()) == {'stores less, in eight bits; gradients up to 2 % off'}
    assert set(found['reference'].values()) == {
        'exact, in plain autograd',
        'gradients from 0.5 of the positions, preset reference',
    }
    assert set(found['with_cp'].values()) == {'recomputed in the backward pass'}
    assert {name.split('.')[2] for name in found['with_cp']} == {'blocks'}


def test_checkpointing_of_a_block_is_off():
    models = [build('stock Swin', dict(preset='exact'), with_cp=with_cp) for with_cp in (False, True)]
    ran = []
    models[1].stages[2].blocks[0].norm1.register_forward_hook(lambda *args: ran.append(1))
    x = random_images(*X)
    assert_near(backward(models[1], x), backward(models[0], x), 1e-12)
    assert ran == [1]  # a module with a hook runs its own code, once
    changed = apply_lean(build('stock Swin', with_cp=True), 'int8').changed
    assert 'with_cp=True is switched off' in changed['stages.0.blocks.0'] and 'with_cp' not in changed['norm0']


@pytest.mark.parametrize('family', ['SBPConvNeXt', 'SBPViT', 'stock Swin'])
@pytest.mark.parametrize('with_cp', [False, True])
def test_the_preset_that_checkpoints(family, with_cp):
    x = random_images(2, 64, 64)
    expected = backward(build(family, **DEPTH), x)
    assert_near(backward(build(family, dict(preset='with_cp'), with_cp=with_cp, **DEPTH), x), expected, 1e-12)


def test_changed_anew_and_back():
    model, x = build('stock Swin'), random_images(*X)
    before, kind = backward(model, x), type(model.stages[0].blocks[0])
    for preset in ('sbp', 'with_cp', 'int8', 'exact'):
        apply_lean(model, preset)
        assert isinstance(model.stages[0].blocks[0], Checkpointed) == (preset == 'with_cp')
        assert not model._forward_pre_hooks
    assert_near(backward(model, x), before, 1e-10)
    remove_lean(model)
    assert type(model.stages[0].blocks[0]) is kind and is_plain(model)
    assert_near(backward(model, x), before, 0)
    remove_lean(model)
    apply_lean(model, 'sbp')
    assert not apply_lean(model, 'none').changed and is_plain(model)


def test_a_first_step_uses_what_was_bound():
    """A changed module gets an attribute, which is no change of the module."""
    model = build('stock Swin')
    model.train()
    apply_lean(model, verify=False)
    before = {name: m._lean.bound for name, m in model.named_modules() if isinstance(m, LeanModule)}
    compute_loss(model(random_images(1, 64, 64))).backward()
    assert all(model.get_submodule(name)._lean.bound is bound for name, bound in before.items())


def test_some_modules():
    model = build('stock Swin')
    names = ['stages.2.blocks', 'norm0']
    assert [*apply_lean(model, 'exact', modules=names).changed] == ['stages.2.blocks.0', 'stages.2.blocks.1', 'norm0']
    assert [*apply_lean(model, 'sbp', modules='stages.0.blocks').changed] == ['stages.0.blocks.0']
    assert keep_ratios(model) == {(0, 0): 0.5}
    apply_lean(model, 'sbp', modules='stages.0.blocks', keep_ratio=0.25)
    assert keep_ratios(model) == {(0, 0): 0.25}
    backward(model, random_images(*X))
    remove_lean(model)
    assert is_plain(model)


def test_the_hook():
    hook = LeanHook('sbp', keep_ratio=0.25)
    text = hook.apply(Detector(build('stock Swin')))
    assert text.startswith("preset='sbp': 13 modules changed") and 'gradients from 0.25' in text
    assert {name: LeanHook(name).exact for name in PRESETS} == {
        name: preset.gradients == 'exact' for name, preset in PRESETS.items()
    }
    assert LeanHook().settings.preset.name == 'exact' and not LeanHook.exact
    with pytest.raises(ValueError, match="LeanHook has an unknown key 'modles'; did you mean 'modules'"):
        LeanHook(modles=['neck'])


def test_the_hook_finds_the_model_in_wrappers(tmp_path):
    model = Detector(build('stock Swin'))
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert 'backbone.patch_embed' in apply_lean(wrapped).changed
        runner = types.SimpleNamespace(model=wrapped, logger=logging.getLogger(), hooks=[])
        LeanHook('sbp').before_run(runner)
        assert keep_ratios(model)
        remove_lean(wrapped)
    finally:
        torch.distributed.destroy_process_group()
    assert is_plain(model)


def test_student_and_teacher():
    pair = nn.ModuleDict(dict(student=Detector(build('stock Swin')), teacher=Detector(build('stock Swin'))))
    alone, x = build('stock Swin', dict(preset='sbp')), random_images(*X)
    expected = apply_lean(alone, 'sbp').changed
    assert apply_lean(pair, 'sbp').changed == {
        f'{who}.backbone.{name}': done for who in pair for name, done in expected.items()
    }
    assert_near(compute_gradients(pair['student'].backbone, x), compute_gradients(alone, x), 1e-12)
    assert get_draws(pair['student']) is not get_draws(pair['teacher'])
    pair['teacher'].eval()
    with torch.no_grad():
        pair['teacher'](x)
    remove_lean(pair)
    assert is_plain(pair)


class Wrapped(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = build('stock Swin', **options)

    def forward(self, x):
        return self.inner(x=x)  # names its images


@pytest.mark.parametrize('around', [Wrapped, lambda: nn.Sequential(build('stock Swin'))], ids=['module', 'list'])
def test_a_wrapped_backbone(around):
    model, alone, x = Detector(around()), build('stock Swin', dict(preset='sbp')), random_images(*X)
    changed = apply_lean(model, 'sbp').changed
    prefix = next(iter(changed)).split('stages')[0]
    assert len(changed) == 13
    expected = {f'{prefix}{name}': grad for name, grad in backward(alone, x).items()}
    assert_near(backward(model, x), expected, 1e-12)


def test_a_backbone_of_one_stage():
    one = dict(embed_dims=8, depths=(2,), num_heads=(2,), strides=(4,), out_indices=(0,), window_size=3)
    model = SwinTransformer(**one)
    model.train()
    assert keep_ratios(model) == {} and 'patch_embed' in apply_lean(model, 'sbp', blocks=[1]).changed
    model(random_images(*X, dtype=torch.float32))
    assert keep_ratios(model) == {(0, 0): 0.5}


def test_frozen_stages_are_named():
    """mmdet freezes stages when training begins, after the hook has reported the change."""
    report = apply_lean(SwinTransformer(**SWIN, frozen_stages=3), 'sbp')
    frozen = report.frozen
    assert {'patch_embed', 'stages.0.blocks.0', 'stages.1.blocks.0', 'stages.2.blocks.1'} <= {*frozen}
    # The log counts them by themselves: nothing is wrong with them.
    numbers, *lines = str(report).splitlines()
    assert numbers.endswith(f', {len(report.left) - len(frozen)} unchanged, {len(frozen)} frozen')
    assert [line for line in lines if 'frozen' in line] == [line for line in lines if line.startswith('frozen: ')]
    assert not any('gradients' in done for done in report.changed.values())
    report = apply_lean(SwinTransformer(**SWIN, frozen_stages=1), 'sbp')
    assert 'patch_embed' in report.left and report.changed['stages.1.blocks.0'].startswith('gradients from 0.5')


@pytest.mark.parametrize(
    ('family', 'key'),
    [('SBPConvNeXt', 'frozen_stages'), ('SBPViT', 'frozen_blocks'), ('SBPSwinTransformer', 'frozen_stages')],
)
def test_a_backbone_whose_thinned_layers_are_all_frozen_says_so_once(family, key, monkeypatch):
    told = []
    monkeypatch.setattr(lean_models, 'print_log', lambda text, level=20, **options: told.append((level, text)))
    build(family, dict(preset='sbp'), **{key: 1}).train()
    build(family, dict(preset='exact'), **{key: 3}).train()
    changed = build(family, dict(preset='sbp'))
    apply_lean(changed, 'exact')
    changed.train()
    remove_lean(changed)
    changed.train()
    said = [text.splitlines()[0] for level, text in told if level == logging.INFO]
    assert len(told) == len(said) == 3 and said[2].startswith(f"{family}: preset='sbp': ")
    backbone = build(family, dict(preset='sbp'), **{key: 3})
    backbone.eval().train()
    assert [text for level, text in told if level == logging.WARNING] == [
        f'{family}: all layers that sbp_cfg thins are frozen, so no positions are dropped'
    ]


# Calls that raise an error and change nothing.


def in_fsdp():
    model = build('stock Swin')
    wrapper = nn.Module()
    wrapper._fsdp_wrapped_module = model.stages[0].blocks[0]  # as FSDP holds what it wraps
    model.stages[0].blocks[0] = wrapper
    return model


@pytest.mark.parametrize(
    ('make', 'keys', 'message'),
    [
        (
            lambda: Detector(ResNet(18)),
            dict(preset='sbp'),
            r"preset='sbp' drops positions.*no module of Detector.*'exact_min'.*docs/extending.md",
        ),
        (lambda: nn.Linear(2, 2), {}, r'no module of Linear.*CheckpointModulesHook.*docs/extending.md'),
        (
            lambda: Detector(build('SBPConvNeXt', dict(preset='sbp'))),
            {},
            'backbone has an sbp_cfg of its own; write sbp_cfg=None',
        ),
        (
            lambda: Detector(build('SBPConvNeXt', dict(preset='sbp'))),
            dict(preset='none'),
            'backbone has an sbp_cfg of its own; write sbp_cfg=None',
        ),
        (in_fsdp, {}, 'in FSDP.*before wrapping'),
        (lambda: build('stock Swin'), dict(modules=['neck']), r"'neck' does not exist; the model has \['patch_embed'"),
        (lambda: build('stock Swin'), dict(preset='fast'), "preset='fast' is unknown"),
    ],
)
def test_refusals(make, keys, message):
    model = make()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        apply_lean(model, **keys)
    assert [type(m) for m in model.modules()] == kinds


def test_beside_a_backbone_with_settings_of_its_own():
    model = Detector(build('SBPConvNeXt', dict(preset='sbp')))
    with pytest.raises(
        ValueError, match=r"preset='exact' supports nothing in modules=\['neck'\] of Detector.*name other modules"
    ):
        apply_lean(model, modules=['neck'])
    assert keep_ratios(model)


def test_a_layer_alone_has_no_pass():
    model, x = build('SBPConvNeXt', dict(preset='sbp')), random_images(2, 64, 64)
    model.forward(x)  # past the hooks of the module: a pass all the same
    with pytest.raises(ValueError, match='call the backbone, not the layer'):
        model.stages[0][0](torch.randn(2, model.stages[0][0].norm.weight.numel(), 16, 16, dtype=x.dtype))


def test_a_map_of_another_size_is_an_error():
    model = build('stock ConvNeXt', dict(preset='sbp'))
    model.downsample_layers[0].register_forward_pre_hook(lambda module, args: (args[0][..., ::2],))
    with pytest.raises(ValueError, match=r'has a map of 128 positions, but 256 were expected.*stride=4'):
        model(random_images(2, 64, 64))


@pytest.mark.parametrize('family', FAMILIES)
def test_export_and_tracing_run_the_plain_code(family):
    model = build(family, dict(preset='sbp'))
    model.eval()
    with torch.no_grad():
        traced = torch.jit.trace(model, random_images(1, 64, 64), check_trace=False)
    actual, expected = (f(random_images(1, 64, 64, seed=1)) for f in (traced, model))
    torch.testing.assert_close(list(actual), list(expected))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.compiler, 'is_compiling'), reason='a compiler of before torch 2.3')
@pytest.mark.parametrize(('preset', 'gradients'), [('exact_min', True), ('sbp', True), ('sbp', False)])
def test_compilers_find_the_plain_code_in_evaluation(preset, gradients):
    """An evaluated model is one graph without breaks, as the stock model is."""
    if preset == 'sbp':
        model = build('SBPConvNeXt', dict(preset='sbp')).float()
    else:
        model = ResNet(18, base_channels=4)
        apply_lean(model, preset)
    model.eval()
    x = torch.randn(1, 3, 64, 64)
    torch.compiler.reset()
    with torch.set_grad_enabled(gradients):
        compiled, expected = torch.compile(model, backend='eager', fullgraph=True)(x), model(x)
    torch.testing.assert_close([*compiled], [*expected])


def test_a_backbone_that_takes_sbp_cfg_can_be_changed_from_outside():
    assert 'backbone.stages.0.0' in apply_lean(Detector(SBPConvNeXt('atto')), 'int8').changed


def test_a_class_of_the_same_name_is_named_with_its_module():
    from torch.ao.nn.qat import Conv2d
    from torch.ao.quantization import default_qat_qconfig

    model = ResNet(18, base_channels=4)
    conv = Conv2d(4, 4, 3, padding=1, bias=False, qconfig=default_qat_qconfig)
    model.layer1[0].conv1 = conv
    model.layer1[1].bn1 = nn.Identity()
    left = apply_lean(model, 'exact').left
    assert left.keys() == {'layer1.0.conv1', 'layer1.1.bn1'}  # and not the stem, which the changed backbone itself runs
    assert 'it is a torch.ao.nn.qat.modules.conv.Conv2d,' in left['layer1.0.conv1']
    assert 'it is an Identity,' in left['layer1.1.bn1']
