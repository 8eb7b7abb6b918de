"""What the report of a GPU measures, with stand-ins for the GPU: its clock, its profiler and its allocator."""

import types

import pytest
import torch
import torch.distributed as dist
from helpers import make_project
from launches import Launches
from mmengine.config import Config
from torch.autograd import DeviceType

import allocator_trace  # isort: skip  (helpers puts research/ on the path)
import module_runs
import step_runs
import turns
from sync_bn import measure_sync_bn

from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.ops import conv_norm_act
from sbp_mmdet.ops.common import batch_and_group_norms
from sbp_mmdet.plan.caching_allocator import CachingAllocator
from sbp_mmdet.plan.memory import held_bytes
from sbp_mmdet.plan.variants import make_plain

MIB = 2**20


class Clock:
    """Simulation of a CPU that issues work and a GPU that processes it in order; times are in seconds."""

    def __init__(self):
        self.now = self.idle_from = 0.0

    def issue(self, issuing, working):
        self.now += issuing
        self.idle_from = max(self.idle_from, self.now) + working

    def synchronize(self, device=None):
        self.now = max(self.now, self.idle_from)

    def event(self, enable_timing):
        found = types.SimpleNamespace()
        found.record = lambda: setattr(found, 'at', max(self.now, self.idle_from))
        found.elapsed_time = lambda other: 1e3 * (other.at - found.at)
        return found


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(turns, 'time', types.SimpleNamespace(perf_counter=lambda: clock.now, monotonic=lambda: 0.0))
    monkeypatch.setattr(torch.cuda, 'Event', clock.event)
    monkeypatch.setattr(torch.cuda, 'synchronize', clock.synchronize)
    return clock


@pytest.mark.parametrize(('working', 'seconds'), [(5.0, 11.0), (0.25, 2.25)], ids=['GPU decides', 'CPU decides'])
def test_issue_time_and_gpu_time_are_apart(working, seconds, clock):
    """Two operations are issued in a second each, while the GPU is still busy with earlier work."""
    clock.issue(0.0, 100.0)
    times = turns.time_step(lambda: [clock.issue(1.0, working) for _ in range(2)], 'cuda:0')
    assert times == dict(issue=2.0, seconds=pytest.approx(seconds))


def test_times_in_turns(clock):
    """Warm-up rounds are ignored. Ratios refer to the first case, and issue time has ratios of its own."""
    rows, noted, calls = [dict(preset='none'), dict(preset='exact')], [], []

    def timed(case, i):
        calls.append((case, i))
        cold = 100.0 * (len(calls) <= 2)
        return dict(seconds=case + cold, issue=2 * case + cold)

    turns.take_turns([(rows[0], 1.0), (rows[1], 3.0)], 3, timed, lambda row: noted.append(dict(row)), warm_up=1)
    assert calls == [(case, i) for i in (0, 0, 1, 2) for case in (1.0, 3.0)]
    expected = dict(preset='exact', seconds=3.0, ratio=3.0, ratio_min=3.0, ratio_max=3.0, issue=6.0, issue_ratio=3.0)
    assert rows[1] == expected and noted[-1] == expected and len(noted) == 4  # after the first and the last round


def event(name, nanoseconds, device=DeviceType.CUDA, annotation=False):
    """Return an event of the profiler."""
    return types.SimpleNamespace(
        name=lambda: name,
        duration_ns=lambda: nanoseconds,
        device_type=lambda: device,
        is_user_annotation=lambda: annotation,
    )


def test_kernels(monkeypatch):
    """Launches are calls on the CPU. GPU time is that of kernels, copies and fills, without the ranges around them."""
    cpu = DeviceType.CPU
    events = [
        event('cudaLaunchKernel', 10, cpu),
        event('cudaLaunchKernelExC', 10, cpu),
        event('aten::add', 900, cpu),
        event('add', 300),
        event('gemm', 200),
        event('gemm', 400),
        event('Memcpy DtoD', 50),
        event('Optimizer.step#AdamW.step', 5000),
        event('a range', 5000, annotation=True),
    ]
    results = types.SimpleNamespace(events=lambda: events)
    profiler = types.SimpleNamespace(profiler=types.SimpleNamespace(kineto_results=results))
    monkeypatch.setattr(turns, 'profile_step', lambda step: profiler)
    assert turns.count_kernels(None) == {}
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert turns.count_kernels(None) == dict(launches=2, busy=pytest.approx(950e-9))
    del events[:3]  # a profiler that may not look at the GPU
    assert turns.count_kernels(None) == {}


