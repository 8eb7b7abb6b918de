"""``sbp_cfg``: defaults, and a message with value and remedy for each value that cannot be."""

import pytest

from sbp_mmdet.models.convnext import PAPER_BLOCKS
from sbp_mmdet.settings import SBPSettings

TINY = (3, 3, 9, 3)


def parse(arch='tiny', depths=TINY, **cfg):
    return SBPSettings.parse(cfg, depths, PAPER_BLOCKS.get(str(arch)))


@pytest.mark.parametrize(
    ('arch', 'depths', 'blocks'),
    [
        ('tiny', (3, 3, 9, 3), (3, 3, 6, 0)),  # the paper's
        ('base', (3, 3, 27, 3), (3, 3, 21, 0)),  # the paper's
        ('small', (3, 3, 27, 3), (3, 3, 27, 0)),
        ('atto', (2, 2, 6, 2), (2, 2, 6, 0)),
        (dict(depths=[1, 2], channels=[8, 16]), (1, 2), (1, 0)),
    ],
)
def test_defaults(arch, depths, blocks):
    settings = parse(arch, depths)
    assert settings.blocks == blocks
    assert settings.keep_ratio == (0.5,) * sum(blocks)
    assert (settings.sampler, settings.downsample) == ('grid', True)
    assert (settings.implementation, settings.recompute) == ('fused', False)


def test_values_are_taken():
    ratios = [0.25, 0.5, 0.75, 1.0]
    settings = parse(
        keep_ratio=ratios,
        sampler='random',
        blocks=[1, 0, 2, 1],
        downsample=False,
        implementation='reference',
    )
    assert settings.keep_ratio == tuple(ratios)
    assert (settings.sampler, settings.blocks, settings.downsample) == ('random', (1, 0, 2, 1), False)
    assert settings.implementation == 'reference'
    assert parse(recompute=True).recompute is True
    assert parse(recompute='block').recompute == 'block'
    assert (parse().dropped, parse().storage) == ('zero', 'native')
    settings = parse(dropped='nearest', storage='int8')
    assert (settings.dropped, settings.storage) == ('nearest', 'int8')
    assert (parse().skip_dropped_images, parse(skip_dropped_images=True).skip_dropped_images) == (False, True)
    plain = parse(dropped='zero', storage='native', implementation='reference')
    assert (plain.dropped, plain.storage) == ('zero', 'native')


def test_share_of_objects():
    assert parse().object_share is None and parse(sampler='random', object_share=None).object_share is None
    assert parse(sampler='objects').object_share == 0.7
    assert parse(sampler='objects', object_share=1).object_share == 1


def test_one_ratio_is_for_all_and_no_block_needs_any():
    assert parse(keep_ratio=0.25).keep_ratio == (0.25,) * 12
    assert parse(keep_ratio=0.25, blocks=(0, 0, 0, 0)).keep_ratio == (0.25,)  # the downsampling layers'


@pytest.mark.parametrize(
    ('cfg', 'message'),
    [
        (dict(keep_ratio=0), r'keep_ratio=0 .*\(0, 1\]'),
        (dict(object_share=0.5), "object_share=0.5 needs sampler='objects', not 'grid'"),
        (dict(sampler='objects', object_share=1.5), 'object_share=1.5 .* from 0 to 1'),
        (dict(sampler='objects', object_share=True), 'object_share=True .* from 0 to 1'),
        (dict(keep_ratio=-0.5), r'keep_ratio=-0.5 .*\(0, 1\]'),
        (dict(keep_ratio=1.5), r'keep_ratio=1.5 .*\(0, 1\]'),
        (dict(keep_ratio='half'), r"keep_ratio='half' .*\(0, 1\]"),
        (dict(keep_ratio=None), r'keep_ratio=None .*\(0, 1\]'),
        (dict(keep_ratio={'stage1': 0.5}), r'keep_ratio=.*stage1.*\(0, 1\]'),
        (dict(keep_ratio=0.333), r'keep_ratio=0.333 .*nearest: .*1/3'),
        (dict(keep_ratio=[0.5] * 11), r'11 ratios for the 12 SBP blocks .*one per block, or a single number'),
        (dict(keep_ratio=[]), r'0 ratios for the 12 SBP blocks'),
        (dict(keep_ratio=[0.5] * 11 + [2]), r'keep_ratio=2 .*\(0, 1\]'),
        (dict(keep_ratio=[0.5] * 11 + [True]), r'keep_ratio=True .*\(0, 1\]'),
        (dict(keep_ratio=[[0.5] * 3, [0.5] * 3], blocks=(1, 1, 0, 0)), r'keep_ratio=\[0.5, .*\(0, 1\]'),
        (dict(sampler='gird'), r"sampler='gird' .*'grid', 'random'"),
        (dict(sampler=['grid']), r"sampler=\['grid'\] .*'grid', 'random'"),
        (dict(implementation='triton'), r"implementation='triton' .*'fused', 'reference'"),
        (dict(keep_ration=0.5), r"'keep_ration'; did you mean 'keep_ratio'\?"),
        (dict(recomputes=True), r"'recomputes'; did you mean 'recompute'\?"),
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
        (dict(recompute='yes'), r"recompute='yes' .*\(False, True, 'block'\)"),
        (dict(dropped='near'), r"dropped='near' .*'zero', 'nearest'"),
        (dict(storage='int4'), r"storage='int4' .*'native', 'int8'"),
        (dict(dropped='nearest', implementation='reference'), r"dropped='nearest' needs implementation='fused'"),
        (dict(storage='int8', implementation='reference'), r"storage='int8' needs implementation='fused'"),
        (dict(recompute=1), r"recompute=1 .*\(False, True, 'block'\)"),
        (dict(recompute='block', implementation='reference'), r"recompute='block' .*'fused'.*with_cp=True"),
        (dict(recompute=True, implementation='reference'), r"recompute=True .*'fused'.*'reference'.*with_cp=True"),
    ],
    ids=str,
)
def test_bad_values(cfg, message):
    with pytest.raises(ValueError, match=message):
        parse(**cfg)


@pytest.mark.parametrize('cfg', [True, 0.5, 'fused'], ids=str)
def test_sbp_cfg_must_be_a_dict(cfg):
    with pytest.raises(ValueError, match="unknown key '1'"):
        SBPSettings.parse({1: cfg}, TINY)
    with pytest.raises(ValueError, match='sbp_cfg'):
        SBPSettings.parse(cfg, TINY)
