"""The command ``sbp-mmdet``: what fits into a GPU, and what a preset would change, without a GPU.

sbp-mmdet plan CONFIG --budget 8GiB     which variant fits, and the lines to paste
sbp-mmdet plan CONFIG --batch max       the largest batch of each variant
sbp-mmdet rehearse CONFIG               one step on the largest batch of the data set, on this machine's GPU
sbp-mmdet report CONFIG                 what the config's LeanHook or sbp_cfg changes in the model, and what not
sbp-mmdet verify CONFIG --device cuda   whether changed modules compute what they computed before, on this device
sbp-mmdet check                         whether this environment can train: versions, registry, one small step
"""

import argparse
import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator

import torch
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from .batch_size import find_largest_batches
from .check import check
from .config_checks import add_config, count_data_classes, find_missing_import, find_own_hooks, find_small_heads
from .counts import count_step, count_variants, end_progress, list_presets
from .errors import describe_error
from .inputs import add_inputs, count_crowded_boxes, find_classes, find_training_inputs
from .pipeline import CannotRun
from .planner import CONTEXT, MARGIN, OWN, WORKSPACES, choose_row, parse_bytes, parse_size
from .quiet import without_reading_of_annotations
from .rehearse import DoesNotFit, RehearseHook
from .report import add_report
from .snippet import format_heading, snippet
from .tables import Column, format_gib, format_table
from .transforms import name_of
from .variants import STANDS_IN, is_plain, load_config, needs_mmpretrain, plain
from .verify import add_verify

__all__ = ['main']


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments (list[str] | None): Arguments of the command line. If ``None``, those of the process. Default: None.
    """
    parser = argparse.ArgumentParser(
        'sbp-mmdet', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar='plan | rehearse | report | verify | check')
    _add_plan(verbs)
    _add_rehearse(verbs)
    add_report(verbs)
    add_verify(verbs)
    verbs.add_parser('check', help='whether this environment can train').set_defaults(run=None)
    whole = arguments is None
    args = parser.parse_args(_joined(sys.argv[1:] if whole else arguments))
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    if args.run is None:
        raise SystemExit(0 if check() else 1)
    args.answer = ''
    warnings.filterwarnings('ignore', 'torch.meshgrid: in an upcoming release')  # of mmdet's code
    try:
        with _stdout_for_the_answer(args, whole) if getattr(args, 'json', False) else contextlib.nullcontext():
            config = load_config(args.config, args.cfg_options)
            if problem := find_missing_import(config):
                print(f'warning: {args.config}: {problem}', file=sys.stderr)
            args.run(args, config)
    except ValueError as error:
        instead = isinstance(error, CannotRun) and hasattr(args, 'size')
        remedy = '; give the size of the images, for example --size 800x1333' if instead else ''
        parser.exit(2, f'sbp-mmdet: error: {error}{remedy}\n')  # without the usage, which would hide it


def _joined(arguments):
    """Join ``--budget`` with a negative value, which argparse would mistake for an option."""
    joined = []
    for word in arguments:
        if joined[-1:] == ['--budget'] and re.match(r'-[\d.]', word):
            joined[-1] = f'--budget={word}'
        else:
            joined.append(word)
    return joined


@contextlib.contextmanager
def _stdout_for_the_answer(args, whole: bool) -> Iterator[None]:
    """Send to stderr what is written to stdout within the context, and print the answer at its end.

    Libraries print at import, in a step and when the process ends, configs start programs that print.

    Args:
        args (argparse.Namespace): Arguments, of which ``answer`` is printed.
        whole (bool): Whether the process is this command alone, so that nothing may follow the answer.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        print(args.answer, end='', flush=True)
        if whole:
            os.dup2(2, 1)


def _add_plan(verbs):
    verb = verbs.add_parser('plan', help='which variant fits into a GPU')
    add_config(verb)
    verb.add_argument('--budget', help="memory of the GPU: 8GiB, 7.5GB (default: this machine's GPU)")
    add_inputs(verb, largest=True)
    verb.add_argument(
        '--boxes', type=int, help='boxes in an image (default: a crowded batch of COCO: 60 for 2 images, 20 for 32)'
    )
    verb.add_argument('--gpus', type=int, default=1, help='above 1: with the buckets of distributed training')
    verb.add_argument('--adamw8bit', action='store_true', help='consider 8-bit optimizer states as well')
    verb.add_argument('--json', action='store_true', help='print the answer for scripts')
    verb.add_argument('--verbose', action='store_true', help='also what is allocated, and what torch reserves')
    verb.set_defaults(run=_plan)


