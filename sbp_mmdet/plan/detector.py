"""Counts of a training step of a whole detector: the bytes of its tensors, part by part.

A step runs on the CPU with the tensors that it would make on CUDA, and these are counted.
"""

import contextlib
import copy
import gc
import sys
from unittest import mock

import torch
from mmdet.models.dense_heads import EmbeddingRPNHead
from mmdet.models.task_modules.assigners import HungarianAssigner, MaxIoUAssigner
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIMIZERS, init_default_scope
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import Tensor, nn

from ..models.weights import quiet
from ..surgery import hook_class, mix_out, model_hooks
from ..verify.first_pass import FirstPass
from .batch import as_if_trained, at_the_first_step, build_batch
from .config_keys import scope_of
from .cuda_rules import autocast_rules, cuda_kernels
from .cuda_storage import cuda_storage
from .device import use_device
from .eight_bit import AdamW8bitStates
from .held import held_tensors, storage_bytes
from .inputs import find_annotations, find_classes
from .memory import LiveBytes, SavedByPart
from .parts import PartTracker
from .reserved import find_usual_share, reserved_bytes
from .skip_arithmetic import SkipArithmetic
from .transforms import name_of

__all__ = [
    'assignment_on_cpu',
    'build_detector',
    'build_model',
    'build_training',
    'clear_caches',
    'measure_detector',
    'refuse_unknown_optimizer',
]


def measure_detector(
    config: Config,
    *,
    batch: int,
    height: int,
    width: int,
    boxes: int,
    channels: int = 3,
    usual: tuple[int, int] | None = None,
    expandable: bool = True,
    compute: bool = False,
) -> dict:
    """Count what a training step of a config's model holds on a GPU, by a step on random images on the CPU.

    Args:
        config (Config): Config of a detector, with the hooks that change the model.
        batch (int): Number of images. The step runs on all of them and is not extrapolated from smaller batches,
            because an assigner works image by image, so that its peak is not proportional to the batch.
        height (int): Height of the images before padding, in pixels.
        width (int): Width of the images before padding, in pixels.
        boxes (int): Number of ground-truth boxes in each image.
        channels (int): Number of channels of the images. Default: 3.
        usual (tuple[int, int] | None): Height and width of the usual batch, which the memory of the caching allocator
            depends on. If ``None``, all batches are of one size. Default: None.
        expandable (bool): See :func:`.reserved.reserved_bytes`. Default: True.
        compute (bool): Whether large operations are computed, too. The bytes are the same. Default: False.

    Returns:
        dict: Bytes of ``parameters`` (with buffers), ``optimizer``, ``gradients``, ``saved`` (a dict, by part),
        ``forward`` (everything at the end of the forward pass) and ``peak``; ``peaks`` (a dict, by phase) and
        ``peak_phase``; and the keys of :func:`.reserved.reserved_bytes`.

    Raises:
        ValueError: If ``batch`` is below 1 or ``boxes`` below 0.
    """
    for name, value, least in (('batch', batch, 1), ('boxes', boxes, 0)):
        if value < least:
            raise ValueError(f'{name}={value} must be {least} or more')
    clear_caches()
    counter = LiveBytes(record=True)
    bfloat16 = 'Amp' in _wrapper_type(config) and str(config.optim_wrapper.get('dtype')).endswith('bfloat16')
    batch_shape = dict(batch=batch, height=height, width=width, boxes=boxes, channels=channels, device='cpu')
    with (
        at_the_first_step(),
        cuda_kernels(counter, compute) as skipping,
        cuda_storage(counter, bfloat16),
        assignment_on_cpu(counter),
    ):
        model, wrapper, data = build_training(config, **batch_shape)
        try:
            row, held = _count_step(model, wrapper, data, counter, config, None if compute else skipping)
        finally:
            del model, wrapper, data
            gc.collect()
            clear_caches()
    return dict(row, **reserved_bytes(held, counter.events, find_usual_share(usual, height, width), expandable))


def clear_caches() -> None:
    """Clear the caches of all operations.

    A count has to include the tensors in them, and leaves tensors there whose values were not computed.
    """
    rooms = tuple(f'{__package__.rpartition(".")[0]}.{room}.' for room in ('ops', 'stochastic_backprop'))
    for module in [module for name, module in sys.modules.items() if name.startswith(rooms)]:
        for function in [value for value in vars(module).values() if hasattr(value, 'cache_clear')]:
            function.cache_clear()


@contextlib.contextmanager
def assignment_on_cpu(counter: LiveBytes):
    """Pause the count while mmdet's assigner works on the CPU (``gpu_assign_thr``). Its results are counted.

    Args:
        counter (LiveBytes): The counter of the device's bytes.
    """
    assign = MaxIoUAssigner.assign

    def run(self, pred_instances, gt_instances, *args, **kwargs):
        if not 0 < self.gpu_assign_thr < len(gt_instances.bboxes):
            return assign(self, pred_instances, gt_instances, *args, **kwargs)
        with counter.paused():
            result = assign(self, pred_instances, gt_instances, *args, **kwargs)
        for key in ('gt_inds', 'max_overlaps', 'labels'):
            if (value := getattr(result, key)) is not None:
                setattr(result, key, value.clone())
        return result

    with mock.patch.object(MaxIoUAssigner, 'assign', run):
        yield