class Memory:
    """Simulation of a GPU's memory, with the functions of torch.cuda that report it."""

    def __init__(self, patch, context):
        self.allocator, self.context, self.trace, self.blocks = CachingAllocator(), context, None, {}
        functions = dict(
            current_device=lambda: 0,
            is_available=lambda: True,
            synchronize=lambda: None,
            empty_cache=self.allocator.give_back,
            reset_peak_memory_stats=self.reset,
            max_memory_allocated=lambda: self.allocator.most_allocated,
            max_memory_reserved=lambda: self.allocator.most_reserved,
            memory_reserved=lambda: self.allocator.reserved,
            memory_stats=lambda: dict(num_alloc_retries=self.allocator.retries),
            mem_get_info=lambda: (2**36 - self.allocator.reserved - context, 2**36),
            memory_snapshot=self.segments,
        )
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        # Optimizers ask this where torch has CUDA, and without a driver it raises an error.
        patch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
        patch.setattr(torch.cuda.memory, '_record_memory_history', self.record)
        patch.setattr(torch.cuda.memory, '_snapshot', lambda: dict(device_traces=[self.trace]))

    def reset(self):
        self.allocator.most_allocated, self.allocator.most_reserved = self.allocator.allocated, self.allocator.reserved

    def segments(self):
        blocks = [dict(size=block.size, state='active_allocated') for block in self.blocks.values()]
        return [dict(device=0, blocks=[*blocks, dict(size=3, state='inactive')]), dict(device=1, blocks=blocks)]

    def record(self, enabled=None, **options):
        assert enabled is None or options['context'] is None  # stack traces take longer than a step
        self.trace = [] if enabled else None

    def tell(self, *actions, **entry):
        if self.trace is not None:
            self.trace += [dict(entry, action=action) for action in actions]

    def allocate(self, nbytes):
        block = self.allocator.allocate(nbytes)
        self.blocks[block.address] = block
        self.tell('alloc', addr=block.address, size=nbytes)
        return block

    def free(self, block):
        del self.blocks[block.address]
        self.tell('free_requested', 'free_completed', addr=block.address, size=block.size)
        self.allocator.free(block)


def test_peaks_of_a_step(monkeypatch):
    """Memory that another variant has cached is not counted as reserved, nor are allocations of the first steps as
    peak."""
    memory, steps = Memory(monkeypatch, context=500 * MIB), []
    weights = memory.allocate(100 * MIB)
    memory.free(memory.allocate(4000 * MIB))  # another variant's

    def step():
        steps.append(len(steps))
        maps = [memory.allocate(n * MIB) for n in (300, 40, 12)]
        if len(steps) == 1:
            memory.allocate(200 * MIB)  # states of the optimizer, which stay
            maps.append(memory.allocate(900 * MIB))  # an algorithm that is tried once
        for one in maps:
            memory.free(one)

    peaks = step_runs.measure_peaks(step)
    assert steps == [0, 1, 2] and not weights.free
    assert peaks == dict(
        peak_bytes=(100 + 200 + 300 + 40 + 12) * MIB,
        reserved=(100 + 200 + 300 + 40 + 12 + 900) * MIB,
        replayed=(100 + 200 + 300 + 40 + 12 + 900) * MIB,
        context=500 * MIB,
        retries=0,
    )


def test_a_history_is_replayed():
    """A reused address is a new allocation; memory that was allocated before the history has no number."""
    trace = [
        dict(action='alloc', addr=1, size=12 * MIB),
        dict(action='free_requested', addr=1, size=12 * MIB),
        dict(action='free_completed', addr=1, size=12 * MIB),
        dict(action='free_completed', addr=9, size=5),
        dict(action='segment_alloc', addr=1, size=20 * MIB),
        dict(action='alloc', addr=1, size=30 * MIB),
    ]
    assert allocator_trace.events_of(trace) == [(0, 12 * MIB), (0, 0), (2, 30 * MIB)]
    assert allocator_trace.replay_history([50 * MIB], trace) == (50 + 12 + 30) * MIB


def test_no_replay_of_a_step_that_ran_out_of_memory(monkeypatch):
    memory = Memory(monkeypatch, context=0)
    with allocator_trace.record_and_replay() as found:
        memory.tell('oom')
    assert found == {} and memory.trace is None


def test_sync_bn_of_one_process_is_batch_norm(monkeypatch):
    options = dict(device='cpu', size=(64, 64), rounds=0)
    for row in measure_sync_bn(['none', 'SyncBN'], **options):
        assert max(row['outputs'], row['gradients']) < 1e-5, row
    assert not dist.is_initialized()
    together = batch_and_group_norms._sync_batch_norm
    monkeypatch.setattr(batch_and_group_norms, '_sync_batch_norm', lambda s, t, z: together(s, t, z + z.detach()))
    plain, wrong = measure_sync_bn(['none', 'SyncBN'], **options)
    assert plain['gradients'] < 1e-5 < 1e-2 < wrong['gradients']


