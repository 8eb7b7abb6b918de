"""Each invalid setting gets a message with its value and the remedy."""

import threading

import pytest
import torch
from cases import CONVNEXT, SWIN, VIT, build
from torch import nn

import sbp_mmdet
from sbp_mmdet import LeanHook, SBPConvNeXt, SBPSwinTransformer, SBPViT, apply_lean
from sbp_mmdet.adapters.parameters import CachedSettings
from sbp_mmdet.apply import keep_ratios
from sbp_mmdet.presets import PRESETS, Settings
from sbp_mmdet.stochastic_backprop.config import ATTENTION_MODES

DEPTHS = (3, 3, 9, 3)


def ratios(depths=DEPTHS, blocks=(3, 3, 6, 0), from_end=False, **keys):
    return Settings.parse(dict(preset='sbp', **keys)).layer_ratios(depths, blocks, from_end)


def test_presets_are_told_in_their_order():
    assert [*PRESETS] == ['exact', 'exact_min', 'int8', 'sampled', 'sbp', 'none', 'with_cp', 'reference']
    for name, preset in PRESETS.items():
        assert preset.name == name and preset.meaning
        assert preset.gradients in ('exact', 'int8', 'sampled', 'sbp')
        assert Settings.parse(dict(preset=name)).preset is preset
    assert [name for name, preset in PRESETS.items() if preset.thins] == ['sbp', 'reference']


def test_defaults_are_the_papers():
    settings = Settings.parse(dict(preset='sbp'))
    assert (settings.keep_ratio, settings.sampler, settings.downsample, settings.attention) == (
        0.5,
        'grid',
        True,
        'qkv',
    )
    assert settings.skip_dropped_images and settings.modules is None and settings.blocks is None


@pytest.mark.parametrize(
    ('arch', 'blocks'),
    [('tiny', (3, 3, 6, 0)), ('base', (3, 3, 21, 0)), ('small', (3, 3, 21, 0)), ('atto', (2, 2, 6, 0))],
)
def test_blocks_of_an_architecture(arch, blocks):
    with torch.device('meta'):
        backbone = SBPConvNeXt(arch, sbp_cfg=dict(preset='sbp'))
    expected = {(i, j): 0.5 for i, n in enumerate(blocks) for j in range(n)}
    assert backbone.keep_ratios() == expected | {(1, 'downsample'): 0.5, (2, 'downsample'): 0.5}


def test_which_layers_a_list_of_ratios_means():
    small = ratios((1, 2, 2, 1), (1, 2, 2, 0), keep_ratio=[0.25, 1, 0.5, 0.75, 0.125])
    # The layer that leads into a stage goes with the stage's first block; ratios of 1 do not appear.
    assert small == {(0, 0): 0.25, (1, 1): 0.5, (2, 0): 0.75, (2, 1): 0.125, (2, 'downsample'): 0.75}
    assert set(ratios(blocks=(1, 0, 2, 0), downsample=False)) == {(0, 0), (2, 0), (2, 1)}
    assert set(ratios(blocks=(0, 0, 0, 0))) == {(1, 'downsample'), (2, 'downsample')}
    assert ratios(blocks=(0, 0, 0, 0), downsample=False) == ratios(keep_ratio=1.0) == {}
    assert set(ratios((12,), (8,), from_end=True)) == {(0, i) for i in range(4, 12)}
    assert Settings.parse(dict(preset='exact')).layer_ratios(DEPTHS, DEPTHS) == {}


