"""Modules of detectors outside of mmdet, and of Grounding DINO, train like their own code in fp64."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks import DropPath
from mmdet.models.layers.brick_wrappers import FrozenBatchNorm2d
from mmdet.models.utils.vlfuse_helper import SingleScaleBiAttentionBlock
from oracles import DEVICE, assert_near, compute_loss
from stand_ins import define_in_module
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.common import layouts
from sbp_mmdet.plan.memory import saved_bytes

TOLERANCE = 1e-11


def randomize(module, seed=0, scale=0.4):
    """Fill all parameters with random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale)
    return module.double().to(DEVICE).train()


def random_tensor(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


def run_step(module, inputs, *args, **kwargs):
    """Return outputs of a module, and gradients of inputs and parameters, by name."""
    outs = module(*inputs, *args, **kwargs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    leaves = {f'input {i}': x for i, x in enumerate(inputs)} | dict(module.named_parameters())
    gradients = torch.autograd.grad(compute_loss(outs), [*leaves.values()], allow_unused=True)
    return {f'output {i}': o.detach() for i, o in enumerate(outs)} | dict(zip(leaves, gradients, strict=True))


def assert_lean_is_exact(module, inputs, *args, **kwargs):
    """Assert that a changed copy of a module agrees with it, stores less, and leaves nothing unchanged."""
    lean = copy.deepcopy(module)
    report = apply_lean(lean, verify=False)
    assert_near(run_step(lean, inputs, *args, **kwargs), run_step(module, inputs, *args, **kwargs), TOLERANCE)
    stored = [
        saved_bytes(lambda m=m: m(*inputs, *args, **kwargs), exclude=[*m.parameters(), *m.buffers(), *inputs])
        for m in (lean, module)
    ]
    return report, stored[0] / stored[1]


# Grounding DINO.


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(layouts.CHUNK, torch.device(DEVICE).type, 1)


def build_fusion(dropout=0.0, **keys):
    return randomize(SingleScaleBiAttentionBlock(16, 16, 32, 4, dropout=dropout, **keys))


@pytest.mark.parametrize('masked', ['image', 'text', 'both', None])
def test_fusion_of_image_and_text_is_exact_in_chunks(small_chunks, masked):
    block, inputs = build_fusion(), (random_tensor(2, 1500, 16), random_tensor(2, 7, 16, seed=1))
    image = torch.rand(2, 1500, generator=torch.Generator().manual_seed(2)) > 0.4
    text = torch.rand(2, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    image[0, :700] = True  # nothing is seen in the first chunk
    masks = dict(attention_mask_v=image.to(DEVICE) if masked in ('image', 'both') else None)
    masks['attention_mask_l'] = text.to(DEVICE) if masked in ('text', 'both') else None
    report, stored = assert_lean_is_exact(block, inputs, **masks)
    assert report.changed and stored < 0.2


def test_fusion_hides_text_by_a_mask_of_numbers(small_chunks):
    block, inputs = build_fusion(), (random_tensor(2, 700, 16), random_tensor(2, 7, 16, seed=1))
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1]], device=DEVICE)
    report, _ = assert_lean_is_exact(block, inputs, attention_mask_l=mask)
    assert report.changed


def test_fusion_clamps_scores_as_its_own_code():
    block, inputs = build_fusion(), (random_tensor(1, 40, 16), random_tensor(1, 7, 16, seed=1))
    with torch.no_grad():  # scores of about 50000, on either side of it
        for layer in (block.attn.v_proj, block.attn.l_proj):
            layer.bias[::8] = (50000 * 8**0.5) ** 0.5
            layer.weight[::8] = 0
        query, key = block.attn.v_proj(block.layer_norm_v(inputs[0])), block.attn.l_proj(block.layer_norm_l(inputs[1]))
        scores = (query.view(1, 40, 4, 8).transpose(1, 2) @ key.view(1, 7, 4, 8).permute(0, 2, 3, 1)) * 8**-0.5
    assert 0.2 < (scores > 50000).double().mean() < 0.8
    lean = copy.deepcopy(block)
    apply_lean(lean, verify=False)
    assert_near(run_step(lean, inputs), run_step(block, inputs), 1e-7)  # the scores have lost five digits


