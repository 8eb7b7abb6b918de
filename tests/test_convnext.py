"""The backbone's values and gradients against plain ConvNeXt and against the definition of SBP."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import FP16, needs_fp16
from oracles import (
    SMALL,
    assert_near,
    gradients,
    image,
    loss_of,
    masks_of,
    oracle_convnext,
    record_keep,
    relative_error,
    small_backbone,
)

from sbp_mmdet.analysis import saved_bytes

CFGS = {
    'fused': dict(),
    'recompute': dict(recompute=True),
    'block': dict(recompute='block'),
    'reference': dict(implementation='reference'),
    'random': dict(sampler='random', keep_ratio=0.3),
    'per-block': dict(keep_ratio=[0.25, 1, 0.4, 0.5, 0.75], sampler='random'),
    'partial': dict(blocks=(0, 1, 0, 1), downsample=False, sampler='random'),
    'downsample': dict(blocks=(0, 0, 0, 0), implementation='reference'),
}
ALL = pytest.mark.parametrize('sbp_cfg', CFGS.values(), ids=CFGS.keys())
FOUR = [CFGS[name] for name in ('fused', 'recompute', 'block', 'reference')]
EACH_IMPLEMENTATION = pytest.mark.parametrize('sbp_cfg', FOUR, ids=['fused', 'recompute', 'block', 'reference'])


def oracle_gradients(backbone, x, seen, out_dtype=None, **kwargs):
    """Gradients by the definition, at the positions that the backbone used in its last forward pass."""
    state = dict(backbone.named_parameters())
    masks = masks_of(seen, *x.shape[-2:])

    def forward(x):
        return [out.to(out_dtype or out.dtype) for out in oracle_convnext(state, x, backbone.depths, masks, **kwargs)]

    return gradients(backbone, x, forward)


@ALL
@pytest.mark.parametrize('size', [(2, 64, 64), (1, 70, 93)], ids=['even', 'odd'])
def test_forward_is_that_of_the_plain_backbone(sbp_cfg, size):
    """In training, with equal randomness of the stochastic depth."""
    plain, backbone = small_backbone(drop_path_rate=0.5), small_backbone(sbp_cfg, drop_path_rate=0.5)
    x = image(*size)
    torch.manual_seed(3)
    expected = plain(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    actual = backbone(x)
    assert torch.equal(torch.get_rng_state(), after)  # the mask takes none of the randomness
    for got, want in zip(actual, expected, strict=True):
        assert got.requires_grad and relative_error(got, want) < 1e-12


@ALL
@pytest.mark.parametrize('size', [(2, 64, 64), (1, 70, 93)], ids=['even', 'odd'])
def test_gradients_are_those_of_the_definition(sbp_cfg, size):
    backbone = small_backbone(sbp_cfg, drop_path_rate=0.5)
    seen = record_keep(backbone)
    x = image(*size)
    torch.manual_seed(3)
    actual = gradients(backbone, x)
    assert {key for key, keep in seen.items() if keep is not None} == backbone.keep_ratios().keys()
    torch.manual_seed(3)
    assert_near(actual, oracle_gradients(backbone, x, seen, drop_path_rate=0.5), 1e-10)


@ALL
def test_plain_gradients_differ(sbp_cfg):
    """Guards the tests above: the masks are no formality."""
    backbone, x = small_backbone(sbp_cfg), image()
    actual, plain = gradients(backbone, x), gradients(small_backbone(), x)
    assert relative_error(actual['image'], plain['image']) > 0.01


def test_plain_backbone_is_convnext():
    backbone, x = small_backbone(), image()
    assert_near(gradients(backbone, x), oracle_gradients(backbone, x, {}), 1e-10)


@EACH_IMPLEMENTATION
@pytest.mark.parametrize('linear_pw_conv', [True, False])
@pytest.mark.parametrize('layer_scale_init_value', [0.0, 1e-6])
def test_forms_of_the_block(sbp_cfg, linear_pw_conv, layer_scale_init_value):
    backbone = small_backbone(
        sbp_cfg, linear_pw_conv=linear_pw_conv, layer_scale_init_value=layer_scale_init_value, out_indices=(1, -1)
    )
    seen, x = record_keep(backbone), image(1)
    assert_near(gradients(backbone, x), oracle_gradients(backbone, x, seen), 1e-10)


@EACH_IMPLEMENTATION
def test_keep_ratio_one_is_exact(sbp_cfg):
    x = image()
    exact = gradients(small_backbone(), x)
    for ratio in (1, 1.0, [1.0] * 5):
        assert_near(gradients(small_backbone(sbp_cfg | dict(keep_ratio=ratio)), x), exact, 1e-10)


@EACH_IMPLEMENTATION
def test_checkpointing_replays_the_same_positions(sbp_cfg):
    backbone = small_backbone(sbp_cfg | dict(sampler='random'), with_cp=True, drop_path_rate=0.5)
    seen, x = record_keep(backbone), image()
    torch.manual_seed(3)
    actual = gradients(backbone, x)
    torch.manual_seed(3)
    assert_near(actual, oracle_gradients(backbone, x, seen, drop_path_rate=0.5), 1e-10)


@EACH_IMPLEMENTATION
def test_channels_last(sbp_cfg):
    x = image(2, 70, 64)
    expected = gradients(small_backbone(sbp_cfg), x)
    last = dict(memory_format=torch.channels_last)
    backbone = small_backbone(sbp_cfg).to(**last)
    assert_near(gradients(backbone, x.contiguous(**last)), expected, 1e-10)
    assert all(out.is_contiguous(**last) for out in backbone(x.contiguous(**last)))


@EACH_IMPLEMENTATION
def test_frozen_stages(sbp_cfg):
    """Frozen parameters get no gradient, the others the same as without freezing."""
    backbone = small_backbone(sbp_cfg | dict(sampler='random'), frozen_stages=2)
    seen, x = record_keep(backbone), image()
    actual = gradients(backbone, x)
    assert not any(name.startswith(('stages.0', 'stages.1', 'downsample_layers.1')) for name in actual)
    assert {key for key, keep in seen.items() if keep is not None} == {(2, 'downsample'), (2, 0), (2, 1)}
    assert_near(actual, oracle_gradients(backbone, x, seen), 1e-10)


@EACH_IMPLEMENTATION
def test_single_precision(sbp_cfg):
    backbone, x = small_backbone(sbp_cfg, dtype=torch.float32), image(dtype=torch.float32)
    seen = record_keep(backbone)
    actual = gradients(backbone, x)
    assert_near(actual, oracle_gradients(backbone.double(), x.double(), seen), 2e-5)


@pytest.fixture
def norms_in_fp32(monkeypatch):
    """CUDA's autocast rule, which the oracle follows, for the norms of Algorithm 1 too."""
    layer_norm = F.layer_norm

    def in_fp32(x, *args):
        with torch.autocast('cpu', enabled=False):
            return layer_norm(x if x.dtype == torch.float64 else x.float(), *args)

    monkeypatch.setattr(F, 'layer_norm', in_fp32)