def build_training(
    config: Config,
    *,
    batch: int,
    height: int,
    width: int,
    boxes: int,
    device: str,
    channels: int = 3,
    trained: bool = True,
) -> tuple:
    """Build model, optimizer wrapper and batch of a training step.

    Args:
        config (Config): See :func:`measure_detector`.
        batch (int): See :func:`measure_detector`.
        height (int): See :func:`measure_detector`.
        width (int): See :func:`measure_detector`.
        boxes (int): See :func:`measure_detector`.
        channels (int): See :func:`measure_detector`. Default: 3.
        device (str): 'cpu', or a CUDA device.
        trained (bool): See :func:`.batch.as_if_trained`. Default: True.

    Returns:
        tuple: Model in training mode, optimizer wrapper, and a batch.
    """
    if torch.device(device).type == 'cuda':
        use_device(device)
        if 'Amp' in _wrapper_type(config):
            # A dynamic loss scale starts with overflows, which would skip the optimizer's step.
            config = copy.deepcopy(config)
            config.optim_wrapper.loss_scale = 1.0
    model, wrapper = build_detector(config, device)
    if trained:
        as_if_trained(model)
    reads_masks, semantic = find_annotations(config)
    num_classes, masks = find_classes(config)
    proposals = 1000 if config.model.get('roi_head') and not config.model.get('rpn_head') else 0
    options = dict(semantic=semantic, proposals=proposals, channels=channels)
    data = build_batch(batch, height, width, boxes, num_classes, masks or reads_masks, **options)
    return model, wrapper, data


def build_model(config: Config, device: str) -> nn.Module:
    """Build a model as mmengine's runner does, with hooks that change the model, and without weights.

    Args:
        config (Config): Config of a detector.
        device (str): Device of the model.

    Returns:
        nn.Module: The model in training mode.
    """
    init_default_scope(scope_of(config))
    model = MODELS.build(_without_weights(config.model))
    model.to(device)
    model.train()  # not `model = ...`: the method of mmdet's distillation returns nothing
    for module in model.modules():
        mix_out(module, FirstPass)  # the step is counted without its verification
    for p in model.parameters(recurse=False):  # level_embed of Deformable DETR and DINO is uninitialised memory
        nn.init.normal_(p)
    for module in model.modules():
        if isinstance(module, EmbeddingRPNHead):  # without weights, its proposals would have negative sides
            module.init_weights()
    for hook in model_hooks(config.get('custom_hooks')):
        hook.apply(model)
    if modules := config.get('activation_checkpointing'):  # behind the hooks, as the runner does
        turn_on_activation_checkpointing(model, modules)
    return model


def build_detector(config: Config, device: str):
    """Build model and optimizer, see :func:`build_model`.

    Args:
        config (Config): Config of a detector.
        device (str): Device of the model. On a CPU, the wrapper of mixed precision is replaced by a plain one.

    Returns:
        tuple: The model in training mode, and its optimizer wrapper.
    """
    model = build_model(config, device)
    cfg = copy.deepcopy(config.optim_wrapper)
    if torch.device(device).type == 'cpu':
        if 'Amp' in str(cfg.get('type', '')):
            cfg.type = 'OptimWrapper'
            for key in ('dtype', 'loss_scale', 'use_fsdp'):
                cfg.pop(key, None)
        if name_of(cfg.get('optimizer') or {}) == 'AdamW8bit':
            cfg.optimizer.type = AdamW8bitStates
    with quiet():  # optimizer wrapper constructors log the name of every parameter
        try:
            wrapper = build_optim_wrapper(model, cfg)
        except TypeError:
            refuse_unknown_optimizer(cfg)
            raise
    return model, wrapper


def refuse_unknown_optimizer(cfg: dict) -> None:
    """Raise an error that names the optimizer if it is in no registry, which mmengine reports as 'None'.

    Args:
        cfg (dict): Config of an optimizer wrapper.

    Raises:
        ValueError: If the optimizer is unknown.
    """
    optimizer = cfg.get('optimizer')
    kind = optimizer.get('type') if isinstance(optimizer, dict) else None
    with OPTIMIZERS.switch_scope_and_registry(None) as registry:
        if isinstance(kind, str) and registry.get(kind) is None:
            raise ValueError(
                f"optim_wrapper.optimizer.type='{kind}' is not registered; write the name of one of torch's, such as "
                "'AdamW', or import its module by custom_imports"
            )


def _without_weights(cfg):
    """Return a copy of a model's config that downloads no weights and has no synchronised batch norm."""
    cfg = copy.deepcopy(cfg)
    for key in ('init_cfg', 'pretrained', 'teacher_ckpt'):
        cfg.pop(key, None)
    backbone = cfg.get('backbone')
    if backbone:
        backbone.pop('pretrained', None)
        backbone.init_cfg = None
    return _without_sync(cfg)