def _plan(args, config):
    budget, size = _parse_budget(args.budget), parse_size(args.size) if args.size else None
    for name in ('batch', 'boxes', 'gpus'):
        if getattr(args, name) not in (None, 'max') and getattr(args, name) < 1:
            raise ValueError(f'--{name} {getattr(args, name)} must be 1 or more')
    _refuse_strategies(args, config)
    if not isinstance(config.optim_wrapper.get('optimizer'), dict):
        raise ValueError(
            f'{args.config}: optim_wrapper has no optimizer that is a dict; write '
            "optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)). Trainings with several optimizers are not "
            'counted; sbp-mmdet rehearse runs a step of theirs'
        )
    if 'detector' in config.model:
        raise ValueError(
            f'{args.config}: {name_of(config.model)} trains its model.detector together with a teacher or a tracker. '
            'Such steps are not counted; plan for the config of the detector alone'
        )
    if args.batch == 'max':
        return _plan_batches(args, config, budget, size)
    inputs = find_training_inputs(config, args.batch, size, processes=args.gpus)
    boxes = inputs.boxes if args.boxes is None else args.boxes
    args.boxes = count_crowded_boxes(inputs.batch) if boxes is None else boxes
    batch_shape = dict(batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=args.boxes)
    batch_shape.update(usual=inputs.usual, channels=inputs.channels)
    if budget < WORKSPACES + CONTEXT and not args.json:
        raise SystemExit(
            f'Nothing fits into {format_gib(budget)}: CUDA takes {format_gib(WORKSPACES + CONTEXT)} with any model. '
            'Give the memory of a larger GPU, such as --budget 8GiB'
        )
    try:
        rows = count_variants(config, budget, batch_shape, ddp=args.gpus > 1, eight_bit=args.adamw8bit)
    except Exception as error:  # whatever a model's own code raises where it cannot do with our batch or device
        raise SystemExit(f'{args.config}: a training step cannot be run here: {describe_error(error)}') from error
    finally:
        end_progress()
    best = choose_row(rows)
    unchanged = best is not None and best.variant == 'none' and is_plain(config) and not needs_mmpretrain(config)
    lines = '' if best is None else snippet(config, OWN if unchanged else best.variant)
    if args.json:
        _print_json(args, budget, inputs, rows, best, lines)
    else:
        print(_format_plan(args, config, inputs, budget, rows, best, lines))
    if best is None:
        raise SystemExit(1)


def _plan_batches(args, config, budget, size):
    inputs, base = find_training_inputs(config, None, size, processes=args.gpus), plain(config)
    presets = list_presets(base)

    def measure(variant, images):
        given_boxes = inputs.boxes if args.boxes is None else args.boxes
        boxes = count_crowded_boxes(images) if given_boxes is None else given_boxes
        batch_shape = dict(batch=images, height=inputs.height, width=inputs.width, boxes=boxes, usual=inputs.usual)
        batch_shape.update(channels=inputs.channels, expandable=False)
        return count_step(base, variant, batch_shape, f'{variant}, {images} images')

    try:
        rows = find_largest_batches(base, budget, measure, presets, gpus=args.gpus)
    except Exception as error:  # whatever a model's own code raises where it cannot do with our batch or device
        raise SystemExit(f'{args.config}: a training step cannot be run here: {describe_error(error)}') from error
    finally:
        end_progress()
    exact = [row for row in rows if row.images and row.gradients == 'exact' and row.variant != 'with_cp']
    best = max(exact or [row for row in rows if row.images], key=lambda row: row.images, default=None)
    lines = '' if best is None else snippet(config, best.variant, best.images)
    if args.json:
        _print_json(args, budget, inputs, rows, best, lines)
    else:
        print(_format_batches(args, config, inputs, budget, rows, best, lines))
    if best is None:
        raise SystemExit(1)


def _print_json(args, budget, inputs, rows, best, lines):
    inputs = dict(inputs._asdict(), truth=None, branches=None)  # the boxes of the data set are not printed
    result = dict(budget=budget, inputs=inputs, rows=[row._asdict() for row in rows])
    args.answer = json.dumps(dict(result, answer=best and best.variant, lines=lines), indent=1) + '\n'