@pytest.mark.parametrize('sbp_cfg', [CFGS[name] for name in ('fused', 'block', 'reference')], ids=str)
@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16])
def test_autocast(sbp_cfg, dtype, norms_in_fp32):
    """The error against the truth is no larger than that of plain autograd under autocast: relative to each gradient's
    norm, over enough parameters and draws that the ratio is a property of the arithmetic (0.9 to 1.1 here)."""
    arch = dict(depths=[3, 1, 1, 1], channels=SMALL['channels'])
    squares = {}
    for seed in range(12):
        torch.manual_seed(seed)  # of the mask
        backbone = small_backbone(sbp_cfg, dtype=torch.float32, seed=seed, arch=arch)
        seen, x = record_keep(backbone), image(dtype=torch.float32, seed=seed)
        with torch.autocast('cpu', dtype):
            # As the neck's convolutions have it, the outputs go on in reduced precision.
            actual = gradients(backbone, x, lambda x: [out.to(dtype) for out in backbone(x)])  # noqa: B023
            plain = oracle_gradients(backbone, x, seen, out_dtype=dtype)
        truth = oracle_gradients(backbone.double(), x.double(), seen)
        for name, value in truth.items():
            sums = squares.setdefault(re.sub(r'\.\d+|(?<=norm)\d', '', name), [0.0, 0.0])
            for i, grads in enumerate((actual, plain)):
                sums[i] += ((grads[name] - value).norm() / value.norm()).square().item()
    ratios = {kind: (mine / reference) ** 0.5 for kind, (mine, reference) in squares.items()}
    assert len(ratios) == 14 and max(ratios.values()) <= 1.2, ratios


