"""Counted bytes agree with sums worked out by hand."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from mmcv.cnn import ConvModule
from ops_cases import get_fused_mlp, mlp_inputs
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.cuda_rules import cuda_kernels
from sbp_mmdet.plan.memory import LiveBytes, SavedByPart, peak_bytes, saved_bytes
from sbp_mmdet.plan.parts import PartTracker, part_of

FLOAT = 4


def test_each_storage_once():
    x = torch.randn(10, 8, requires_grad=True)

    def forward():
        y = x.exp()  # saves its output
        return y * y.t().t()  # saves y twice, once as a view

    assert saved_bytes(forward) == 80 * FLOAT


def test_excluded_storages_and_their_views():
    layer = nn.Linear(8, 3)
    x = torch.randn(5, 8)
    assert saved_bytes(lambda: F.relu(layer(x)), exclude=[x]) == 15 * FLOAT
    # The weight's gradient needs x; nothing needs the weight, for x has no gradient.
    assert saved_bytes(lambda: layer(x)) == 40 * FLOAT
    assert saved_bytes(lambda: layer(x.exp()), exclude=[x, *layer.parameters()]) == 40 * FLOAT
    inner = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    assert saved_bytes(lambda: inner(x[1:]), exclude=[x, *inner.parameters()]) == 4 * 6 * FLOAT


def test_only_what_is_still_saved():
    """Graphs that are freed within the function do not count, even if their addresses are used again."""
    x = torch.randn(1000, requires_grad=True)

    def forward():
        for _ in range(5):
            x.exp().sum().backward()
        return x.exp()

    assert saved_bytes(forward) == 1000 * FLOAT
    assert saved_bytes(lambda: None) == 0
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp()) == 0


def test_an_output_that_nobody_needs_is_let_go():
    """Sigmoid saves its output, which references the node that saved it."""
    x = torch.randn(8, requires_grad=True)
    assert saved_bytes(lambda: x.sigmoid().detach()) == 0


def test_custom_function():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x[::2].clone())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda: Half.apply(x)) == 50 * FLOAT
    Half.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((100,), 2.0))


def test_checkpointing_stores_the_input_only():
    body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(10, 16, requires_grad=True)
    known = list(body.parameters())
    assert saved_bytes(lambda: body(x), exclude=known) == 10 * (16 + 64 + 64) * FLOAT
    for reentrant in (False, True):
        run = lambda reentrant=reentrant: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=reentrant)  # noqa: E731
        assert saved_bytes(run, exclude=known) == 10 * 16 * FLOAT


def test_backward_works_under_the_hooks():
    x = torch.randn(20, dtype=torch.double, requires_grad=True)

    def forward():
        (x.sin() * x).sum().backward()

    saved_bytes(forward)
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach() + x.detach().sin())


def test_live_bytes_when_addresses_are_used_again():
    """New storages may get the addresses of freed ones. Storages that existed before never count, nor does freeing
    them."""
    old = torch.zeros(1000)
    with LiveBytes() as counter:
        kept = old[:] * 2
        del old
        for _ in range(50):
            part = kept[:250] + 1  # the one before is held while the next one is made, but for the first
            view = part[5:]
        assert (counter.live, counter.peak) == ((1000 + 250) * FLOAT, (1000 + 2 * 250) * FLOAT)
        del part
        assert counter.live == (1000 + 250) * FLOAT
        del view
        assert counter.live == 1000 * FLOAT
    del kept
    assert counter.live == 0


def test_sparse_tensors():
    """Some losses of mmdet multiply by a sparse tensor, which holds its indices and its values."""
    a, x = torch.eye(6, dtype=torch.float32).to_sparse(), torch.randn(6, 4, requires_grad=True)
    assert saved_bytes(lambda: torch.sparse.mm(a, x).sum()) == 2 * 6 * 8 + 6 * 4
    assert peak_bytes(lambda: torch.sparse.mm(torch.eye(6).to_sparse(), x).sum().backward()) >= 2 * 6 * 8 + 6 * 4


def test_counts_are_of_the_pieces_that_a_gpu_would_cut():
    """A GPU's chunks are larger than a CPU's, and so is the temporary memory of a backward pass."""

    def peak():
        tensors, _ = mlp_inputs(n=1, c=8, d=512, height=64, width=64, dtype=torch.float32)
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        out = get_fused_mlp()(**leaves)
        return peak_bytes(lambda: out.sum().backward())

    own = peak()
    with cuda_kernels(LiveBytes(), compute=False):
        large = peak()
    hidden = 64 * 64 * 512 * FLOAT
    assert own < 2 * hidden < large
    assert peak() == own


def test_code_that_moves_a_tensor_to_the_gpu_itself_is_counted():
    """Co-DETR's head moves tensors itself."""
    with cuda_kernels(LiveBytes(), compute=False):
        x = torch.arange(3)
        assert x.cuda() is x and x.cuda(0, non_blocking=True) is x


def test_names_of_parts():
    for name, part in {
        'backbone.downsample_layers.0.1': 'stem',
        'backbone.downsample_layers.1': 'stage 2',
        'backbone.stages.3.0.norm': 'stage 4',
        'backbone.norm2': 'output norms',
        'backbone.layer1.0.conv1': 'stage 1',
        'backbone.bn1': 'stem',
        'backbone': 'backbone',
        'neck.lateral_convs.0': 'neck',
        'roi_head.bbox_roi_extractor': 'box heads',
        'roi_head.mask_head.2.loss_mask': 'mask heads',
        'roi_head': 'RoI',
        'bbox_head.loss_cls': 'bbox_head',
    }.items():
        assert part_of(name) == part


def test_following_the_parts_changes_no_byte():
    """Convolutions that read their input from the map that the previous layer saves do so during a count, too."""
    layers = [ConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='BN'), act_cfg=dict(type='SiLU')) for _ in range(4)]
    model = nn.Sequential(nn.Sequential(*layers))
    apply_lean(model, 'exact')
    x, held = torch.randn(2, 8, 16, 16), []
    for follow in (False, True):
        tracker = PartTracker(model) if follow else None
        saved = SavedByPart(tracker.current if follow else lambda: 'all')
        with saved.hooks():
            loss = model(x).sum()
        held.append(sum(saved.count([*model.parameters(), *model.buffers()]).values()))
        del loss
    assert held[0] == held[1] > 0
