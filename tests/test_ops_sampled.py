"""Gradients of weights from a sample of the rows: each estimate by its formula, on what torch's own linear layers see;
the mean over all phases, which is the gradient; and what is drawn in a model."""

import dataclasses

import ops_cases
import pytest
import torch
import torch.nn.functional as F
from cases import FAMILIES, build
from mmcv.cnn.bricks.transformer import FFN
from mmengine.logging import MessageHub
from ops_cases import CASES, differentiate
from oracles import assert_near, gradients, image, relative_error
from test_ops_transformer import TOKENS, ffn_tensors, layer, layer_tensors, places, scattered, settings_of
from test_ops_transformer import gradients as of_leaves

from sbp_mmdet.apply import apply_lean
from sbp_mmdet.draws import Phases
from sbp_mmdet.masks import positions
from sbp_mmdet.ops import FFNSettings, Form, deformable_encoder_layer, feed_forward
from sbp_mmdet.ops.operation import Sample
from sbp_mmdet.ops.rows import Sampled

WEIGHTS = ('weight', 'weight1', 'weight2', 'qkv_weight', 'proj_weight', 'norm_weight', 'gamma')
NAMES = [name for name in CASES if not name.startswith('layer_norm')]


def sampled(name, step, phase, given, **options):
    return CASES[name].run(Form(sample=Sample(step, phase)), **given, **options)


class _Linear(torch.autograd.Function):
    """The linear layer with the estimate as its weight's gradient, as one writes it down."""

    @staticmethod
    def forward(ctx, x, weight, bias, sample):
        ctx.save_for_backward(x, weight)
        ctx.sample = sample
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, seen = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        drawn = [row for row in range(len(rows)) if row % ctx.sample.step == ctx.sample.phase]
        estimate = sum(torch.outer(rows[row], seen[row]) for row in drawn) * (len(rows) / len(drawn))
        return grad @ weight, estimate, rows.sum(0), None


@pytest.mark.parametrize(
    ('name', 'options'),
    [(name, {}) for name in ('mlp', 'mlp with convolution', 'mlp of tokens', 'norm_linear', 'grn', 'qkv', 'windows')]
    + [(name, dict(chunk=chunk)) for name in ('mlp', 'grn', 'windows') for chunk in (1, 100)],
    ids=str,
)
@pytest.mark.parametrize('sample', [Sample(4, 1), Sample(7, 6)], ids=str)
def test_estimates(name, options, sample, monkeypatch):
    """Where rows are in the order of the plain layer's. The norm's weight and gamma get theirs from these."""
    case = CASES[name]
    tensors, given = case.inputs(**{} if name == 'norm_linear' or name == 'windows' else dict(gamma=None))
    tensors['norm_bias'] = None
    actual = differentiate(sampled(name, *sample, given, **options), tensors)
    own = dict(vars(F), linear=lambda x, weight, bias=None: _Linear.apply(x, weight, bias, sample))
    monkeypatch.setattr(ops_cases, 'F', type('F', (), {k: staticmethod(v) for k, v in own.items() if callable(v)}))
    expected = differentiate(case.plain(), tensors)
    in_order = [
        n for n in expected if n not in ('norm_weight', 'proj_weight') and (name, n) != ('windows', 'qkv_weight')
    ]
    assert_near({n: actual[n] for n in in_order}, {n: expected[n] for n in in_order}, 1e-12)


@pytest.mark.parametrize('name', NAMES)
def test_exact_on_average(name):
    """Weights from the mean over the phases, where these tile the rows; all else from each sample."""
    case = CASES[name]
    tensors, given = case.inputs()
    exact, mean = differentiate(case.plain(), tensors), dict.fromkeys(tensors, 0)
    for phase in range(2):
        found = differentiate(sampled(name, 2, phase, given), tensors)
        mean = {n: None if t is None else mean[n] + found[n] / 2 for n, t in tensors.items()}
        sure = [n for n in exact if n not in WEIGHTS]
        assert_near({n: found[n] for n in sure}, {n: exact[n] for n in sure}, 1e-12)
        assert all(relative_error(found[n], exact[n]) > 0.01 for n in tensors if n in WEIGHTS and exact[n] is not None)
    assert_near(mean, {n: exact[n] for n in mean}, 1e-12)