@needs_fp16
@EACH_IMPLEMENTATION
def test_gradient_scaler(sbp_cfg):
    """A step with scaled fp16 gradients is about the step with exact ones."""
    backbone, x = small_backbone(sbp_cfg, dtype=torch.float32), image(dtype=torch.float32)
    seen = record_keep(backbone)
    before = {name: p.detach().clone() for name, p in backbone.named_parameters()}
    optimizer = torch.optim.SGD(backbone.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**4)
    with torch.autocast('cpu', torch.float16):
        outs = backbone(x)
    scaler.scale(loss_of(outs)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**4  # nothing overflowed
    steps = {name: before[name] - p.detach() for name, p in backbone.named_parameters()}
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            p.copy_(before[name])
    expected = oracle_gradients(backbone, x, seen)
    del expected['image']
    assert_near(steps, expected, 0.05)


@pytest.mark.parametrize('sbp_cfg', [CFGS['fused'], CFGS['reference']], ids=['fused', 'reference'])
def test_compiled(sbp_cfg, iteration):
    iteration(5)
    arch = dict(depths=[1, 1], channels=[8, 12])
    backbone = small_backbone(sbp_cfg | dict(blocks=(1, 1)), arch=arch, out_indices=(0, 1))
    x = image(1, 16, 24)
    expected = gradients(backbone, x)
    iteration(6)
    gradients(backbone, x)
    iteration(5)
    torch.compiler.reset()
    assert_near(gradients(backbone, x, torch.compile(backbone, backend='aot_eager')), expected, 1e-10)


@pytest.mark.parametrize('sbp_cfg', FOUR[:2], ids=['fused', 'recompute'])
def test_stored_bytes_follow_the_ratio(sbp_cfg):
    """What the ratio adds: for each SBP layer and kept position x-hat, 1 / deviation and the hidden layer."""
    x, itemsize, channels = image(2, 128, 128), 8, SMALL['channels']

    def stored(ratio):
        backbone = small_backbone(sbp_cfg | dict(keep_ratio=ratio))
        return saved_bytes(lambda: backbone(x), exclude=[x, *backbone.parameters()])

    hidden = 0 if sbp_cfg.get('recompute') else 4
    quarter = 0
    for i, depth in enumerate(SMALL['depths'][:3]):
        positions = (32 // 2**i) ** 2 // 4
        quarter += 2 * positions * depth * (channels[i] * (1 + hidden) + 1) * itemsize
        quarter += 2 * positions * 4 * (channels[i - 1] + 1) * itemsize if i else 0
        quarter += positions * 8  # the indices, once for all layers of a stage
    assert stored(0.5) - stored(0.25) == quarter
    assert stored(0.75) - stored(0.5) == quarter


def test_stored_bytes_of_the_implementations():
    x = image(2, 128, 128)

    def stored(sbp_cfg, **kwargs):
        backbone = small_backbone(sbp_cfg, **kwargs)
        return saved_bytes(lambda: backbone(x), exclude=[x, *backbone.parameters()])

    plain, reference, fused, recompute, block = (stored(cfg) for cfg in (None, FOUR[3], *FOUR[:3]))
    assert block < recompute < fused < reference < plain
    assert block < stored(None, with_cp=True) * 1.2
    assert stored(dict(keep_ratio=0.25, implementation='reference')) < reference
    assert stored(dict(keep_ratio=1.0)) < plain