@pytest.mark.parametrize('side', [0, 1])
def test_fusion_draws_the_same_dropout_in_the_backward_pass(small_chunks, side):
    block, (x, text) = build_fusion(dropout=0.3), (random_tensor(2, 1500, 16), random_tensor(2, 7, 16, seed=1))
    apply_lean(block, verify=False)

    def loss(x, text):
        torch.manual_seed(5)
        return compute_loss(block(x, text)[side : side + 1])

    gradients = torch.autograd.grad(loss(x, text), [x, text])
    for i, gradient in enumerate(gradients):
        step = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(DEVICE)
        ends = [[t + sign * 1e-5 * step if j == i else t for j, t in enumerate((x, text))] for sign in (1, -1)]
        expected = (loss(*ends[0]) - loss(*ends[1])) / 2e-5
        assert (gradient * step).sum().item() == pytest.approx(expected.item(), abs=1e-6 * gradient.norm().item())
    torch.manual_seed(6)
    assert not torch.equal(block(x, text)[side], block(x, text)[side])


def test_fusion_with_stochastic_depth_or_other_widths_keeps_its_own_code():
    for block in (build_fusion(drop_path=0.5), randomize(SingleScaleBiAttentionBlock(16, 24, 32, 4))):
        with pytest.raises(ValueError, match='SingleScaleBiAttentionBlock'):
            apply_lean(block, verify=False)


# Norms.


def test_layer_with_frozen_batch_norm_is_one_operation():
    layer = randomize(ConvModule(3, 8, 3, padding=1, norm_cfg=dict(type=FrozenBatchNorm2d), act_cfg=dict(type='ReLU')))
    assert isinstance(layer.norm, FrozenBatchNorm2d)
    for name, buffer in layer.norm.named_buffers():
        buffer.copy_(random_tensor(8, seed=len(name)).detach().abs() + 0.2)
    report, _ = assert_lean_is_exact(layer, (random_tensor(2, 3, 9, 11),))
    assert report.changed


# ViTDet. Its classes are named by the adapter; these have their names, and compute by the definition.


of_vitdet = functools.partial(define_in_module, 'projects.ViTDet.vitdet.vit')


@of_vitdet
class LN2d(nn.Module):
    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.ones(channels)) for _ in range(2))
        self.eps, self.normalized_shape = eps, (channels,)

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


