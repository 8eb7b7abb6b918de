"""Checkpointing of modules changes nothing but memory."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import count_stored_bytes
from helpers import make_project
from mmdet.models.backbones.csp_darknet import Focus
from mmdet.models.layers import DeformableDetrTransformerEncoder
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from mmdet.registry import HOOKS
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sbp_mmdet.apply import apply_lean, keep_ratios
from sbp_mmdet.checkpointing import checkpoint_modules

FLOAT = 4


class Net(BaseModule):
    """A network with everything that makes checkpointing difficult: batch norm, dropout, lists and keyword
    arguments.
    """

    def __init__(self):
        super().__init__()
        self.neck = Neck()
        norm = lambda: nn.BatchNorm2d(4, momentum=0.3)  # noqa: E731
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3), norm(), nn.ReLU(), norm()) for _ in range(2))
        self.heads[1][1].momentum = None  # the mean of all batches

    def forward(self, x):
        a, b = self.neck([x, x * 2], scale=0.5)
        return self.heads[0](a).square().sum() + self.heads[1](b).sin().sum()


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, xs, scale=1.0):
        return tuple(self.drop(conv(x).exp()) * scale for conv, x in zip(self.convs, xs, strict=True))


@pytest.fixture
def nets():
    torch.manual_seed(0)
    plain = Net().train()
    lean = copy.deepcopy(plain)
    assert checkpoint_modules(lean, ['neck', 'heads']) == ['neck', 'heads.0', 'heads.1']
    return plain, lean


def two_steps(net, x):
    torch.manual_seed(1)
    for _ in range(2):
        net.zero_grad()
        net(x).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def test_gradients_and_running_statistics_are_those_without(nets):
    plain, lean = nets
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    expected, actual = two_steps(plain, x), two_steps(lean, x)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
    for name, buffer in plain.state_dict().items():
        assert torch.equal(lean.state_dict()[name], buffer), name
    assert lean.heads[0][1].num_batches_tracked == 2
    assert lean.heads[0][1].momentum == 0.3 and lean.heads[1][1].momentum is None


def test_stores_the_inputs_only(nets):
    plain, lean = nets
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    known = [x, *lean.parameters(), *lean.buffers()]
    # The second input of the neck, its outputs as the heads' inputs, and what square and sin need.
    positions, inner = 2 * 8 * 8, 2 * 6 * 6
    assert count_stored_bytes(lambda: lean(x), known) == (positions * (3 + 4 + 4) + inner * (4 + 4)) * FLOAT
    assert count_stored_bytes(lambda: plain(x), known) > 2 * count_stored_bytes(lambda: lean(x), known)


def test_evaluation_stays_plain(nets):
    plain, lean = nets
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(lean.eval()(x), plain.eval()(x))


def test_a_copy_runs_its_own_parameters(nets):
    """EMA makes such copies."""
    lean = nets[1]
    other = copy.deepcopy(lean)
    for p in other.parameters():
        nn.init.zeros_(p)
    x = torch.randn(1, 3, 8, 8)
    assert other(x) == 0 and lean(x) != 0
    assert type(lean.neck).__name__ == 'Neck' and isinstance(lean.neck, Neck)


def test_the_hook_names_what_is_missing(nets):
    hook = HOOKS.build(dict(type='CheckpointModulesHook', modules='roi_head.bbox_head'))
    with pytest.raises(ValueError, match=r"'roi_head.bbox_head' does not exist.*'neck', 'heads'"):
        hook.apply(nets[0])


@pytest.mark.parametrize('modules', [3, [1], dict(neck=1)])
def test_the_hook_takes_names(modules):
    with pytest.raises(ValueError, match=r"modules=.* must be a list of names of submodules, such as \['neck'\]"):
        HOOKS.build(dict(type='CheckpointModulesHook', modules=modules))


def test_a_module_that_is_named_twice_is_checkpointed_once(nets):
    assert checkpoint_modules(nets[0], ['neck', 'heads', 'neck', 'heads.0'])[:1] == ['neck']
    assert sum(kind.__name__ == 'Checkpointed' for kind in type(nets[0].neck).__mro__) == 1


def test_what_is_never_called_is_refused_or_warned_of(nets, caplog):
    class Head(BaseRoIHead):
        def __init__(self):
            BaseModule.__init__(self)
            self.bbox_head = nn.Linear(2, 2)

        init_bbox_head = init_mask_head = init_assigner_sampler = loss = None

    plain, _ = nets
    plain.roi_head = Head()
    with pytest.raises(ValueError, match=r"the loss of roi_head.*its parts: \['roi_head.bbox_head'\]"):
        checkpoint_modules(plain, ['roi_head'])
    hook = HOOKS.build(dict(type='CheckpointModulesHook', modules=['neck', 'neck.convs', 'roi_head.bbox_head']))
    hook.apply(plain)
    plain(torch.randn(1, 3, 8, 8)).backward()
    runner = SimpleNamespace(model=plain, logger=logging.getLogger('test_checkpointing'))
    for _ in range(2):
        hook.after_train_iter(runner, 0)
    (message,) = caplog.messages
    assert 'roi_head.bbox_head did not run in the first step' in message and 'neck' not in message


def test_in_mmengines_runner(tmp_path, monkeypatch):
    """The runner trains the detector of the quick start for two steps."""
    config = Config.fromfile(make_project(tmp_path, train=4, size=64))
    monkeypatch.chdir(tmp_path)
    config.merge_from_dict(dict(work_dir='out', train_cfg=dict(max_epochs=1), launcher='none'))
    config.custom_hooks = [
        dict(type='CheckpointModulesHook', modules=['neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head']),
        dict(type='TargetsInChunksHook', masks=2),
        dict(type='LeanHook', preset='sbp', verify=False),
        dict(type='EMAHook'),
    ]
    config.model.backbone.sbp_cfg = None
    config.default_hooks.checkpoint = None
    for split in ('val', 'test'):
        for key in ('dataloader', 'evaluator', 'cfg'):
            config[f'{split}_{key}'] = None
    seen = []
    forward = FPN.forward
    monkeypatch.setattr(FPN, 'forward', lambda self, x: (seen.append(torch.is_grad_enabled()), forward(self, x))[1])
    runner = Runner.from_cfg(config)
    runner.train()
    assert runner.iter == 2 and len(seen) == 4  # each step runs the neck twice
    assert isinstance(runner.model.neck, FPN) and keep_ratios(runner.model)


class Counting(nn.Module):
    """A module that reads a buffer that it writes to, and replaces another one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer('steps', torch.zeros((), dtype=torch.long))
        self.register_buffer('mean', torch.zeros(6))
        self.register_buffer('unused', None)

    def forward(self, x):
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2))
        return self.linear(x * self.steps - self.mean[:, None])