BAD = [
    (dict(preset='best'), r"preset='best' is unknown; choose one of \['exact', 'exact_min'"),
    (dict(preset=['exact']), r"preset=\['exact'\] is unknown"),
    (dict(preset=None), 'preset=None is unknown'),
    (dict(keep_ratio=0), r'keep_ratio=0 .*\(0, 1\]'),
    (dict(keep_ratio=-0.5), r'keep_ratio=-0.5 .*\(0, 1\]'),
    (dict(keep_ratio=1.5), r'keep_ratio=1.5 .*\(0, 1\]'),
    (dict(keep_ratio='half'), r"keep_ratio='half' .*\(0, 1\]"),
    (dict(keep_ratio=None), r'keep_ratio=None .*\(0, 1\]'),
    (dict(keep_ratio={'stage1': 0.5}), r'keep_ratio=.*stage1.*\(0, 1\]'),
    (dict(keep_ratio=0.333), r'keep_ratio=0.333 .*nearest: .*1/3'),
    (dict(keep_ratio=[0.5] * 11), r'11 ratios for the 12 thinned blocks .*one for each, or a single number'),
    (dict(keep_ratio=[]), r'0 ratios for the 12 thinned blocks'),
    (dict(blocks=(0, 0, 0, 0), keep_ratio=[]), '0 ratios for the 0 thinned blocks'),
    (dict(keep_ratio=[0.5] * 11 + [2]), r'keep_ratio=2 .*\(0, 1\]'),
    (dict(keep_ratio=[0.5] * 11 + [True]), r'keep_ratio=True .*\(0, 1\]'),
    (dict(keep_ratio=[[0.5] * 3, [0.5] * 3], blocks=(1, 1, 0, 0)), r'keep_ratio=\[0.5, .*\(0, 1\]'),
    (dict(sampler='gird'), r"sampler='gird' .*'grid', 'random'"),
    (dict(sampler=['grid']), r"sampler=\['grid'\] .*'grid', 'random'"),
    (dict(sampler='objects'), r"sampler='objects' .*'grid', 'random'"),
    (dict(attention='all'), "attention='all' .*'qkv', 'query', 'head'"),
    (dict(keep_ration=0.5), r"'keep_ration'; did you mean 'keep_ratio'\?"),
    (dict(xyz=1), r"'xyz'; known keys are .*'keep_ratio'"),
    (dict(blocks=(3, 3, 10, 0)), r'blocks\[2\]=10 .*from 0 to the 9'),
    (dict(blocks=(4, 3, 9, 0)), r'blocks\[0\]=4 .*from 0 to the 3'),
    (dict(blocks=(3, 3, -1, 0)), r'blocks\[2\]=-1 '),
    (dict(blocks=(3, 2.5, 1, 0)), r'blocks\[1\]=2.5 .*whole number'),
    (dict(blocks=(3, True, 1, 0)), r'blocks\[1\]=True .*whole number'),
    (dict(blocks=(3, '3', 1, 0)), r"blocks\[1\]='3' .*whole number"),
    (dict(blocks=(3, float('nan'), 1, 0)), r'blocks\[1\]=nan .*whole number'),
    (dict(blocks=(3, 3, 9)), r'blocks=\(3, 3, 9\) .*each of the 4 stages'),
    (dict(blocks=12), r'blocks=12 .*each of the 4 stages'),
    (dict(downsample=1), r'downsample=1 must be True or False'),
    (dict(skip_dropped_images='yes'), r"skip_dropped_images='yes' must be True or False"),
    (dict(modules=5), r"modules=5 must be a list of names of submodules, such as \['neck'\]"),
    (dict(modules=[1]), r'modules=\[1\] must be a list of names'),
]


@pytest.mark.parametrize(('keys', 'message'), BAD, ids=str)
def test_bad_values(keys, message):
    with pytest.raises(ValueError, match=message):
        ratios(**keys) if 'preset' not in keys else Settings.parse(keys)


@pytest.mark.parametrize('cfg', [True, 0.5, 'exact', ['exact']], ids=str)
def test_sbp_cfg_is_a_dict(cfg):
    with pytest.raises(ValueError, match=r"sbp_cfg=.* must be a dict such as dict\(preset='exact'\), or None"):
        SBPConvNeXt(**CONVNEXT, sbp_cfg=cfg)


def test_sbp_cfg_without_a_preset_is_the_papers_method():
    assert Settings.parse(dict(keep_ratio=0.25)).preset is PRESETS['sbp']
    assert SBPConvNeXt(**CONVNEXT, sbp_cfg=dict(keep_ratio=0.25)).sbp == Settings.parse(
        dict(preset='sbp', keep_ratio=0.25)
    )


@pytest.mark.parametrize(('name', 'near'), [('exakt', 'exact'), ('papers', 'sbp')])
def test_a_misspelt_preset(name, near):
    with pytest.raises(ValueError, match=rf"preset='{name}' is unknown; did you mean '{near}'\?"):
        apply_lean(build('stock Swin'), name)