@of_vitdet
class Attention(nn.Module):
    def __init__(self, width, heads, size, use_rel_pos=True, qkv_bias=True):
        super().__init__()
        self.num_heads, self.use_rel_pos, self.scale = heads, use_rel_pos, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=qkv_bias), nn.Linear(width, width)
        if use_rel_pos:
            self.rel_pos_h, self.rel_pos_w = (nn.Parameter(torch.zeros(2 * n - 1, width // heads)) for n in size)

    def bias(self, table, query, n):
        """Compute the product of each query with the embedding of each distance, in a loop over pairs of positions."""
        if len(table) != 2 * n - 1:
            table = F.interpolate(table.t()[None], size=2 * n - 1, mode='linear')[0].t()
        return torch.stack([query[i] @ table[[i - k + n - 1 for k in range(n)]].t() for i in range(n)])

    def forward(self, x):
        n, height, width, channels = x.shape
        out = []
        for image in self.qkv(x).view(n, height * width, 3, self.num_heads, -1).unbind(0):
            for q, k, v in zip(*(image[:, i].unbind(1) for i in range(3)), strict=True):
                scores = q @ k.t() * self.scale
                if self.use_rel_pos:
                    on_map = q.view(height, width, -1)
                    down = self.bias(self.rel_pos_h, on_map, height)
                    across = self.bias(self.rel_pos_w, on_map.transpose(0, 1), width).transpose(0, 1)
                    scores = scores.view(height, width, height, width) + down[..., None] + across[:, :, None]
                out.append(scores.reshape(height * width, -1).softmax(-1) @ v)
        out = torch.stack(out).view(n, self.num_heads, height, width, -1).permute(0, 2, 3, 1, 4)
        return self.proj(out.reshape(n, height, width, channels))


@of_vitdet
class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.0)
        self.fc2, self.drop2 = nn.Linear(2 * width, width), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


@of_vitdet
class Block(nn.Module):
    def __init__(self, width=16, heads=2, window=0, size=(6, 6), drop_path=0.0, **keys):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn = Attention(width, heads, (window, window) if window else size, **keys)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.mlp, self.window_size = Mlp(width), window

    def attend(self, x):
        side, (height, width) = self.window_size, x.shape[1:3]
        if not side:
            return self.attn(x)
        x = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
        out = torch.zeros_like(x)
        for i in range(0, height, side):
            for j in range(0, width, side):
                out[:, i : i + side, j : j + side] = self.attn(x[:, i : i + side, j : j + side])
        return out[:, :height, :width]

    def forward(self, x):
        x = x + self.drop_path(self.attend(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Blocks(nn.Sequential):
    """A backbone of these blocks."""


@pytest.mark.parametrize('chunk', [1, 2**24])
@pytest.mark.parametrize('size', [(6, 6), (5, 8)])  # with tables of embeddings as they are, and resized
@pytest.mark.parametrize('keys', [{}, dict(window=3), dict(use_rel_pos=False), dict(qkv_bias=False, window=4)], ids=str)
def test_vitdet_blocks_are_exact(monkeypatch, chunk, size, keys):
    monkeypatch.setitem(layouts.CHUNK, torch.device(DEVICE).type, chunk)
    blocks = Blocks(randomize(Block(**keys)), randomize(Block(), seed=1))
    report, stored = assert_lean_is_exact(blocks, (random_tensor(3, *size, 16),))
    assert set(report.changed) == {'0', '1'} and report.left == {} and stored < 0.4


def test_vitdet_blocks_draw_stochastic_depth_as_their_own_code():
    blocks = Blocks(randomize(Block(drop_path=0.4, window=4)), randomize(Block(drop_path=0.4), seed=1))
    lean, x, found = copy.deepcopy(blocks), random_tensor(5, 6, 7, 16), []
    apply_lean(lean, verify=False, skip_dropped_images=False)
    for model in (lean, blocks):
        torch.manual_seed(0)
        found.append(run_step(model, (x,)))
    assert_near(*found, TOLERANCE)


@pytest.mark.parametrize('chunk', [1, 2**24])
@pytest.mark.parametrize('drop_path', [0.0, 0.4])
def test_vitdet_blocks_keep_the_layout_of_their_map(monkeypatch, chunk, drop_path):
    """mmcv's RoIAlign reads maps as if they were contiguous, so another layout would train wrongly."""
    monkeypatch.setitem(layouts.CHUNK, torch.device(DEVICE).type, chunk)
    plain = Blocks(randomize(Block(drop_path=drop_path, window=4)), randomize(Block(drop_path=drop_path), seed=1))
    lean = copy.deepcopy(plain)
    apply_lean(lean, verify=False, skip_dropped_images=False)
    for x in (random_tensor(3, 16, 6, 7).permute(0, 2, 3, 1), random_tensor(3, 6, 7, 16)):
        assert lean(x).stride() == plain(x).stride() == x.stride()


@pytest.mark.parametrize('part', ['attn', 'mlp'])
@pytest.mark.parametrize('window', [0, 4])
def test_a_part_of_a_vitdet_block_that_is_unknown_runs_its_own_code(part, window):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    block = Block(window=window)
    setattr(getattr(block, part), 'proj' if part == 'attn' else 'fc2', Doubled(16 if part == 'attn' else 32, 16))
    blocks = Blocks(randomize(block), randomize(Block(), seed=1))
    report, _ = assert_lean_is_exact(blocks, (random_tensor(2, 6, 7, 16),))
    assert '0' in report.changed and any('Doubled' in reason for reason in report.left.values())


def test_a_trained_scale_of_the_attention_of_vitdet():
    """A trained scale is told from a number of the same value, and the attention runs its own code."""
    block = randomize(Block())
    number = block.attn.scale
    del block.attn.scale
    block.attn.scale = nn.Parameter(torch.tensor(number, dtype=torch.float64, device=DEVICE))
    report, _ = assert_lean_is_exact(Blocks(block), (random_tensor(2, 6, 6, 16),))
    assert any('its scale is a Parameter' in reason for reason in report.left.values())


def test_layer_norm_of_maps_of_vitdet_stores_one_map():
    head = nn.Sequential(randomize(LN2d(8)), nn.GELU())
    assert_lean_is_exact(head, (random_tensor(2, 8, 5, 6),))