def twice(norm):
    """Return a network whose norm runs twice in each pass: each run changes statistics that the graph of the other
    saved."""
    return nn.Sequential(norm, nn.Conv1d(6, 6, 1), norm)


def with_inputs_out_of_range():
    norm = nn.BatchNorm1d(6)
    norm.bias.data.fill_(torch.inf)
    return nn.Sequential(norm, nn.BatchNorm1d(6))


BUFFERS = {
    'instance norm': lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    'spectral norm by hooks': lambda: torch.nn.utils.spectral_norm(nn.Conv1d(6, 6, 1)),
    'spectral norm by parametrization': lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Conv1d(6, 6, 1)),
    'counter': Counting,
    'cumulative mean': lambda: nn.BatchNorm1d(6, momentum=None),
    'batch norm twice': lambda: twice(nn.BatchNorm1d(6)),
    'instance norm twice': lambda: twice(nn.InstanceNorm1d(6, track_running_stats=True)),
    'batch norm in evaluation mode': lambda: nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6).eval()),
    'infinite statistics': with_inputs_out_of_range,
}


@pytest.mark.parametrize('kind', BUFFERS)
def test_buffers_are_as_after_one_run(kind):
    """The recomputation also begins with the buffers with which the first run began."""
    torch.manual_seed(0)
    plain = nn.ModuleDict(dict(neck=BUFFERS[kind]())).train()
    if kind == 'batch norm in evaluation mode':
        plain.neck[1].eval()
    lean = copy.deepcopy(plain)
    checkpoint_modules(lean, ['neck'])
    places = [buffer.data_ptr() for buffer in lean.buffers()]
    x = torch.randn(4, 6, 6)
    for net in (plain, lean):
        for _ in range(2):
            net.neck(net.neck(x)).sin().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, equal_nan=True, msg=name)
    for (name, expected), actual in zip(plain.named_buffers(), lean.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=name)
    if kind != 'counter':  # which replaces one
        assert [buffer.data_ptr() for buffer in lean.buffers()] == places  # EMA and DDP hold on to them


