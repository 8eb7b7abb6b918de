"""A rehearsal: one step on the largest batch that the data set can give, before the first iteration.

A training may run out of memory in its third epoch, when the largest batch comes. With
``custom_hooks = [dict(type='RehearseHook')]`` it comes first. Everything that the step changes is restored.
"""

import contextlib
import functools
import gc
import math

import torch
from mmdet.registry import HOOKS
from mmengine.config import Config
from mmengine.dist import all_reduce, get_world_size
from mmengine.hooks import Hook
from torch.nn.parallel import DistributedDataParallel

from ..presets import refuse_unknown_keys
from ..resume import refuse_empty_loader
from ..surgery import unwrap
from ..verify.dry_run import NoUpdate
from ..verify.first_pass import verification_off
from .restored import restored_state

__all__ = ['DoesNotFit', 'RehearseHook', 'build_largest_batch', 'refuse_more_classes']


_DIGITS = 1.001  # a budget is given with few digits, so a need that exceeds it by less than this still fits


class DoesNotFit(RuntimeError):
    """The largest batch needs more memory than there is."""


@HOOKS.register_module()
class RehearseHook(Hook):
    """Hook that runs forward and backward pass on the largest batch and stops a training that would not fit.

    Args:
        budget (str | None): Memory that may be used, such as '8GiB'. If ``None``, all memory of the GPU. Default: None.
        stop (bool): Whether to end the program after the rehearsal, for ``sbp-mmdet rehearse``. Default: False.

    Raises:
        ValueError: If a key is unknown or a value invalid.
        DoesNotFit: When training begins and the largest batch does not fit. The message names the batch, the memory
            that it needs, and a variant of the config that fits.

    Example:
        ``custom_hooks = [dict(type='LeanHook', preset='exact'), dict(type='RehearseHook', budget='8GiB')]``
    """

    priority = 'VERY_LOW'  # behind hooks that change the model

    def __init__(self, budget: str | None = None, stop: bool = False, **unknown):
        from .planner import parse_bytes  # noqa: PLC0415  the planner is loaded where it is used

        refuse_unknown_keys('RehearseHook', unknown, ['budget', 'stop'])
        if budget is not None:
            parse_bytes(budget)  # now, because the data are read before the training begins
        if not isinstance(stop, bool):
            raise ValueError(f'stop={stop!r} must be True or False')
        self.budget, self.stop = budget, stop

    def before_train(self, runner) -> None:
        """Rehearse the largest step. mmengine's runner calls this method when everything is built.

        Args:
            runner (Runner): The runner.

        Raises:
            DoesNotFit: See :class:`RehearseHook`.
            NoBatch: See :func:`.resume.refuse_empty_loader`.
        """
        from .batch import while_as_if_trained  # noqa: PLC0415
        from .inputs import find_classes  # noqa: PLC0415
        from .planner import parse_bytes  # noqa: PLC0415  the planner is loaded where it is used
        from .tables import format_gib  # noqa: PLC0415

        refuse_empty_loader(runner.train_dataloader)
        budget = _get_gpu_memory(runner.model) if self.budget is None else parse_bytes(self.budget)
        batch, batch_shape = build_largest_batch(runner)
        model = unwrap(runner.model)
        # An untrained RPN finds next to nothing; in all but the first steps heads get more than that.
        with restored_state(model), verification_off(), while_as_if_trained(model):
            peak = _measure_training_peak(runner, batch, batch_shape)
        # All processes continue, or all stop: a process that continued alone would wait for the others.
        peak, budget = _reduce_over_ranks(peak, 'max'), _reduce_over_ranks(budget, 'min')
        size = _describe_batch(batch, batch_shape)
        if peak is None or (budget and peak > budget * _DIGITS):
            needs = 'more than the GPU has' if peak is None else format_gib(peak)
            raise DoesNotFit(
                f'RehearseHook: the largest batch of this data set, {size}, needs {needs}'
                f'{f"; {format_gib(budget)} may be used" if budget else ""}. {_advise(runner, budget, batch_shape)}'
            )
        message = f'RehearseHook: the largest batch, {size}, needs {format_gib(peak)}'
        message += ': it fits' if budget else ' here; no budget was given'
        with restored_state(unwrap(runner.model)):
            validations = build_largest_validation(runner) if budget else None
            peaks = [(measure_validation_peak(runner, one), description) for one, description in validations or ()]
        if validations:
            peak, images = max(peaks, key=lambda one: math.inf if one[0] is None else one[0])
            peak = _reduce_over_ranks(peak, 'max')
            if peak is None or peak > budget * _DIGITS:
                needs = 'more than the GPU has' if peak is None else format_gib(peak)
                pasted = 'Masks are pasted into images of their full size: ' if find_classes(runner.cfg)[1] else ''
                remedy = 'validate on smaller images, or with fewer detections (max_per_img in test_cfg)'
                raise DoesNotFit(
                    f'RehearseHook: training fits, but validation on {images} needs {needs}; {format_gib(budget)} may '
                    f'be used. {pasted or "Remedy: "}{remedy}'
                )
            message += f'; validation on {images} needs {format_gib(peak)}'
        if self.stop:
            print(message)
            raise SystemExit(0)
        runner.logger.info(message)


