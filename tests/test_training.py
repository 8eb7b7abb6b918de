"""Every family trains with every preset as the table of tests/cases.py says."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import (
    FAMILIES,
    LEAN,
    OWN,
    THIN,
    build,
    build_oracle,
    compute_expected_gradients,
    compute_lean_and_expected,
    compute_plain_gradients,
    compute_smooth_gradients,
    count_model_bytes,
    get_draws,
    run_plain,
)
from helpers import needs_fp16
from mmengine.model import ExponentialMovingAverage
from oracles import assert_near, compute_gradients, compute_loss, random_images, relative_error
from torch import nn

from sbp_mmdet.ops.channel_mlp import channel_mlp
from sbp_mmdet.presets import PRESETS

EACH_FAMILY = pytest.mark.parametrize('family', FAMILIES)
# Where no arithmetic matters: a preset that computes again and one that thins; all presets with one family.
PAIRS = [(f, p) for f in FAMILIES for p in LEAN if p in ('exact_min', 'sbp') or f == 'SBPSwinTransformer']
EACH_ONCE = pytest.mark.parametrize(('family', 'preset'), PAIRS)
SMALL, ODD, DEPTH = (3, 64, 96), (2, 70, 93), dict(drop_path_rate=0.5)
# More than a preset says: keys of presets that thin.
KEYS = {
    'random': (OWN, dict(sampler='random', keep_ratio=0.3)),
    'list': (['SBPConvNeXt', 'stock ConvNeXt'], dict(keep_ratio=[0.25, 1, 0.4, 0.5, 0.75], sampler='random')),
    'blocks': (['SBPConvNeXt', 'SBPSwinTransformer'], dict(blocks=(0, 1, 0, 1), downsample=False)),
    'downsample': (['SBPConvNeXt', 'SBPSwinTransformer'], dict(blocks=(0, 0, 0, 0))),
    'all blocks': (['SBPViT', 'stock ViT'], dict(blocks=[3], keep_ratio=[0.25, 1, 0.75])),
    'query': (['SBPViT', 'stock ViT'], dict(attention='query', sampler='random')),
    'head': (['SBPViT', 'stock ViT'], dict(attention='head', sampler='random')),
}
WITH_KEYS = [
    pytest.param(family, dict(preset=preset, **keys), id=f'{family}-{preset}-{name}')
    for name, (families, keys) in KEYS.items()
    for family in families
    for preset in ('sbp', 'reference')
]


def drop_sampled_weights(preset, *gradients):
    """Return gradients without those of the weights that 'sampled' estimates."""
    return [
        {n: g for n, g in grads.items() if preset != 'sampled' or n.endswith(('bias', 'image'))} for grads in gradients
    ]


def draw_as_plain(preset):
    """Return settings with which stochastic depth drops the same images as the plain model."""
    return dict(preset=preset, **(dict(skip_dropped_images=False) if PRESETS[preset].form else {}))


def cosine_similarity(actual, expected):
    a, b = (torch.cat([g.double().flatten() for g in grads.values()]) for grads in (actual, expected))
    return F.cosine_similarity(a, b, 0).item()


@EACH_FAMILY
@pytest.mark.parametrize('preset', [name for name in PRESETS if name != 'none'])
@pytest.mark.parametrize('size', [SMALL, ODD], ids=['even', 'odd'])
def test_values_are_the_plain_ones(family, preset, size):
    """In training, random numbers for stochastic depth are the same, because masks draw none of them."""
    plain_outs, plain_state = run_plain(family, size, **DEPTH)
    model = build(family, draw_as_plain(preset), **DEPTH)
    torch.manual_seed(3)
    outs, state = model(random_images(*size)), torch.get_rng_state()
    for actual, expected in zip(outs, plain_outs, strict=True):
        assert actual.requires_grad and relative_error(actual, expected) < 1e-12
    assert torch.equal(state, plain_state)


@EACH_FAMILY
@pytest.mark.parametrize('preset', [name for name, preset in PRESETS.items() if preset.gradients == 'exact'])
def test_exact_gradients_are_the_plain_ones(family, preset):
    model = build(family, draw_as_plain(preset), **DEPTH)
    torch.manual_seed(3)
    assert_near(compute_gradients(model, random_images(*ODD)), compute_plain_gradients(family, ODD, **DEPTH), 1e-10)


@EACH_FAMILY
@pytest.mark.parametrize('preset', LEAN)
@pytest.mark.parametrize('size', [SMALL, ODD], ids=['even', 'odd'])
def test_gradients_are_those_of_the_definition(family, preset, size):
    """Images that stochastic depth drops are left out, which is the default."""
    actual, expected = compute_lean_and_expected(family, dict(preset=preset), random_images(*size), **DEPTH)
    if preset == 'int8':
        assert cosine_similarity(actual, expected) > 0.998 and relative_error(actual['image'], expected['image']) > 1e-6
        return
    assert_near(*drop_sampled_weights(preset, actual, expected), 1e-10)


@pytest.mark.parametrize(('family', 'cfg'), WITH_KEYS)
def test_keys_of_the_definition(family, cfg):
    actual, expected = compute_lean_and_expected(family, cfg, **DEPTH)
    assert_near(actual, expected, 1e-10)


@EACH_FAMILY
@pytest.mark.parametrize('preset', THIN)
def test_thinned_gradients_differ_from_the_plain_ones(family, preset):
    """The tests above would be meaningless if masks had no effect."""
    x, plain = compute_smooth_gradients(family)
    gradients = compute_gradients(build(family, dict(preset=preset)), x)
    assert relative_error(gradients['image'], plain['image']) > 0.01


@EACH_ONCE
def test_evaluation_and_passes_without_gradients_are_plain(family, preset):
    lean, plain, x = build(family, dict(preset=preset), **DEPTH), build(family, **DEPTH), random_images(*ODD)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outs = []
            for model in (lean, plain):
                torch.manual_seed(1)
                outs.append((model(x), torch.get_rng_state()))
            assert torch.equal(outs[0][1], outs[1][1])
            assert all(map(torch.equal, outs[0][0], outs[1][0]))
    lean.eval(), plain.eval()
    assert all(map(torch.equal, lean(x), plain(x)))


@pytest.mark.parametrize(
    ('family', 'preset', 'together'),
    [*((family, preset, True) for family in OWN for preset in LEAN), *((*pair, False) for pair in PAIRS)],
)
def test_two_passes(family, preset, together):
    """Two passes precede a backward pass, as in a semi-supervised or accumulated step; each uses its own draws."""
    lean, xs = build(family, dict(preset=preset), **DEPTH), [random_images(*SMALL, seed=seed) for seed in (0, 1)]
    expected, losses = None, []
    for x in xs:
        losses.append(compute_loss(lean(x)))
        if not together:
            losses.pop().backward()
        if preset in ('int8', 'sampled'):
            continue
        own = compute_expected_gradients(family, lean, x, **DEPTH)
        expected = own if expected is None else {name: expected[name] + g for name, g in own.items()}
    if together:
        sum(losses).backward()
    actual = {name: p.grad for name, p in lean.named_parameters()}
    if expected is None:  # the same in one pass after the other
        again = build(family, dict(preset=preset), **DEPTH)
        for x in xs:
            compute_loss(again(x)).backward()
        expected = {name: p.grad for name, p in again.named_parameters()}
    expected.pop('image', None)
    assert_near(actual, expected, 1e-10)


def compute_scaled_gradients(model, x, dtype):
    """Return gradients under autocast, with a gradient scaler if the range is small."""
    kind = 'cuda' if x.is_cuda else 'cpu'
    with torch.autocast(kind, dtype):
        outs = model(x)
    if dtype == torch.float16:
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**4)
        scaler.scale(compute_loss(outs)).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    else:  # torch 2.1 has no scaler of this name
        compute_loss(outs).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ('family', 'preset', 'dtype'),
    [
        *(pytest.param(family, preset, torch.float16, marks=needs_fp16) for family in OWN for preset in LEAN),
        *((*pair, torch.bfloat16) for pair in PAIRS),
    ],
)
def test_autocast(family, preset, dtype):
    """Gradients are as near to the definition as plain ones under autocast are to plain ones, except those of eight
    bits."""
    x = random_images(*SMALL, dtype=torch.float32)
    lean, plain = (build(family, cfg, dtype=torch.float32, **DEPTH) for cfg in (dict(preset=preset), None))
    found = compute_scaled_gradients(lean, x, dtype)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found.values())
    twin = build_oracle(family, lean, x, **DEPTH)
    truth = compute_gradients(twin.double(), x.double())
    rounded = compute_scaled_gradients(build_oracle(family, lean, x, **DEPTH), x, dtype)
    truth.pop('image')
    found, truth, rounded = drop_sampled_weights(preset, found, truth, rounded)
    assert 1 - cosine_similarity(found, truth) < 2 * (1 - cosine_similarity(rounded, truth)) + 2e-3
    for name, out in zip(lean(x), plain(x), strict=True):
        assert name.dtype == out.dtype


@EACH_ONCE
def test_a_model_that_is_bf16_throughout(family, preset):
    if preset == 'reference' and 'Swin' in family:
        pytest.skip("mmdet's own shifted windows fail in bf16")
    model = build(family, dict(preset=preset), dtype=torch.bfloat16, **DEPTH)
    outs = model(random_images(*SMALL, dtype=torch.bfloat16))
    sum(out.sum() for out in outs).backward()
    assert {out.dtype for out in outs} == {torch.bfloat16}
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


@EACH_ONCE
def test_channels_last(family, preset):
    last, x, gradients = dict(memory_format=torch.channels_last), random_images(*ODD), []
    for options in ({}, last):
        model = build(family, dict(preset=preset)).to(**options)
        gradients.append(compute_gradients(model, x.contiguous(**options)))
    assert_near(gradients[1], gradients[0], 1e-10)
    if 'ConvNeXt' in family:  # in fp32, because cuDNN computes contiguous maps in fp64
        assert all(out.is_contiguous(**last) for out in model.float()(x.float().contiguous(**last)))


FROZEN = {
    'SBPConvNeXt': dict(frozen_stages=2),
    'stock ConvNeXt': dict(frozen_stages=2),
    'SBPSwinTransformer': dict(frozen_stages=2),
    'stock Swin': dict(frozen_stages=2),
    'SBPViT': dict(frozen_blocks=2),
}


@pytest.mark.parametrize('family', FROZEN)
@pytest.mark.parametrize('preset', ['exact', 'sbp', 'reference'])
def test_frozen_stages(family, preset):
    """Frozen parameters get no gradient and draw no positions, and the others get the right gradients."""
    options, x = FROZEN[family] | DEPTH, random_images(*SMALL)
    lean = build(family, dict(preset=preset), **options)
    gradients = compute_gradients(lean, x)
    frozen = [name for name, p in lean.named_parameters() if not p.requires_grad]
    assert frozen and not {*frozen} & gradients.keys()
    layers, ratios = get_draws(lean).stages.layers, get_draws(lean).stages.keep_ratios()
    assert bool(ratios) == (preset != 'exact') and all(layers[key].training for key in ratios)
    assert_near(gradients, compute_expected_gradients(family, lean, x, **options), 1e-10)


@EACH_ONCE
def test_copies(family, preset):
    """EMA and checkpoints of whole models make such copies, before a pass or after one."""
    x = random_images(*SMALL)
    lean = build(family, dict(preset=preset), **DEPTH)
    kinds = {type(m).__name__ for m in build(family, **DEPTH).modules()}
    for _ in range(2):
        expected = compute_gradients(copy.deepcopy(lean), x)
        average = ExponentialMovingAverage(lean)
        average.update_parameters(lean)
        for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean)), average.module.requires_grad_()):
            assert get_draws(other) is not get_draws(lean)
            assert get_draws(other).stages.layers.keys() == get_draws(lean).stages.layers.keys()
            assert {type(m).__name__ for m in other.modules()} == kinds
            for p in lean.parameters():
                p.grad = None
            assert_near(compute_gradients(other, x), expected, 1e-12)
            assert all(p.grad is None for p in lean.parameters())
        compute_gradients(lean, x)


@EACH_FAMILY
@pytest.mark.parametrize('preset', [name for name in PRESETS if name != 'none'])
def test_names_and_buffers_are_the_stock_ones(family, preset):
    plain, lean = build(family), build(family, dict(preset=preset))
    assert {name: p.shape for name, p in lean.state_dict().items()} == {
        name: p.shape for name, p in plain.state_dict().items()
    }
    other = build(family, seed=1)
    other.load_state_dict(lean.state_dict())
    for a, b in zip(other.eval()(random_images()) if family in OWN else run_eval(other), run_eval(lean), strict=True):
        assert torch.equal(a, b)


def run_eval(model):
    model.eval()  # mmdet's returns None
    return model(random_images())


@EACH_FAMILY
@pytest.mark.parametrize('preset', LEAN)
def test_where_all_images_are_dropped_gradients_are_zeros(family, preset):
    """Optimizers and distributed training need a gradient for every parameter."""
    lean, missed = build(family, dict(preset=preset), drop_path_rate=0.95), 0
    for seed in range(4):
        torch.manual_seed(seed)
        lean.zero_grad()
        compute_loss(lean(random_images(1))).backward()
        draws = get_draws(lean)
        with draws.latest_pass():
            missed += sum(not draws.images(branch, 1).any() for branch in draws.stages.rates())
        assert [name for name, p in lean.named_parameters() if p.grad is None] == []
    assert missed


def count_family_bytes(family, cfg, amp=True, **options):
    model, x = build(family, cfg, dtype=torch.float32, **options), random_images(2, 128, 128, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16, enabled=amp):
        return count_model_bytes(model, x)


@EACH_FAMILY
def test_stored_bytes(family):
    """The order of presets is the documented one, and left-out images are not stored."""
    counts = {name: count_family_bytes(family, dict(preset=name)) for name in PRESETS}
    assert counts['int8'] < counts['exact'] < 0.7 * counts['none'] and counts['with_cp'] < 0.7 * counts['none']
    assert counts['sbp'] < min(counts['reference'], 0.7 * counts['none'])
    if 'ViT' not in family:  # whose reference writes the attention's map out
        assert counts['reference'] < counts['none']
    if 'ConvNeXt' in family:
        assert counts['exact'] < counts['with_cp']
    less, whole = (
        count_family_bytes(family, dict(preset='exact', skip_dropped_images=skips), drop_path_rate=0.8)
        for skips in (True, False)
    )
    assert less < whole


@pytest.mark.parametrize(('quarter', 'half'), [(0.25, 0.5)])
def test_stored_bytes_of_paper_follow_the_ratio(quarter, half):
    """ConvNeXt stores its MLP's input, a downsampling layer x-hat and a deviation, each at kept positions only."""
    actual = [count_family_bytes('SBPConvNeXt', dict(preset='sbp', keep_ratio=r), amp=False) for r in (quarter, half)]
    channels, expected = [8, 12, 16], 0
    for i, depth in enumerate([1, 2, 2]):
        kept = (32 // 2**i) ** 2 // 4
        expected += 2 * kept * depth * channels[i] * 4
        expected += 2 * kept * 4 * (channels[i - 1] + 1) * 4 if i else 0
        expected += kept * 8
    assert actual[1] - actual[0] == expected


@pytest.mark.parametrize('family', OWN)
def test_whole_backbone_against_finite_differences(family):
    small = {
        'SBPConvNeXt': dict(arch=dict(depths=[1, 1], channels=[3, 4]), out_indices=[0, 1]),
        'SBPSwinTransformer': dict(
            embed_dims=4, depths=(1, 1), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=2
        ),
        'SBPViT': dict(arch=dict(num_layers=2, embed_dims=4, num_heads=2), patch_size=4, img_size=8, out_indices=(2,)),
    }[family]
    model, x = build(family, dict(preset='exact'), **small), random_images(1, 8, 12)
    names, leaves = zip(*model.named_parameters(), strict=True)

    def run(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize('preset', ['exact', 'int8'])
def test_stochastic_depth_is_drawn_as_plain_blocks_draw_it(preset, monkeypatch):
    """The images and factors are those of plain blocks, also under autocast, where factors are not rounded."""
    x, dropped, factors, mlp = random_images(64, 32, 32, dtype=torch.float32), [], [], channel_mlp
    monkeypatch.setattr('sbp_mmdet.adapters.bindings.channel_mlp', lambda s, t: factors.append(t.factor) or mlp(s, t))
    for cfg in (None, draw_as_plain(preset)):
        model, seen = build('SBPConvNeXt', cfg, dtype=torch.float32, drop_path_rate=0.7), []
        for stage in model.stages:
            stage[-1].register_forward_hook(lambda m, x, out, seen=seen: seen.append((x[0] == out).flatten(1).all(1)))
        torch.manual_seed(1)
        with torch.autocast(x.device.type, torch.bfloat16):
            model(x)
        dropped.append(torch.stack(seen))
    assert torch.equal(*dropped) and (dropped[0][1:].sum(1) > 0).all()
    assert factors[-1].max().item() == pytest.approx(1 / 0.3)  # drawn by the module, for each image


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='a compiler of before torch 2.4')
@pytest.mark.parametrize(('family', 'preset'), [*zip(OWN, ['exact', 'sbp', 'sbp'], strict=True)])
def test_compiled(family, preset, iteration):
    iteration(5)
    lean, x = build(family, dict(preset=preset)), random_images(1, 64, 64)
    expected = compute_gradients(lean, x)
    iteration(6)
    compute_gradients(lean, x)
    iteration(5)
    torch.compiler.reset()
    assert_near(compute_gradients(lean, x, torch.compile(lean, backend='aot_eager')), expected, 1e-10)


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    """In one gloo process, every parameter gets its gradient although images are left out."""
    x, gradients = random_images(2, 64, 64), []
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        for wrap in (lambda model: model, nn.parallel.DistributedDataParallel):
            model = build('stock Swin', dict(preset='sbp'), drop_path_rate=0.9)
            compute_loss(wrap(model)(x)).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
    finally:
        torch.distributed.destroy_process_group()
    assert_near(gradients[1], gradients[0], 1e-12)