def test_launches_are_counted_where_tensors_have_numbers():
    """Tensors on a CPU keep their numbers while launches are counted; without numbers, what reads them is replaced."""
    x = torch.arange(4.0)
    with Launches():
        assert x[3].item() == 3 and x[x > 1].tolist() == [2, 3]


CASE = dict(batch=1, height=64, width=64, boxes=2, device='cpu')


@pytest.fixture
def called_cuda(monkeypatch, tmp_path):
    """Make the measurements accept a tiny detector on the CPU as if it were on a GPU; return its config."""
    told = types.SimpleNamespace(**vars(torch) | dict(device=lambda name: types.SimpleNamespace(type='cuda')))
    for module in (module_runs, step_runs):
        monkeypatch.setattr(module, 'torch', told)
        monkeypatch.setattr(module, 'count_kernels', lambda step: step() and {} or dict(launches=7, busy=0.5))
    config = make_plain(Config.fromfile(make_project(tmp_path, train=1, val=1)))
    config.model.backbone.drop_path_rate = 0.4
    return config


@pytest.mark.parametrize('profile', [True, False])
def test_modules_on_a_gpu(profile, called_cuda):
    """One round warms up. Kernels are counted last, because the profiler slows down later launches."""
    noted, config = [], called_cuda
    options = dict(amp='off', rounds=1, profile=profile, note=lambda row: noted.append(dict(row)))
    rows = module_runs.measure_module(config, ['none', 'exact'], 'backbone.stages.0', **options, **CASE)
    assert all((row.get('launches') == 7) is profile and row['saved_bytes'] and row['seconds'] for row in rows)
    assert [('seconds' in row, 'launches' in row) for row in noted if 'state' not in row] == [
        *[(False, False)] * 2,
        *[(True, False)] * 2,
        *[(True, True)] * (2 * profile),
    ]


def test_steps_on_a_gpu(called_cuda, monkeypatch):
    """Bytes are those of a step that drops no image; times are those of an ordinary step."""
    memory, variants = Memory(monkeypatch, context=0), []
    with_variant = step_runs.with_variant
    monkeypatch.setattr(
        step_runs, 'with_variant', lambda *args, **keys: variants.append((args[1], keys)) or with_variant(*args, **keys)
    )
    timed = step_runs.time_training_step
    monkeypatch.setattr(
        step_runs, 'time_training_step', lambda *args: (memory.free(memory.allocate(MIB)), timed(*args))[1]
    )
    rows = step_runs.measure_steps(called_cuda, ['none', 'exact'], rounds=1, **CASE)
    assert variants == [('none', {}), ('exact', {}), ('exact', dict(skip_dropped_images=False))]
    for row in rows:
        assert (row['peak_bytes'], row['reserved'], row['replayed']) == (MIB, 2 * MIB, 2 * MIB)
        assert row['launches'] == 7 and row['ratio'] > 0


def test_steps_under_a_cap(called_cuda, monkeypatch):
    """torch refuses a device without an index here. Presets run one after the other, and the limit is removed at the
    end."""
    Memory(monkeypatch, context=0)
    fractions, device = [], torch.device('cuda', 0)
    monkeypatch.setattr(step_runs, 'use_device', lambda name: device)
    total = types.SimpleNamespace(total_memory=2**33)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: total)
    monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', lambda *args: fractions.append(args))
    timed = step_runs.time_training_step

    def need_too_much(model, *args):
        if not any(isinstance(module, LeanModule) for module in model.modules()):
            raise torch.cuda.OutOfMemoryError
        return timed(model, *args)

    monkeypatch.setattr(step_runs, 'time_training_step', need_too_much)
    plain_row, exact = step_runs.measure_steps(called_cuda, ['none', 'exact'], rounds=2, cap=2**31, **CASE)
    assert fractions == [(0.25, device), (1.0, device)]
    assert exact.get('seconds', 0) > 0, exact
    assert plain_row['reason'] == 'out of memory' and 'ratio' not in exact
    with pytest.raises(ValueError, match='is above the 8.00 GiB'):
        step_runs.measure_steps(called_cuda, ['none'], rounds=1, cap=2**34, **CASE)


def test_held_bytes_are_those_of_the_graph():
    """The graph of an operation of the package is held without its outputs, in every version of torch."""
    settings, channels = conv_norm_act.ConvNormSettings(norm='fixed'), 8
    x = torch.randn(1, channels, 16, 16, requires_grad=True)
    weight, ones = torch.randn(channels, channels, 1, 1, requires_grad=True), torch.ones(channels)
    tensors = conv_norm_act.ConvNormTensors(x, weight, None, ones, ones, ones, ones)

    def forward():
        return conv_norm_act.conv_norm(settings, tensors._replace(x=x * 2))

    held, peak = held_bytes(forward)
    assert x.nbytes <= held < 1.5 * x.nbytes < peak