def test_a_scripted_part():
    """torch's checkpoint cannot stop within a scripted module, so another one follows."""
    nets = []
    for _ in range(2):  # parameters of a copied scripted module get no gradients
        torch.manual_seed(0)
        part = torch.jit.script(nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6)))
        nets.append(nn.ModuleDict(dict(neck=nn.Sequential(part, nn.Conv1d(6, 6, 1)))))
    checkpoint_modules(nets[1], ['neck'])
    x = torch.randn(4, 6, 6)
    for net in nets:
        net.neck(x).sin().sum().backward()
    plain, lean = nets
    for (name, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    torch.testing.assert_close(dict(lean.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


def test_an_error_in_the_recomputation_leaves_nothing_behind():
    class Fails(nn.Module):
        runs = 0

        def forward(self, x):
            Fails.runs += 1
            if Fails.runs == 2:
                raise RuntimeError('out of memory')
            return x.sin()

    net = nn.ModuleDict(dict(neck=nn.Sequential(nn.BatchNorm1d(6), Fails()))).train()
    checkpoint_modules(net, ['neck'])
    x = torch.randn(4, 6, 6)
    out = net.neck(x)
    before = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}
    with pytest.raises(RuntimeError, match='out of memory'):
        out.sum().backward()
    for name, buffer in net.named_buffers():
        assert buffer is before[name][0] and torch.equal(buffer, before[name][1]), name
    net.neck(x).sum().backward()
    assert net.neck[0].num_batches_tracked == 2


@pytest.mark.parametrize('preset', ['exact', 'int8', 'with_cp'])
@pytest.mark.parametrize('modules', [['encoder.layers'], ['encoder'], ['encoder.layers.0.ffn']], ids=str)
def test_the_order_of_the_hooks_makes_no_difference(modules, preset):
    init_default_scope('mmdet')
    attention = dict(embed_dims=16, num_heads=2, num_levels=1, batch_first=True)
    layer = dict(self_attn_cfg=attention, ffn_cfg=dict(embed_dims=16, feedforward_channels=32))
    found = {}
    for order in ('lean first', 'checkpoints first'):
        torch.manual_seed(0)
        net = nn.ModuleDict(dict(encoder=DeformableDetrTransformerEncoder(num_layers=2, layer_cfg=layer))).train()
        if order == 'checkpoints first':
            checkpoint_modules(net, modules)
        report = str(apply_lean(net, preset))
        checkpoint_modules(net, modules)
        x = torch.randn(1, 12, 16, requires_grad=True)
        places = dict(spatial_shapes=torch.tensor([[3, 4]]), level_start_index=torch.tensor([0]))
        places |= dict(valid_ratios=torch.ones(1, 1, 2), key_padding_mask=None, query_pos=None)
        stored = count_stored_bytes(lambda: net.encoder(query=x, **places), [x, *net.parameters()])  # noqa: B023
        net.encoder(query=x, **places).sin().sum().backward()
        found[order] = report, stored, [x.grad, *(p.grad for p in net.parameters())]
    first, second = found.values()
    assert first[:2] == second[:2]
    for a, b in zip(first[2], second[2], strict=True):
        assert torch.equal(a, b)


def test_distributed_with_gradients_in_the_buckets(nets, tmp_path):
    plain, lean = nets
    dist.init_process_group('gloo', store=dist.FileStore(str(tmp_path / 'store'), 1), rank=0, world_size=1)
    try:
        net = DistributedDataParallel(lean, gradient_as_bucket_view=True)
        x = torch.randn(2, 3, 8, 8)
        expected, actual = two_steps(plain, x), two_steps(net, x)
    finally:
        dist.destroy_process_group()
    for name, gradient in expected.items():
        assert torch.equal(actual[f'module.{name}'], gradient), name


def test_an_input_of_inference_mode_that_the_module_only_reads():
    """Autograd cannot save such a tensor. A focus layer copies its pixels into another one first."""
    plain = nn.Sequential(Focus(3, 4, kernel_size=3)).train()
    lean, found = copy.deepcopy(plain), []
    checkpoint_modules(lean, ['0'])
    with torch.inference_mode():
        images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
    for net in (lean, plain):
        net(images).square().sum().backward()
        found.append([*(p.grad for p in net.parameters()), *net.buffers()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
