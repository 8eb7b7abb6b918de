"""The pages of ``sbp-mmdet plan`` as text: the table of the variants, what was counted, and the lines to paste."""

import argparse
import inspect
from collections.abc import Sequence

import torch
from mmengine.config import Config

from .config_checks import count_data_classes, find_own_hooks, find_small_heads
from .inputs import Inputs, find_classes
from .planner import CONTEXT, MARGIN, OWN, WORKSPACES
from .snippet import format_heading
from .tables import Column, format_gib, format_images, format_table
from .transforms import name_of
from .variants import STANDS_IN, needs_mmpretrain

__all__ = ['describe_missing_backbone', 'describe_run', 'format_batches', 'format_plan']


def format_batches(
    args: argparse.Namespace, config: Config, inputs: Inputs, budget: int, rows: Sequence, best, lines: str
) -> str:
    """Return the page of ``plan --batch max`` as text.

    Args:
        args (Namespace): Arguments of the command.
        config (Config): The config.
        inputs (Inputs): Its training batch.
        budget (int): Memory of the GPU, in bytes.
        rows (Sequence): Rows of the table.
        best: The row that is the answer, or ``None`` if nothing fits.
        lines (str): Lines for the config with which it fits.
    """
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
    note += describe_run(config)
    if best is None:
        remedy = _describe_large_update(args, config, budget, rows) or ' Try smaller images or a smaller model.'
        end = f'Not even one image fits into {format_gib(budget)}.{remedy}'
    else:
        short = f' The config has {inputs.batch} images per GPU' if inputs.batch > best.images else ''
        more = short and f'; set optim_wrapper.accumulative_counts={-(-inputs.batch // best.images)} to keep that.'
        end = f'Most images with exact gradients: {best.images}, with {best.variant}.{short}{more}'
        end = f'{end} {format_heading(config)}\n\n{lines}'
    return f'{format_table(columns, rows)}\n\n{note}\n{end}'


def format_plan(
    args: argparse.Namespace, config: Config, inputs: Inputs, budget: int, rows: Sequence, best, lines: str
) -> str:
    """Return the page of ``plan`` as text. The arguments are those of :func:`format_batches`."""
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
    description = format_images(inputs.batch, inputs.height, inputs.width, args.boxes)
    table = format_table(columns, [row._asdict() for row in rows])
    cuda = format_gib(WORKSPACES + CONTEXT)
    note = (
        f'Largest batch: {description} ({inputs.source}{_describe_usual(inputs)}). Each figure includes gaps between '
        f'tensors, a margin of {100 * MARGIN:.0f} %, and {cuda} for CUDA.'
    )
    note += describe_run(config)
    if args.verbose and len(rows) > 2:  # more than the config as it is and its plain model
        note += (
            '\nOf each preset, the table has the first variant that fits, or else the smallest; the rest is left out.'
        )
    plain = next((row.need for row in rows if row.variant == 'none'), 0)
    above = [row for row in rows if row.need > plain and format_gib(row.need) != format_gib(plain)]
    if more := [row.variant for row in above]:
        note += f'\nMore than plain training with this batch: {", ".join(more)}.'
    if best is not None and best.variant != 'with_cp' and any(row.fits and row.variant == 'with_cp' for row in rows):
        note += '\nwith_cp is there to compare with; it is chosen only where nothing else with exact gradients fits.'
    if best is None:
        more = ' --adamw8bit,' if _may_store_8_bits(args, config) else ''
        remedy = f' Try a smaller batch, smaller images,{more} or a smaller model.'
        remedy = _describe_large_update(args, config, budget, rows) or remedy
        end = f'Nothing fits into {format_gib(budget)}, of which CUDA itself takes {cuda}.{remedy}'
    elif not lines:
        end = f'It fits into {format_gib(budget)} as it is.'
    else:
        how = '' if best.variant in ('none', OWN) else f' with {best.variant}'
        end = f'It fits into {format_gib(budget)}{how}. {format_heading(config)}\n\n{lines}'
    return f'{table}\n\n{note}\n{end}{_with_expandable_segments(rows, best, budget)}'


def _may_store_8_bits(args, config):
    return 'Adam' in str(config.optim_wrapper.optimizer.type) and not args.adamw8bit


def _describe_large_update(args, config, budget, rows):
    """Return sentences for a budget that the optimizer's step alone exceeds with any batch, or an empty text."""
    least = min(row.update for row in rows)
    if least <= budget:
        return ''
    optimizer = config.optim_wrapper.optimizer
    kind = getattr(torch.optim, str(optimizer.type), None)
    # Without an order of the config's own, torch updates all parameters at once, with temporary tensors of their size.
    at_once = kind and 'foreach' in inspect.signature(kind).parameters and not {'foreach', 'fused'} & {*optimizer}
    tries = ['--adamw8bit'] if _may_store_8_bits(args, config) and args.batch != 'max' else []
    tries += ['--cfg-options optim_wrapper.optimizer.foreach=False'] if at_once else []
    return (
        f" Weights, gradients and the optimizer's step alone need {format_gib(least)}, whatever the batch. Try "
        f'{" or ".join([*tries, "a smaller model"])}.'
    )


def _describe_usual(inputs):
    """Return the sizes of a rare and of the median batch, where they tell more than the size of the largest one."""
    if not inputs.usual:
        return ''
    rare, middle = (f'{height} x {width}' for height, width in (inputs.rare, inputs.usual))
    largest, often, seldom = map(sorted, ((inputs.height, inputs.width), inputs.usual, inputs.rare))
    if seldom in (often, largest):  # an upright image takes as much as a lying one
        return '' if often == largest else f'; the median is {middle}'
    return f'; one batch in 1,000 reaches {rare}, the median is {middle}'


def describe_run(config: Config) -> str:
    """Return lines on what a training needs besides its steps: validation, and packages that are missing.

    Args:
        config (Config): Config of a detector.
    """
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
        lines.append(f'The config {describe_missing_backbone(config)}; counts and lines are for that backbone.')
    return ''.join(f'\n{line}' for line in lines)


def describe_missing_backbone(config: Config) -> str:
    """Return a sentence on a backbone of mmpretrain, which is not installed, and on the one that replaces it.

    Args:
        config (Config): A config of which :func:`.variants.needs_mmpretrain` is true.
    """
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