def _without_sync(cfg):
    """Replace mmcv's synchronised batch norm, which needs a process group, by batch norm, which stores as much."""
    if isinstance(cfg, dict):
        for key, value in cfg.items():
            if key == 'type' and value == 'MMSyncBN':
                cfg[key] = 'BN'
            _without_sync(value)
    elif isinstance(cfg, (list, tuple)):
        for value in cfg:
            _without_sync(value)
    return cfg


def _wrapper_type(config):
    return str(config.optim_wrapper.get('type', ''))


def _amp_dtype(config):
    """Return the precision of the config's autocast, or ``None``. On a CPU, bf16 is used in place of fp16.

    A GPU's autocast takes these two only. With any other, torch warns and disables it.
    """
    if 'Amp' not in _wrapper_type(config):
        return None
    name = str(config.optim_wrapper.get('dtype')).rpartition('.')[2]
    return torch.bfloat16 if name in ('None', 'float16', 'bfloat16') else None


def _count_bytes(tensors):
    return sum(storage_bytes(tensors))


def _get_states(optimizer) -> list[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]


def count_averaged_bytes(config: Config, model: nn.Module) -> int:
    """Return the bytes of the averaged copies that :class:`mmengine.hooks.EMAHook` and its subclasses keep.

    Args:
        config (Config): Config of a detector.
        model (nn.Module): The model of the config. A copy has its parameters and its buffers.
    """
    hooks = [*(config.get('custom_hooks') or []), *filter(None, (config.get('default_hooks') or {}).values())]
    kinds = [hook_class(hook) for hook in hooks]
    copies = sum(isinstance(kind, type) and issubclass(kind, EMAHook) for kind in kinds)
    return copies * _count_bytes([*model.parameters(), *model.buffers()])


def _note_bytes(wrapper, row, model, saved, live, phase):
    """Return a context manager that writes the bytes at the end of forward and backward pass to ``row``."""
    update, step = wrapper.update_params, wrapper.step

    def update_params(loss, *args, **kwargs):
        row['saved'] = saved.count([*model.parameters(), *model.buffers()])
        row['forward'] = live()
        phase('backward')
        return update(loss, *args, **kwargs)

    def optimizer_step(*args, **kwargs):
        row['gradients'] = _count_bytes([p.grad for p in model.parameters() if p.grad is not None])
        phase('optimizer step')
        return step(*args, **kwargs)

    return mock.patch.multiple(wrapper, update_params=update_params, step=optimizer_step)


def _count_step(model: nn.Module, wrapper, data, counter, config, skipping):
    tracker = PartTracker(model)
    saved = SavedByPart(tracker.current)
    for group in wrapper.optimizer.param_groups:
        # CUDA's default: all parameters of a group at once, with temporary tensors of the group's size.
        if group.get('foreach', 0) is None and not group.get('fused'):
            group['foreach'] = True
    free = _bytes_are_independent_of_values(model)
    skip = contextlib.nullcontext()
    if skipping:  # otherwise everything is computed
        skip = SkipArithmetic(lambda: free or counter.phase != 'forward' or tracker.in_network or skipping())
    accumulates = wrapper._accumulative_counts > 1
    with skip:  # the first optimizer step makes the states; gradients are freed after each step that updates
        counter.phase = 'optimizer step'
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
        wrapper.step()
        if accumulates:  # the largest step is the last before an update, which finds the gradients of those before it
            wrapper._inner_count = wrapper._accumulative_counts - 1
        else:
            wrapper.zero_grad()
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    row = dict(parameters=_count_bytes(held_tensors(model)), optimizer=_count_bytes(_get_states(wrapper.optimizer)))
    row['parameters'] += count_averaged_bytes(config, model)
    static = row['parameters'] + row['optimizer'] + _count_bytes(kept)

    @contextlib.contextmanager
    def optim_context(model):
        dtype = _amp_dtype(config)
        with saved.hooks(), torch.autocast('cpu', dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            yield

    counter.phase = 'forward'
    watch = _note_bytes(
        wrapper, row, model, saved, lambda: static + counter.live, lambda p: setattr(counter, 'phase', p)
    )
    with mock.patch.object(wrapper, 'optim_context', optim_context), watch, autocast_rules(), skip, counter:
        torch.manual_seed(0)
        model.train_step(data, wrapper)
    peaks = {phase: static + peak for phase, peak in counter.peaks.items()}
    row.update(peak=static + counter.peak, peak_phase=counter.peak_phase, peaks=peaks)
    held = storage_bytes([*held_tensors(model), *_get_states(wrapper.optimizer), *kept])
    return row, [*held, count_averaged_bytes(config, model)]


def _bytes_are_independent_of_values(model: nn.Module) -> bool:
    """Return whether exactly one prediction is assigned to each box, so that the bytes do not depend on which it is."""
    assigners = [module.assigner for module in model.modules() if hasattr(module, 'assigner')]
    return bool(assigners) and all(type(assigner) is HungarianAssigner for assigner in assigners)