def build_largest_batch(runner) -> tuple[dict, dict]:
    """Return the largest batch that a runner's training data can give: largest padded size, most boxes.

    Args:
        runner (Runner): A runner whose training loop is built.

    Returns:
        tuple[dict, dict]: The batch, and a dict of its ``batch`` (number of images), ``height``, ``width``, ``boxes``
        (in each image) and ``channels``, and the size of a ``usual`` batch.

    Raises:
        ValueError: If the pipeline cannot be run, or the loop has a dict or list of data loaders.
    """
    from .batch import build_batch  # noqa: PLC0415
    from .config_values import list_loaders  # noqa: PLC0415
    from .inputs import find_classes, find_training_inputs  # noqa: PLC0415
    from .pipeline import CannotRun  # noqa: PLC0415
    from .real_batches import build_real_batch, has_usual_structure  # noqa: PLC0415

    loader = runner.train_dataloader
    if loaders := list_loaders(runner.cfg, 'train_dataloader').keys() - {'train_dataloader'}:
        raise CannotRun(
            f'its loop takes batches from a dict or list of data loaders ({", ".join(sorted(loaders))}), and a '
            'rehearsal makes those of a single one; train without a rehearsal'
        )
    refuse_more_classes(runner.cfg, loader.dataset)
    images = getattr(loader.batch_sampler, 'batch_size', None) or loader.batch_size
    described = (runner.cfg.get('train_dataloader') or {}).get('dataset') and runner.cfg.get('model')
    if not described or not has_usual_structure(loader):  # a runner may be built of objects, without a config
        images = images or (runner.cfg.get('train_dataloader') or {}).get('batch_size', 1)
        return build_real_batch(loader, runner.cfg, images)
    inputs = find_training_inputs(runner.cfg, images, dataset=loader.dataset, processes=get_world_size())
    classes, masks = find_classes(runner.cfg)
    make = functools.partial(
        build_batch,
        num_classes=classes,
        with_masks=masks or inputs.masks,
        semantic=inputs.semantic,
        channels=inputs.channels,
    )
    images = inputs.batch
    batch_shape = dict(batch=images, height=inputs.height, width=inputs.width, boxes=inputs.boxes)
    batch_shape.update(channels=inputs.channels, usual=inputs.usual)
    if inputs.branches is None:
        return make(images, inputs.height, inputs.width, inputs.boxes, truth=inputs.truth), batch_shape
    parts = {name: make(*part[:4], truth=part.truth) for name, part in inputs.branches.items()}
    keys = 'inputs', 'data_samples'
    return {key: {name: part[key] for name, part in parts.items()} for key in keys}, batch_shape


def _describe_batch(batch, batch_shape):
    """Return number, size and boxes of a batch's images as a text, for each branch of a semi-supervised batch."""
    from .tables import format_images  # noqa: PLC0415

    inputs = batch.get('inputs') if isinstance(batch, dict) else None
    if not isinstance(inputs, dict):
        return format_images(**batch_shape)
    parts = []
    for branch, images in inputs.items():
        height, width = (max(image.shape[at] for image in images) for at in (-2, -1))
        boxes = max(len(sample.get('gt_instances', ())) for sample in batch['data_samples'][branch])
        parts.append(f'{branch}: {format_images(len(images), height, width, boxes)}')
    return '; '.join(parts)