@pytest.mark.parametrize('chunk', [None, 40])
@pytest.mark.parametrize('kind', ['ffn', 'encoder'])
def test_transformers_exact_on_average(kind, chunk):
    module = scattered(FFN(8, 32, add_identity=False)) if kind == 'ffn' else layer()
    x, pos = (torch.randn(2, TOKENS, 8 if kind == 'ffn' else 16, dtype=torch.float64) for _ in range(2))
    leaves = dict(module.named_parameters(), x=x.requires_grad_())
    reference = places(2, TOKENS).detach()

    def run(sample):
        ffn = FFNSettings(chunk=chunk, sample=sample)
        if kind == 'ffn':
            return of_leaves(lambda: feed_forward(ffn, ffn_tensors(module, x)), leaves)
        tensors, settings = layer_tensors(module, x, pos, reference, None), dataclasses.replace(settings_of(), ffn=ffn)
        return of_leaves(lambda: deformable_encoder_layer(settings, tensors), leaves)

    exact, parts = run(None), [run(Sample(3, phase)) for phase in range(3)]
    for name, e, *found in zip(['out', *leaves], exact, *parts, strict=True):
        assert relative_error(sum(found) / 3, e) < 1e-12
        rough = 'weight' in name and ('layers' in name or 'output_proj' in name)
        assert rough == (relative_error(found[0], e) > 1e-3), name


@pytest.mark.parametrize(('step', 'phase', 'number'), [(4, 3, 10), (4, 3, 2), (1, 0, 5), (3, 2, 0)])
def test_rows_of_pieces_are_those_of_the_whole(step, phase, number):
    rows = torch.arange(number)
    found = Sampled(Sample(step, phase), number)
    whole = found.of(rows)
    assert len(whole) * found.share == number and (len(whole) >= 1) == (number > 0)
    for cut in range(number):
        assert torch.equal(torch.cat([found.of(rows[:cut]), found.of(rows[cut:], cut)]), whole)


def test_phases(monkeypatch):
    """Each as often as another, by module, pass and iteration; a run that goes on draws what it would have drawn."""
    iteration = [0]
    monkeypatch.setattr(MessageHub, 'get_info', lambda *args: iteration[0])
    drawn = {}
    for iteration[0] in range(100):
        phases = Phases()
        for number in range(2):
            for name in ('a', 'b'):
                drawn[iteration[0], number, name] = phases.draw(name, 4).phase
    counts = torch.tensor([*drawn.values()]).bincount(minlength=4)
    assert len(counts) == 4 and (counts > 60).all()
    apart = [[v for k, v in drawn.items() if k[1:] == key] for key in ((0, 'a'), (0, 'b'), (1, 'a'))]
    assert apart[0] != apart[1] != apart[2] != apart[0]
    iteration[0] = 70
    assert Phases().draw('b', 4).phase == drawn[70, 0, 'b']


@pytest.mark.parametrize('family', FAMILIES)
def test_models(family):
    """Over many passes the mean comes near; gradients of biases and of the image are exact in each."""
    lean, x = build(family, dict(preset='sampled', keep_ratio=0.5)), image(1, 64, 64)
    plain = build(family)
    plain.load_state_dict(lean.state_dict())
    exact, found = gradients(plain, x), [gradients(lean, x) for _ in range(16)]
    assert relative_error(found[0]['image'], exact['image']) < 1e-9
    biases = [n for n in exact if n.endswith('bias')]
    assert biases and all(relative_error(found[0][n], exact[n]) < 1e-9 for n in biases)

    def error(several):
        total = sum((sum(g[n] for g in several) / len(several) - e).square().sum() for n, e in exact.items())
        return (total / sum(e.square().sum() for e in exact.values())).sqrt()

    assert 0.05 < error(found[:1]) and error(found) < 0.5 * error(found[:1])


def test_what_cannot_be_honoured():
    with pytest.raises(ValueError, match='sample=.* needs'):
        Form('reference', sample=Sample(4, 0))
    with pytest.raises(ValueError, match='sample=.* is one of all positions'):
        Form(sample=Sample(4, 0)).kept(positions(torch.ones(2, 2, dtype=torch.bool)))
    for ratio in (0.75, [0.5, 0.25]):
        with pytest.raises(ValueError, match='must be 1 / n'):
            apply_lean(build('SBPConvNeXt'), preset='sampled', keep_ratio=ratio)
    with pytest.raises(ValueError, match='mean nothing'):
        apply_lean(build('SBPConvNeXt'), preset='sampled', sampler='random')
