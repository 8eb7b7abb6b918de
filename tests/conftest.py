"""Fixtures of all tests: seeds, the device of operations, and the iteration that a runner would report."""

import ast
import contextlib
import functools
import gc
import inspect

import hypothesis
import mmengine.config.utils
import pytest
import torch
import yapf.yapflib.yapf_api
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.dense_heads import RPNHead
from mmengine.logging import MessageHub, MMLogger
from oracles import DEVICE, move_to_device

from sbp_mmdet.ops.common.autograd_function import Operation
from sbp_mmdet.plan import detector
from sbp_mmdet.plan.cuda_rules import full_fp32
from sbp_mmdet.verify.first_pass import verification_off

# The last phase, 'explain', is left out, because it repeats a failing test some hundred times.
hypothesis.settings.register_profile(
    'core', derandomize=True, deadline=None, max_examples=20, phases=list(hypothesis.Phase)[:-1]
)
hypothesis.settings.load_profile('core')
# Cycles that hold tensors are few, and full collections take long.
gc.set_threshold(20_000, 20, 20)
# For each base config in MMDetection, mmengine reads all of its metafiles again.
mmengine.config.utils.load = functools.cache(mmengine.config.utils.load)


def _check_syntax(text, **options):
    ast.parse(text)
    return text, False


# Nobody reads the configs that runners format for their logs. One that is no Python is an error, as it is for yapf.
yapf.yapflib.yapf_api.FormatCode = _check_syntax
# torch formats the stack at every seed, for each kind of device that is not there.
for _device in (getattr(torch, name, None) for name in ('cuda', 'xpu', 'mtia')):
    if _device is not None and not _device.is_available():
        _device.manual_seed_all = lambda seed: None

_default_dropout = inspect.signature(MultiheadAttention).parameters['dropout_layer'].default
_DROPOUT = dict(_default_dropout)

# The longest files start first, so that none of them runs alone at the end.
LONGEST = 'gpu_report rehearsal slurm plan_whole autocast training fake_cuda_ops plan_sizes second_device'.split()


def pytest_collection_modifyitems(items):
    """Sort the longest files to the front."""
    places = {f'test_{name}': place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True, scope='module')
def freeze():
    """Exempt what was imported and what earlier files left from garbage collection, which takes a third of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    """Seed torch and reset the iteration, because masks depend on both."""
    torch.manual_seed(0)
    MessageHub.get_current_instance().runtime_info.pop('iter', None)  # a runner of another test may have set it


@pytest.fixture(autouse=True)
def log_level():
    """Restore the level of mmengine's logger, which commands change."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def quiet(log_level):
    """Log errors only."""
    MMLogger.get_current_instance().setLevel('ERROR')


@pytest.fixture(autouse=True)
def default_dropout():
    """Restore the default of mmcv's ``dropout_layer``, because ``MultiheadAttention(dropout=0.1)`` writes to it."""
    _default_dropout.update(_DROPOUT)
    yield
    _default_dropout.update(_DROPOUT)


@pytest.fixture(autouse=True)
def operations_on_the_device(monkeypatch):
    """Run every operation on ``SBP_TEST_DEVICE``, forward and backward.

    The code around it, such as oracles on the CPU, keeps its device. Tests of whole modules move them to the device:
    of copies, bytes are not counted right, and a CPU draws other random numbers.
    """
    if DEVICE == 'cpu':
        yield
        return
    call = Operation.__call__

    def moved(self, settings, tensors):
        there = move_to_device(tensors)
        out = call(self, settings, there).to(tensors.x.device)
        for name in tensors._fields:
            if name.startswith('running') and getattr(tensors, name) is not None:  # updated in place
                getattr(tensors, name).copy_(getattr(there, name))
        return out

    monkeypatch.setattr(Operation, '__call__', torch.compiler.disable(moved))
    with full_fp32():
        yield


@pytest.fixture(autouse=True)
def unverified(request):
    """Disable verification, unless the test file sets ``VERIFIES = True``."""
    with contextlib.nullcontext() if getattr(request.module, 'VERIFIES', False) else verification_off():
        yield


@pytest.fixture
def without_replay(monkeypatch):
    """Count steps without the replay in the caching allocator, a third of the time, where no test reads its results."""
    monkeypatch.setattr(detector, 'reserved_bytes', lambda *args: {})


@pytest.fixture
def iteration():
    """Return a function that sets the iteration of mmengine's runner, which is unset afterwards."""
    hub = MessageHub.get_current_instance()
    yield lambda step: hub.update_info('iter', step)
    hub.runtime_info.pop('iter', None)


@pytest.fixture
def in_fp64(monkeypatch):
    """Run detectors in fp64, except for the choice of proposals, which mmcv implements in fp32 only.

    In fp32, the last bit of a forward pass depends on the CPU. It can flip a ReLU or change a proposal, and then
    single gradients change by 1e-3 of the largest one.
    """
    preprocess, predict = DetDataPreprocessor.forward, RPNHead.predict_by_feat

    def double_images(*args):
        data = preprocess(*args)
        for sample in data['data_samples']:
            sample.gt_instances.bboxes = sample.gt_instances.bboxes.double()
        return dict(data, inputs=data['inputs'].double())

    def choose(self, scores, deltas, **kwargs):
        results = predict(self, [s.float() for s in scores], [d.float() for d in deltas], **kwargs)
        for proposals in results:
            proposals.bboxes = proposals.bboxes.double()
        return results

    monkeypatch.setattr(DetDataPreprocessor, 'forward', double_images)
    monkeypatch.setattr(RPNHead, 'predict_by_feat', choose)
    torch.set_default_dtype(torch.float64)  # of targets and positions, which detectors make without a dtype
    yield
    torch.set_default_dtype(torch.float32)
