"""Gradients of weights from a sample of the rows: each estimate by its formula, on what torch's own linear layers see;
the mean over all draws, which is the gradient; and what is drawn in a model."""

import bisect
import dataclasses
import itertools
import math

import ops_cases
import pytest
import torch
import torch.nn.functional as F
from cases import FAMILIES, build
from helpers import FP16
from mmcv.cnn.bricks.transformer import FFN
from mmengine.logging import MessageHub
from ops_cases import CASES, cast_tensors, differentiate, run_under_autocast
from oracles import assert_near, compute_gradients, random_images, relative_error
from test_ops_transformer import TOKENS, ffn_tensors, layer, layer_tensors, padding, places, randomize, settings_of
from test_ops_transformer import compute_gradients as of_leaves
from torch.utils._python_dispatch import TorchDispatchMode

import sbp_mmdet.ops.common.row_sampling as row_sampling
from sbp_mmdet.adapters.row_draws import RowDraws
from sbp_mmdet.apply import apply_lean
from sbp_mmdet.ops.common.autograd_function import Form, Sample
from sbp_mmdet.ops.common.row_sampling import sample_rows
from sbp_mmdet.ops.deformable_encoder_layer import deformable_encoder_layer
from sbp_mmdet.ops.ffn import FFNSettings, feed_forward
from sbp_mmdet.stochastic_backprop.masks import positions

WEIGHTS = ('weight', 'weight1', 'weight2', 'qkv_weight', 'proj_weight', 'norm_weight', 'gamma')
# In one chunk.
WHOLE = {name: dict(chunk=2**20) for name in ('mlp', 'mlp with convolution', 'mlp of tokens')}
NAMES = [name for name in CASES if not name.startswith('layer_norm')]


DRAWS = [(i + 0.5) / 64 for i in range(64)]


def run_sampled(name, ratio, at, given, **options):
    return CASES[name].run(Form(sample=Sample(ratio, at)), **given, **options)