def _format_batches(args, config, inputs, budget, rows, best, lines):
    """Return the page of ``plan --batch max`` as text."""
    columns = [
        Column('variant', lambda row: row.variant),
        Column('gradients', lambda row: row.gradients),
        Column('images', lambda row: f'{row.images}' if row.images else 'none fits'),
        Column('needs', lambda row: format_gib(row.need)),
        Column('learning rate', lambda row: None if row.learning_rate is None else f'{row.learning_rate:.3g}'),
    ]
    note = (
        f'Images of {inputs.height} x {inputs.width} on each of {args.gpus} GPU{"s" if args.gpus > 1 else ""} with '
        f'{format_gib(budget)} ({inputs.source}). The learning rate is what --auto-scale-lr sets for this batch.'
    )
    note += _describe_run(config)
    if best is None:
        end = f'Not even one image fits into {format_gib(budget)}. Try smaller images or a smaller model.'
    else:
        short = f' The config has {inputs.batch} images per GPU' if inputs.batch > best.images else ''
        more = short and f'; set optim_wrapper.accumulative_counts={-(-inputs.batch // best.images)} to keep that.'
        end = f'Most images with exact gradients: {best.images}, with {best.variant}.{short}{more}'
        end = f'{end} {format_heading(config)}\n\n{lines}'
    return f'{format_table(columns, rows)}\n\n{note}\n{end}'


def _format_plan(args, config, inputs, budget, rows, best, lines):
    """Return the page of ``plan`` as text."""
    columns = [
        Column('variant', lambda row: row['variant']),
        Column('gradients', lambda row: row['gradients']),
        Column('needs', lambda row: format_gib(row['need'])),
        Column('', lambda row: 'fits' if row['fits'] else 'too much'),
    ]
    if args.verbose:
        columns[2:2] = [
            Column('allocated', lambda row: format_gib(row['allocated'])),
            Column('reserved', lambda row: format_gib(row['reserved'])),
        ]
    images = '1 image' if inputs.batch == 1 else f'{inputs.batch} images'
    description = f'{images} of {inputs.height} x {inputs.width} with {args.boxes} boxes each'
    table = format_table(columns, [row._asdict() for row in rows])
    usual = ''
    if inputs.usual:
        rare, middle = (f'{height} x {width}' for height, width in (inputs.rare, inputs.usual))
        usual = f'; one batch in 1,000 reaches {rare}, the median is {middle}'
    cuda = f'gaps between tensors, {MARGIN:.0%} and {format_gib(WORKSPACES + CONTEXT)} for CUDA'
    note = f'Largest batch: {description} ({inputs.source}{usual}); with {cuda}.'
    note += _describe_run(config)
    if best is None:
        adam = 'Adam' in str(config.optim_wrapper.optimizer.type)
        more = ' --adamw8bit,' if adam and not args.adamw8bit else ''
        end = f'Nothing fits into {format_gib(budget)}. Try a smaller batch, smaller images,{more} or a smaller model.'
    elif not lines:
        end = f'It fits into {format_gib(budget)} as it is.'
    else:
        how = '' if best.variant in ('none', OWN) else f' with {best.variant}'
        end = f'It fits into {format_gib(budget)}{how}. {format_heading(config)}\n\n{lines}'
    return f'{table}\n\n{note}\n{end}{_with_expandable_segments(rows, best, budget)}'


def _describe_run(config):
    """Return lines on what a training needs besides its steps: validation, and packages that are missing."""
    lines = []
    if config.get('val_dataloader') and config.get('val_cfg'):
        masks = ', which pastes masks into full-size images,' if find_classes(config)[1] else ''
        lines.append(f'Validation{masks} is not counted; sbp-mmdet rehearse runs a step of it on your largest image.')
    if (config.get('env_cfg') or {}).get('cudnn_benchmark'):
        lines.append(
            'Not counted: cudnn_benchmark=True tries kernels whose workspaces may take gigabytes. The answer is for '
            'cudnn_benchmark=False.'
        )
    if config.get('compile'):
        lines.append(f'Not counted: compile={config.compile!r}; compiled parts store and recompute what torch chooses.')
    classes = count_data_classes((config.get('train_dataloader') or {}).get('dataset'))
    for name, number in find_small_heads(config, classes).items():
        lines.append(
            f'model.{name}: num_classes={number}, but the training data have {classes} classes; set '
            f'num_classes={classes} in every head, or correct metainfo.'
        )
    if own := find_own_hooks(config):
        lines.append(f'Not counted: what {", ".join(own)} may hold on the GPU; sbp-mmdet rehearse measures that too.')
    collation = name_of((config.get('train_dataloader') or {}).get('collate_fn') or {})
    if collation not in ('', 'pseudo_collate'):
        lines.append(f'Not counted: what collate_fn={collation} does to a batch; sbp-mmdet rehearse runs it.')
    if needs_mmpretrain(config):
        lines.append(f'The config {_describe_missing_backbone(config)}; counts and lines are for that backbone.')
    return ''.join(f'\n{line}' for line in lines)


