"""Compiled bodies: the same gradients, the same bytes, few graphs, and a message where nothing can be compiled."""

import functools
import random

import pytest
import torch
from ops_cases import differentiate, downsample_inputs, fused_downsample, fused_mlp, keep_mask, mlp_inputs, stored
from oracles import DEVICE, assert_near, gradients, image, small_backbone
from test_apply import PRETRAIN, pretrain_model, small_swin

from sbp_mmdet import SBPSwinTransformer, SBPViT, apply_sbp
from sbp_mmdet.analysis import peak_bytes, saved_bytes
from sbp_mmdet.masks import positions
from sbp_mmdet.ops import compiled
from sbp_mmdet.ops.operation import Operation
from sbp_mmdet.settings import PRESETS

OLD = compiled.why_not() is not None
pytestmark = pytest.mark.skipif(OLD, reason='this torch compiles nothing')


@pytest.fixture
def graphs(monkeypatch):
    """Bodies become graphs, which are run operation by operation: no compiler runs. Their number so far."""
    monkeypatch.setattr(compiled, 'BACKEND', 'aot_eager')
    monkeypatch.setattr(compiled, 'SKIPS', False)
    monkeypatch.setattr(compiled, '_versions', {})
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: counters['stats']['unique_graphs']
    torch.compiler.reset()


@pytest.fixture
def asked(monkeypatch):
    """Whether operations are to be compiled, by the name of their settings."""
    found, call = {}, Operation.__call__

    def noted(self, settings, tensors):
        found[type(settings).__name__] = settings.compile
        return call(self, settings, tensors)

    monkeypatch.setattr(Operation, '__call__', torch.compiler.disable(noted))
    return found


@pytest.mark.skipif(OLD or compiled.why_not('cpu') is not None, reason='no C++ compiler')
def test_compiled_operation(monkeypatch):
    """By inductor, for chunks of several sizes."""
    # Its cache does not know ATEN_CPU_CAPABILITY: it may hold code for a CPU that can do more.
    monkeypatch.setattr(torch._inductor.config, 'fx_graph_cache', False)
    monkeypatch.setattr(compiled, '_versions', {})
    monkeypatch.setattr(compiled, 'SKIPS', False)
    keep = positions(keep_mask('half', 6, 9), nearest=True)
    mlp = dict(chunk=160, factor=torch.tensor([1.25, 0.0], dtype=torch.float64))
    for f, tensors in (
        (functools.partial(fused_mlp, keep, True, **mlp), mlp_inputs(c=8, d=20, height=6, width=9)[0]),
        (functools.partial(fused_downsample, keep), downsample_inputs(c=6, c_out=9, height=12, width=18)),
    ):
        assert_near(differentiate(f(compile=True), tensors), differentiate(f(), tensors), 1e-11)
        assert stored(f(compile=True), tensors) == stored(f(), tensors)
    assert set(compiled.graphs()) == {'_normalise', '_scaled', '_through_gelu', '_normalise_backward'}


@pytest.mark.parametrize('preset', ['fused', 'exact-block', 'pool', 'nearest-int8'])
def test_backbone(preset, graphs):
    """With stochastic depth and checkpoints, and inside of a compiled model."""
    x, cfg, grads, held = image(height=96), PRESETS[preset].sbp_cfg, [], []
    for compile_ in (False, True):
        backbone = small_backbone(cfg | dict(compile=compile_), drop_path_rate=0.4)
        torch.manual_seed(0)
        grads.append(gradients(backbone, x))
        torch.manual_seed(0)
        held.append((saved_bytes(lambda: backbone(x)), peak_bytes(lambda: backbone(x)[0].sum().backward())))  # noqa: B023
    assert_near(grads[1], grads[0], 1e-10)
    assert held[0][0] == held[1][0] and held[0][1] <= 1.1 * held[1][1]
    assert graphs() >= 10
    backbone = small_backbone(cfg | dict(compile=True), drop_path_rate=0.4, with_cp=True)
    torch.manual_seed(0)
    assert_near(gradients(backbone, x, torch.compile(backbone, backend='eager')), grads[0], 1e-10)


VIT = dict(num_layers=3, embed_dims=12, num_heads=3, feedforward_channels=20)
SWIN = dict(embed_dims=8, depths=(2, 2), num_heads=(2, 4), window_size=4, strides=(4, 2), out_indices=(0, 1))
OTHERS = dict(vit=(SBPViT, dict(arch=VIT, img_size=64)), swin=(SBPSwinTransformer, dict(SWIN, drop_path_rate=0.0)))


@pytest.mark.parametrize('name', OTHERS)
@pytest.mark.parametrize('preset', ['recompute', 'pool', 'int8'])
def test_other_families(name, preset, graphs, asked):
    """Norms, MLPs, attention and patch merging of the families that have them."""
    build, options = OTHERS[name]
    x, grads = image(height=96), []
    for compile_ in (False, True):
        asked.clear()
        torch.manual_seed(0)
        backbone = build(sbp_cfg=PRESETS[preset].sbp_cfg | dict(compile=compile_), **options).double().train()
        backbone.init_weights()
        torch.manual_seed(0)
        grads.append(gradients(backbone.to(DEVICE), x))
        assert set(asked.values()) == {compile_} and len(asked) > 1 and (graphs() > 0) == compile_
    assert_near(grads[1], grads[0], 1e-10)


@pytest.mark.parametrize('name', ['swin', *PRETRAIN])
def test_in_place(name, graphs, asked):
    model = small_swin() if name == 'swin' else pretrain_model(name, **PRETRAIN[name])
    apply_sbp(model, dict(recompute=True, compile=True))
    sum(out.sum() for out in model(image(2, 48, 64))).backward()
    assert set(asked.values()) == {True} and len(asked) > 1 and graphs()


def test_sizes_of_images_need_no_graphs(graphs):
    """30 sizes and batches of 1 to 3 images: each body has one graph for each width, and an operation less than 8."""
    backbone = small_backbone(dict(recompute=True, dropped='nearest', compile=True), dtype=torch.float32)
    draw, counts = random.Random(0), []
    for _ in range(30):
        x = image(draw.randint(1, 3), draw.randint(64, 160), draw.randint(64, 160), dtype=torch.float32)
        sum(out.mean() for out in backbone(x)).backward()
        counts.append(graphs())
    assert counts[-1] == counts[4], counts
    assert counts[-1] <= 2 * sum(compiled.graphs().values())
    assert all(number <= 8 for number in compiled.graphs().values()), compiled.graphs()


@pytest.mark.skipif(DEVICE != 'cpu', reason='of a CPU')
def test_what_a_cpu_is_faster_without_stays_uncompiled(graphs, monkeypatch):
    monkeypatch.setattr(compiled, 'SKIPS', True)
    for height, names in ((6, set()), (2**12, {'_normalise'})):
        layer = fused_mlp(positions(keep_mask('half', height, 32)), True, compile=True)
        differentiate(layer, mlp_inputs(c=8, d=20, height=height, width=32)[0])
        assert set(compiled.graphs()) == names


@pytest.mark.skipif(DEVICE != 'cpu', reason='of a CPU')
def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv('CXX', 'no-such-compiler')
    monkeypatch.setattr(compiled, '_checked', set())
    backbone = small_backbone(dict(compile=True))
    with pytest.raises(ValueError, match='compile=True cannot be honoured: .* there is no no-such-compiler'):
        backbone(image())
    monkeypatch.setattr(torch, '__version__', '2.1.2')
    with pytest.raises(ValueError, match=r'compile=True cannot be honoured: it needs torch 2.4 .* torch 2.1.2'):
        small_backbone(dict(compile=True))