def draw_by_definition(sample, *parts):
    """Return the indices of the drawn rows, and the divisor of each."""
    rows = zip(*(part.tolist() for part in parts), strict=True)
    norms = [sum(math.hypot(*row) for row in several) for several in rows]
    mean = sum(norms) / len(norms)
    sizes = [math.floor(norm / mean * 2**16) + 2**13 for norm in norms]
    number = max(round(sample.ratio * len(norms)), 1)
    large = set()  # those that are as large as all rows of one draw, or larger; then once more without these
    for _ in range(2):
        rest, left = sum(size for row, size in enumerate(sizes) if row not in large), number - len(large)
        large |= {row for row, size in enumerate(sizes) if size * left >= rest}
    rest, left = sum(size for row, size in enumerate(sizes) if row not in large), number - len(large)
    sizes = [rest // left if row in large else size for row, size in enumerate(sizes)]
    ends = [*itertools.accumulate(sizes)]
    indices = [bisect.bisect_right(ends, math.floor((i + sample.at) * ends[-1] / number)) for i in range(number)]
    return indices, [number * sizes[row] / ends[-1] for row in indices]


class _Linear(torch.autograd.Function):
    """Linear layer whose weight gradient is the estimate, written out."""

    @staticmethod
    def forward(ctx, x, weight, bias, sample, shared):
        ctx.save_for_backward(x, weight)
        ctx.sample, ctx.shared = sample, shared
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, seen = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        parts = rows.chunk(3 if len(weight) == 3 * weight.shape[1] else 1, 1)  # queries, keys and values
        drawn = ctx.shared.pop() if ctx.shared else [*zip(*draw_by_definition(ctx.sample, *parts), strict=True)]
        if ctx.shared is not None:
            ctx.shared.append(drawn)  # an MLP's first layer takes the rows of the second
        mean = 0
        if ctx.shared is not None:  # an MLP estimates what is beyond the mean of some rows of each image
            each = len(seen) // len(x)
            step = max(len(seen) // row_sampling.ROWS_OF_MEANS, 4)
            step += step % 2 == 0
            some = [i for i in range(len(seen)) if i % each % step == min(step // 2, each - 1)]
            mean = sum(seen[i] for i in some) / len(some)
        estimate = sum(torch.outer(rows[row], seen[row] - mean) / chance for row, chance in drawn)
        estimate = estimate + (0 if ctx.shared is None else torch.outer(rows.sum(0), mean))
        return grad @ weight, estimate, rows.sum(0), None, None


def make_uneven(weight_of):
    """Return a function that makes gradients of outputs in which a few rows contribute most of the sum."""

    def weights(out):
        positions = [1 if i == (1 if out.dim() == 4 else out.dim() - 1) else n for i, n in enumerate(out.shape)]
        sizes = torch.randn(positions, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return weight_of(out) * sizes.mul(2).exp()

    return weights


def is_unbiased(several, exact):
    """Return whether single estimates have large errors and their mean has a small one."""
    each = sum(relative_error(found, exact) for found in several) / len(several)
    return each > 0.05 and relative_error(sum(several) / len(several), exact) < 0.2 * each


def rows_of_many_sizes(number=40):
    generator = torch.Generator().manual_seed(number)
    rows, seen = (torch.randn(number, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return rows * torch.randn(number, 1, generator=generator, dtype=torch.float64).mul(2).exp(), seen


@pytest.mark.parametrize('ratio', [0.5, 0.3, 0.1])
def test_the_mean_over_all_draws_is_exact(ratio):
    """The mean is the integral over the start of the draws.

    Each draw moves up the rows with the start, so if both ends of an interval draw the same rows, all of it does.
    """
    rows, seen = rows_of_many_sizes()

    def mean(low, high, at_low, at_high):
        if torch.equal(at_low.index, at_high.index) or high - low < 1e-13:
            return (high - low) * at_low.take_weighted(rows).t() @ at_low.take(seen)
        at_middle = sample_rows(Sample(ratio, (low + high) / 2), rows)
        halves = (low, (low + high) / 2, at_low, at_middle), ((low + high) / 2, high, at_middle, at_high)
        return sum(mean(*half) for half in halves)

    ends = (sample_rows(Sample(ratio, at), rows) for at in (0, 1 - 2**-53))
    assert relative_error(mean(0, 1, *ends), rows.t() @ seen) < 1e-10


def test_large_rows_are_drawn_more_often():
    """The error is smaller than with uniform probabilities."""
    rows, seen = rows_of_many_sizes(400)
    exact = rows.t() @ seen
    found = [d.take_weighted(rows).t() @ d.take(seen) for d in (sample_rows(Sample(0.25, at), rows) for at in DRAWS)]
    alike = [4 * rows[phase::4].t() @ seen[phase::4] for phase in range(4)]
    error, before = (sum(relative_error(f, exact) ** 2 for f in several) / len(several) for several in (found, alike))
    assert error < before / 2


@pytest.mark.parametrize('ratio', [0.1, 0.25, 0.5])
def test_no_draw_is_wasted(ratio):
    """Rows with large norms, which contribute most, are always drawn, and hardly any row is drawn twice."""
    rows, _ = rows_of_many_sizes(400)
    number = round(ratio * 400)
    largest = rows.norm(dim=1).topk(number // 4).indices
    for at in DRAWS:
        index = sample_rows(Sample(ratio, at), rows).index
        assert len(index.unique()) >= 0.98 * number and torch.isin(largest, index).all()


def test_rows_at_the_edges():
    zero, one = torch.zeros(5, 3), torch.ones(1, 3)
    for sample, rows in ((None, one), (Sample(0.5, 0.2), one[:0])):
        assert sample_rows(sample, rows).take_weighted(rows) is rows and sample_rows(sample, rows).take(rows) is rows
    for at in (0, 0.5, 1 - 2**-53):
        assert torch.equal(sample_rows(Sample(0.25, at), one).take_weighted(one), one)
        for number, ratio in ((2, 0.9), (50, 0.99), (80_000, 0.99999)):
            alike = torch.ones(number, 1)
            sampled = sample_rows(Sample(ratio, at), alike)
            assert len(sampled.index) >= number - 1 and sampled.take_weighted(alike).sum() == pytest.approx(number)
        assert torch.equal(sample_rows(Sample(0.5, at), zero).take_weighted(zero), zero[:2])
        for wrong, ratio in itertools.product((math.inf, math.nan), (0.5, 0.9)):
            rows = torch.cat([torch.ones(4, 3), torch.tensor([[0, wrong, 0]])])
            assert not sample_rows(Sample(ratio, at), rows).take_weighted(rows).isfinite().any()


def test_sums_of_chances_are_of_whole_numbers():
    """CUDA sums floating point numbers along a dimension in any order, which torch refuses in deterministic mode."""
    kinds = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.cumsum:
                kinds.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Log():
        sample_rows(Sample(0.5, 0.3), torch.ones(6, 2))
    assert kinds == [torch.int64]


@pytest.mark.parametrize('name', [*WHOLE, 'norm_linear', 'grn', 'qkv', 'windows'])
@pytest.mark.parametrize(('sample', 'means'), [(Sample(0.25, 0.4), 10), (Sample(0.7, 0.95), 100)], ids=str)
def test_estimates(name, sample, means, monkeypatch):
    """Rows are in the order of the plain layer's, in one chunk. Norm weights and gamma are estimated from these
    estimates."""
    monkeypatch.setattr(row_sampling, 'ROWS_OF_MEANS', means)
    monkeypatch.setattr(ops_cases, 'output_gradient', make_uneven(ops_cases.output_gradient))
    case = CASES[name]
    sizes = {} if name == 'norm_linear' or name == 'windows' else dict(gamma=None)
    tensors, given = case.inputs(**sizes)
    tensors['norm_bias'] = None
    actual = differentiate(run_sampled(name, *sample, given, **WHOLE.get(name, {})), tensors)
    shared = [] if name in WHOLE else None
    own = dict(vars(F), linear=lambda x, weight, bias=None: _Linear.apply(x, weight, bias, sample, shared))
    monkeypatch.setattr(ops_cases, 'F', type('F', (), {k: staticmethod(v) for k, v in own.items() if callable(v)}))
    expected = differentiate(case.plain(), tensors)
    in_order = [
        n for n in expected if n not in ('norm_weight', 'proj_weight') and (name, n) != ('windows', 'qkv_weight')
    ]
    assert_near({n: actual[n] for n in in_order}, {n: expected[n] for n in in_order}, 1e-12)


@pytest.mark.parametrize(
    ('name', 'options'), [(n, {}) for n in NAMES] + [(n, dict(chunk=100)) for n in ('mlp', 'grn', 'windows')], ids=str
)
def test_exact_on_average(name, options):
    """Weight gradients are compared in the mean over equidistant draws, all others for each sample, also with saved
    inputs."""
    case = CASES[name]
    weights = [n for n in WEIGHTS if n != 'norm_weight' or not (name in WHOLE or 'windows' in name)]
    tensors, given = case.inputs()
    exact, several = differentiate(case.plain(), tensors), []
    for at in DRAWS:
        found = differentiate(run_sampled(name, 0.5, at, given, **options), tensors)
        several.append(found)
        sure = [n for n in exact if n not in weights]
        assert_near({n: found[n] for n in sure}, {n: exact[n] for n in sure}, 1e-12)
    for n in exact:
        assert n not in weights or is_unbiased([found[n] for found in several], exact[n]), n


@pytest.mark.parametrize('dtype', [FP16, torch.bfloat16], ids=str)
def test_half_precision_on_average(dtype):
    """In half precision, the mean of the estimates over all draws is the exact gradient.

    In fp16, an MLP with layer scale scales the incoming gradient into range, but not the exact term of the mean.
    """
    tensors, given = CASES['mlp'].inputs()
    tensors = cast_tensors(tensors, torch.float32)
    exact = differentiate(run_under_autocast(CASES['mlp'].run(Form(), **given), dtype), tensors)
    several = [differentiate(run_under_autocast(run_sampled('mlp', 0.5, at, given), dtype), tensors) for at in DRAWS]
    for name in WEIGHTS:
        assert name not in exact or is_unbiased([found[name] for found in several], exact[name]), name


@pytest.mark.parametrize('trainable', ['weight1', 'norm_weight', 'weight2', 'gamma', 'x'])
def test_frozen_parts(trainable):
    tensors, given = CASES['mlp'].inputs()
    run = run_sampled('mlp', 0.5, 0.4, given)
    gradients, all_of_them = differentiate(run, tensors, [trainable]), differentiate(run, tensors)
    assert_near({trainable: gradients[trainable]}, {trainable: all_of_them[trainable]}, 1e-12)


@pytest.mark.parametrize('chunk', [None, 400])
@pytest.mark.parametrize('kind', ['ffn', 'encoder'])
@pytest.mark.parametrize(('rate', 'numbers'), [(0.0, 2), (0.2, 4)])
def test_transformers_exact_on_average(kind, chunk, rate, numbers):
    module = randomize(FFN(8, 32, add_identity=False)) if kind == 'ffn' else layer()
    x, pos = (torch.randn(2, TOKENS, 8 if kind == 'ffn' else 16, dtype=torch.float64) for _ in range(2))
    leaves = dict(module.named_parameters(), x=x.requires_grad_())
    reference = places(numbers, TOKENS).detach()

    def run(sample):
        ffn = FFNSettings(dropout=(rate, rate), chunk=chunk, form=Form(sample=sample))
        if kind == 'ffn':
            return of_leaves(lambda: feed_forward(ffn, ffn_tensors(module, x)), leaves)
        tensors = layer_tensors(module, x, pos, reference, padding(numbers == 4))
        settings = settings_of(rate)
        attention = dataclasses.replace(settings.attention, form=ffn.form)
        settings = dataclasses.replace(settings, ffn=ffn, attention=attention)
        return of_leaves(lambda: deformable_encoder_layer(settings, tensors), leaves)

    exact, parts = run(None), [run(Sample(0.3, at)) for at in DRAWS]
    for name, e, *found in zip(['out', *leaves], exact, *parts, strict=True):
        rough = 'weight' in name and ('layers' in name or 'output_proj' in name)
        assert is_unbiased(found, e) if rough else max(relative_error(f, e) for f in found) < 1e-12, name


def test_row_draws(monkeypatch):
    """Each quarter is equally likely. Draws follow from module, pass and iteration, so a resumed run repeats them."""
    iteration = [0]
    monkeypatch.setattr(MessageHub, 'get_info', lambda *args: iteration[0])
    drawn = {}
    for iteration[0] in range(100):
        row_draws = RowDraws()
        for number in range(2):
            for name in ('a', 'b'):
                drawn[iteration[0], number, name] = row_draws.draw(name, 0.25).at
    counts = torch.tensor([*drawn.values()]).mul(4).long().bincount(minlength=4)
    assert len(counts) == 4 and (counts > 60).all()
    apart = [[v for k, v in drawn.items() if k[1:] == key] for key in ((0, 'a'), (0, 'b'), (1, 'a'))]
    assert apart[0] != apart[1] != apart[2] != apart[0]
    iteration[0] = 70
    assert RowDraws().draw('b', 0.25).at == drawn[70, 0, 'b']


@pytest.mark.parametrize('family', FAMILIES)
def test_models(family):
    """The mean over many passes is close; the gradients of biases and of the image are exact in each pass."""
    lean, x = build(family, dict(preset='sampled', keep_ratio=0.5)), random_images(1, 64, 64)
    plain = build(family)
    plain.load_state_dict(lean.state_dict())
    exact, gradients = compute_gradients(plain, x), [compute_gradients(lean, x) for _ in range(16)]
    assert relative_error(gradients[0]['image'], exact['image']) < 1e-9
    biases = [n for n in exact if n.endswith('bias')]
    assert biases and all(relative_error(gradients[0][n], exact[n]) < 1e-9 for n in biases)

    def error(several):
        total = sum((sum(g[n] for g in several) / len(several) - e).square().sum() for n, e in exact.items())
        return (total / sum(e.square().sum() for e in exact.values())).sqrt()

    assert 0.05 < error(gradients[:1]) and error(gradients) < 0.5 * error(gradients[:1])


def test_what_cannot_be_honoured():
    with pytest.raises(ValueError, match='sample=.* needs'):
        Form('reference', sample=Sample(0.25, 0))
    with pytest.raises(ValueError, match='sample=.*give either positions or a sample'):
        Form(sample=Sample(0.25, 0)).kept(positions(torch.ones(2, 2, dtype=torch.bool)))
    for ratio in (1, 1.5, 0, 'half', [0.5, 0.25]):
        with pytest.raises(ValueError, match="must be one number below 1 .*preset='sampled'"):
            apply_lean(build('SBPConvNeXt'), preset='sampled', keep_ratio=ratio)
    with pytest.raises(ValueError, match="preset='sampled' draws rows, and no module of Conv2d.* use 'exact'"):
        apply_lean(torch.nn.Conv2d(3, 8, 3), preset='sampled')
    with pytest.raises(ValueError, match='takes no sampler'):
        apply_lean(build('SBPConvNeXt'), preset='sampled', sampler='random')


@pytest.mark.parametrize('name', ['mlp', 'mlp of tokens', 'qkv'])
def test_no_images(name):
    """Stochastic depth may drop all images of a batch."""
    tensors, given = CASES[name].inputs(n=0)
    gradients = differentiate(run_sampled(name, 0.25, 0.4, given), tensors)
    assert all(not gradient.abs().sum() for gradient in gradients.values())