def refuse_more_classes(config: Config, dataset) -> None:
    """Refuse a data set that has more classes than a head of the model, which on a GPU is an assertion without a name.

    Args:
        config (Config): The config.
        dataset: A data set, or a wrapper of data sets.

    Raises:
        CannotRun: If labels of the data set are none of a head's classes.
    """
    from .config_checks import find_small_heads  # noqa: PLC0415
    from .pipeline import CannotRun  # noqa: PLC0415
    from .real_batches import real_labels  # noqa: PLC0415

    known = _count_classes(dataset)
    small = find_small_heads(config, known)
    # A transform may map labels to others, and a panoptic data set has classes that no box has.
    if small and hasattr(dataset, '__getitem__'):
        with contextlib.suppress(Exception):  # pictures that are not here
            small = find_small_heads(config, real_labels(dataset) or 0)
    for name, number in small.items():
        raise CannotRun(
            f'model.{name}: num_classes={number}, but the training data have {known} classes; set '
            f'num_classes={known} in every head of the model'
        )


def _count_classes(dataset):
    """Return the number of classes of metainfo that the annotations of a data set have."""
    inner = getattr(dataset, 'datasets', None) or [getattr(dataset, 'dataset', None)]
    return max(len(getattr(dataset, 'cat2label', ())), *(_count_classes(one) if one else 0 for one in inner))


def build_largest_validation(runner) -> list[tuple[dict, str]] | None:
    """Return validation batches that consist of the largest image of a runner's validation data.

    An image may be the largest on the disk, where masks are pasted into it, or behind its pipeline.

    Args:
        runner (Runner): A runner whose loops are built.

    Returns:
        list[tuple[dict, str]] | None: One or two batches, and their descriptions as a text; ``None`` if the runner does
        not validate, or uses a loop without a data loader.
    """
    from .pipeline import CannotRun, read_info, sample_pipeline  # noqa: PLC0415

    loop = getattr(runner, '_val_loop', None)
    loader = getattr(loop, 'dataloader', None)
    if loader is None or not len(loader.dataset):
        return None
    dataset = loader.dataset
    sizes = [read_info(dataset, i)[:2] for i in range(len(dataset))]
    chosen = [max(range(len(sizes)), key=lambda i: sizes[i][0] * sizes[i][1])]
    with contextlib.suppress(CannotRun):  # a pipeline without inputs has a step of its own
        samples = sample_pipeline(dataset, runner.cfg)
        pixels = samples.sizes.prod(-1).max(-1)
        if pixels[samples.images == chosen[0]].max(initial=0) < pixels.max():
            chosen.append(int(samples.images[pixels.argmax()]))
    images = getattr(loader.batch_sampler, 'batch_size', None) or loader.batch_size or 1
    batches = []
    for i in chosen:
        height, width = sizes[i]
        description = f'{images} image{"s" * (images > 1)}' + (f' of {height} x {width}' if height else '')
        batches.append((loader.collate_fn([dataset[i] for _ in range(images)]), description))
    return batches


def _reduce_over_ranks(number: float | None, op: str) -> float | None:
    """Return the largest or smallest number of all processes (``op`` 'max' or 'min'); ``None`` counts as infinite."""
    value = torch.tensor(math.inf if number is None else float(number), dtype=torch.float64)
    all_reduce(value, op)
    return None if value.isinf() else int(value)


def _measure_training_peak(runner, batch, batch_shape) -> int | None:
    """Return the bytes that a training step needs, with the buckets of DDP, or ``None`` if out of memory."""
    from .reserved import find_usual_share  # noqa: PLC0415

    model, buckets = runner.model, 0
    if isinstance(model, DistributedDataParallel):
        model = model.module
        buckets = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    usual = find_usual_share(batch_shape.get('usual'), batch_shape['height'], batch_shape['width'])
    if any(getattr(one, '_accumulative_counts', 1) > 1 for one in _wrappers(runner)):
        for p in model.parameters():  # a step finds the gradients of those before it
            p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
    step = lambda: model.train_step(batch, NoUpdate(runner.optim_wrapper, backward=True))  # noqa: E731
    return _measure_needed_bytes(runner, model, step, buckets, usual)