def _describe_missing_backbone(config):
    kind = config.model.backbone.type
    return (
        f'needs mmpretrain for {kind}, which is not installed. type={STANDS_IN[kind]!r} with the same arguments is the '
        'same network, takes the same weights and needs nothing else'
    )


def _with_expandable_segments(rows, best, budget):
    """Return a sentence on a cheaper variant that fits with expandable segments, or an empty text."""
    before = rows[: rows.index(best)] if best else rows
    row = next((row for row in before if not row.fits and row.expandable <= budget), None)
    if row is None:
        return ''
    name = 'the config as it is' if row.variant in ('none', OWN) else row.variant
    return (
        f'\n\nWith PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, {name} needs '
        f'{format_gib(row.expandable)}, which fits too, because gaps between tensors are smaller then.'
    )


def _parse_budget(text):
    if text is not None:
        return parse_bytes(text)
    if not torch.cuda.is_available():
        raise ValueError('this machine has no GPU; give the memory of yours, for example --budget 8GiB')
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _add_rehearse(verbs):
    verb = verbs.add_parser('rehearse', help='one step on the largest batch of the data set')
    add_config(verb, 'config file, with its data in place')
    verb.add_argument('--budget', help="memory that may be used: 8GiB (default: all of this machine's GPU)")
    verb.set_defaults(run=_rehearse)


# Strategies and wrappers with which each GPU holds all of the model.
_WHOLE = ('SingleDeviceStrategy', 'DDPStrategy', 'MMDistributedDataParallel', 'MMSeparateDistributedDataParallel')


def _refuse_strategies(args, config):
    """Refuse configs that shard weights and states over GPUs, because counts are for a GPU that holds all of them."""
    for key in ('strategy', 'model_wrapper_cfg'):
        kind = name_of(config.get(key) or {})
        if kind and kind not in _WHOLE:
            raise ValueError(
                f'{args.config}: {key}={kind} spreads weights, gradients and optimizer states over GPUs, which is not '
                f'counted; take {key} out of the config to plan for GPUs that each hold all of it'
            )


class _Runner(Runner):
    """Runner that neither prints nor writes its config, because formatting a config with a teacher takes a minute."""

    def _log_env(self, env_cfg):
        pass

    def dump_config(self):
        """Write no file, because a rehearsal is not resumed."""


def _rehearse(args, config):
    _refuse_strategies(args, config)
    if needs_mmpretrain(config):
        raise ValueError(f'{args.config}: {_describe_missing_backbone(config)}')
    if args.budget is not None:
        parse_bytes(args.budget)
    if name_of(config.optim_wrapper) == 'AmpOptimWrapper' and not torch.cuda.is_available():
        raise ValueError(
            f'{args.config}: optim_wrapper: AmpOptimWrapper (mixed precision) needs a GPU, and none is there; rehearse '
            'on the GPU, or in fp32: --cfg-options optim_wrapper.type=OptimWrapper'
        )
    config.log_level = 'ERROR'  # stdout has the answer alone
    with tempfile.TemporaryDirectory() as folder:
        config.work_dir = folder
        try:
            with without_reading_of_annotations():
                runner = _Runner.from_cfg(config)
                runner.register_hook(RehearseHook(budget=args.budget, stop=True))
                runner.train()
        except DoesNotFit as error:
            raise SystemExit(str(error)) from None
        except CannotRun as error:
            raise CannotRun(f'{args.config}: {error}') from error
        except FileNotFoundError as error:
            if (weights := config.get('load_from')) and str(weights) in str(error):
                raise SystemExit(f'{args.config}: load_from={weights!r} does not exist; correct it') from error
            raise SystemExit(
                f'{args.config}: {error.filename or error} does not exist, and a rehearsal needs the data; correct '
                'data_root and ann_file of train_dataloader'
            ) from error
        except Exception as error:  # whatever a config, its data and its model may raise
            raise SystemExit(f'{args.config}: it cannot be rehearsed here: {describe_error(error)}') from error


if __name__ == '__main__':
    main()