@pytest.mark.parametrize('preset', [name for name, preset in PRESETS.items() if not preset.thins])
@pytest.mark.parametrize(
    'keys', [dict(keep_ratio=0.5), dict(sampler='grid'), dict(blocks=[1]), dict(downsample=True), dict(attention='qkv')]
)
def test_keys_that_mean_nothing_for_a_preset(preset, keys):
    (key,) = keys
    if (preset, key) == ('sampled', 'keep_ratio'):
        return
    with pytest.raises(ValueError, match=rf"LeanHook: preset='{preset}' .* takes no {key};.*take preset='sbp'"):
        LeanHook(preset, **keys)


@pytest.mark.parametrize('preset', ['none', 'with_cp'])
def test_plain_modules_skip_no_images(preset):
    with pytest.raises(ValueError, match=f"skip_dropped_images has no effect with preset='{preset}'"):
        LeanHook(preset, skip_dropped_images=True)


@pytest.mark.parametrize(
    ('kind', 'options', 'keys', 'message'),
    [
        (
            SBPConvNeXt,
            CONVNEXT,
            dict(attention='query'),
            "attention='query' has no effect in SBPConvNeXt; leave it out",
        ),
        (SBPSwinTransformer, SWIN, dict(attention='head'), "attention='head' has no effect in SBPSwinTransformer"),
        (SBPViT, VIT, dict(downsample=False), 'downsample=False has no effect in SBPViT'),
        (SBPViT, VIT, dict(blocks=[4]), r'blocks\[0\]=4'),
        (SBPSwinTransformer, SWIN, dict(blocks=[1, 1]), r'blocks=\[1, 1\] must list one number for each of the 4'),
        (SBPConvNeXt, CONVNEXT | dict(use_grn=True, layer_scale_init_value=0.0), {}, 'GRN .*exact'),
        (SBPConvNeXt, CONVNEXT | dict(act_cfg=dict(type='ReLU')), {}, 'it is a ReLU, and only GELU is supported'),
        (
            SBPSwinTransformer,
            SWIN | dict(act_cfg=dict(type='ReLU')),
            {},
            'it is a ReLU, and only GELU is supported',
        ),
        (SBPSwinTransformer, SWIN | dict(drop_rate=0.1), {}, r'set its rate to 0 \(drop_rate'),
        (
            SBPConvNeXt,
            CONVNEXT,
            dict(modules=['stages.9']),
            r"'stages.9' does not exist; the model has \['downsample_layers'",
        ),
        (SBPConvNeXt, CONVNEXT, dict(modules=[]), r'modules=\[\] must name submodules'),
        (SBPConvNeXt, CONVNEXT, dict(modules='norm3'), r"drops positions, and nothing in modules=\['norm3'\] of SBP"),
    ],
    ids=str,
)
def test_what_a_backbone_cannot_do(kind, options, keys, message):
    with pytest.raises(ValueError, match=message):
        kind(**options, sbp_cfg=dict(preset='sbp', **keys))
    plain = kind(**options)
    with pytest.raises(ValueError, match=message):
        apply_lean(plain, 'sbp', **keys)
    assert not any(isinstance(m, sbp_mmdet.surgery.Mixin) for m in plain.modules()) and not plain._forward_pre_hooks


def test_any_activation_with_the_reference():
    """Algorithm 1 works with any activation."""
    options = dict(act_cfg=dict(type='ReLU'))
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    plain, reference = (build('SBPConvNeXt', cfg, **options) for cfg in (None, dict(preset='reference')))
    for a, b in zip(plain(x), reference(x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('attention', ATTENTION_MODES)
def test_values_are_taken(attention):
    with torch.device('meta'):
        vit = SBPViT('tiny', sbp_cfg=dict(preset='sbp', attention=attention, blocks=[12], keep_ratio=0.25))
    assert keep_ratios(nn.ModuleDict(dict(backbone=vit))) == {(0, i): 0.25 for i in range(12)}
    assert vit.sbp.attention == attention


def test_another_thread_changes_a_cache_while_it_is_read():
    cache, threads = CachedSettings(float), [threading.Thread(target=lambda: cache(2))]

    class Number(int):
        """A number during whose comparison another thread runs."""

        def __eq__(self, other):
            if threads:
                thread = threads.pop()
                thread.start()
                thread.join()
            return int(self) == int(other)

        __hash__ = int.__hash__

    cache(1)
    assert cache(Number(1)) == 1
    assert not threads and cache(2) == 2