def measure_validation_peak(runner, batch: dict) -> int | None:
    """Return the bytes that a validation step needs in which the detector returns as many objects as it may.

    Args:
        runner (Runner): A runner with a detector.
        batch (dict): Batch of :func:`build_largest_validation`.

    Returns:
        int | None: Number of bytes, or ``None`` if out of memory.
    """
    model = unwrap(runner.model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _without_score_thresholds(model):
            return _measure_needed_bytes(runner, model, lambda: model.val_step(batch))
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _without_score_thresholds(model):
    """Set all score thresholds of a model to 0 within the context, and restore them at its end.

    The scores of an untrained detector are low. Without thresholds it returns as many detections as a trained one.
    """
    configs, waiting = [], [module.test_cfg for module in model.modules() if hasattr(module, 'test_cfg')]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            configs += [(node, node['score_thr'])] if isinstance(node.get('score_thr'), (int, float)) else []
            waiting += [*node.values()]
    try:
        for node, _ in configs:
            node['score_thr'] = 0.0
        yield
    finally:
        for node, threshold in reversed(configs):
            node['score_thr'] = threshold


def _measure_needed_bytes(runner, model, run, buckets=0, usual_share=1) -> int | None:
    """Return the bytes that ``run`` needs, with the optimizer's future states, or ``None`` if out of memory.

    On a CPU the planner's margins are added, and gaps between tensors. On a GPU only CUDA's context is: what kernels
    use is measured, and what has no room is out of memory. Each process runs by itself, because processes that have
    room would wait for one that has none.
    """
    from .device import is_out_of_memory  # noqa: PLC0415
    from .held import held_tensors, state_bytes, storage_bytes  # noqa: PLC0415
    from .memory import LiveBytes  # noqa: PLC0415
    from .planner import CONTEXT, count_needed_bytes  # noqa: PLC0415
    from .reserved import reserved_bytes  # noqa: PLC0415

    states = [size for one in _wrappers(runner) for size in state_bytes(one.optimizer)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]  # of steps before this one
    try:
        if next(model.parameters()).is_cuda:
            torch.cuda.reset_peak_memory_stats()
            device = next(model.parameters()).device
            room = torch.empty(sum(states) + buckets, dtype=torch.uint8, device=device)
            run()
            torch.cuda.synchronize()
            del room
            return min(int(torch.cuda.max_memory_allocated() + CONTEXT), _get_gpu_memory(model))
        with LiveBytes(record=True) as counter:
            run()
        held = [*states, *storage_bytes([*held_tensors(model, *runner.hooks), *gradients])]
        row = dict(peak=sum(held) + counter.peak, gradients=buckets)
        return count_needed_bytes(dict(row, **reserved_bytes(held, counter.events, usual_share)), ddp=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _wrappers(runner):
    wrapper = runner.optim_wrapper
    return [*wrapper.values()] if hasattr(wrapper, 'values') else [wrapper]


def _get_gpu_memory(model):
    device = next(model.parameters()).device
    return torch.cuda.get_device_properties(device).total_memory if device.type == 'cuda' else None


def _advise(runner, budget, batch_shape):
    """Return advice for a step that does not fit: a variant that fits by the planner's count, or other remedies."""
    from .counts import count_variants  # noqa: PLC0415
    from .planner import choose_row  # noqa: PLC0415
    from .snippet import format_heading, snippet  # noqa: PLC0415
    from .tables import format_gib  # noqa: PLC0415

    if 'detector' in (runner.cfg.get('model') or {}):
        return (
            'The planner does not count steps with a teacher or a tracker, so try them: '
            "custom_hooks=[dict(type='LeanHook', preset='exact_min')], a smaller batch or smaller images."
        )
    try:
        rows = count_variants(runner.cfg, budget, batch_shape)
    except Exception as error:  # noqa: BLE001  the message that the batch does not fit matters more than this one
        return f'The planner failed ({type(error).__name__}: {error}).'
    best = choose_row(rows)
    if best is None:
        least = min(rows, key=lambda row: row.need)
        return (
            f'According to the planner no variant fits; the smallest, {least.variant}, needs {format_gib(least.need)}: '
            'use a smaller batch, smaller images or a smaller model.'
        )
    if best.variant == 'none':
        return 'According to the planner it should fit without changes: does another program use this GPU?'
    lines = snippet(runner.cfg, best.variant)
    return f'According to the planner {best.variant} fits. {format_heading(runner.cfg)}\n\n{lines}'
