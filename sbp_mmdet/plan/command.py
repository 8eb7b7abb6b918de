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
import errno
import functools
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator

import torch
from mmengine.logging import MMLogger

from .arguments import Parser, parse_count, parse_words
from .batch import LEAST_SIDE
from .batch_size import find_largest_batches
from .check import check
from .config_checks import (
    add_config,
    find_dropped_hooks,
    find_missing_import,
    refuse_uncounted_models,
    refuse_wrapped_detectors,
)
from .counts import count_step, count_variants, end_progress, list_presets
from .errors import bad_input
from .inputs import add_inputs, count_crowded_boxes, find_training_inputs
from .pages import format_batches, format_plan
from .pipeline import CannotRun
from .planner import CONTEXT, OWN, WORKSPACES, choose_row, parse_bytes, parse_size
from .rehearse_command import add_rehearse
from .report import add_report
from .snippet import snippet
from .strategies import refuse_strategies
from .tables import format_gib
from .variants import is_plain, load_config, make_plain, needs_mmpretrain
from .verify import add_verify

__all__ = ['main']

_OF_FULL_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Warnings of mmdet's and mmcv's code, which the user cannot act upon.
_OF_LIBRARIES = (
    'torch.meshgrid: in an upcoming release',
    'torch.utils.checkpoint: the use_reentrant parameter',
    'torch.utils.checkpoint: please pass in use_reentrant',  # torch 2.1
    'Default ``avg_non_ignore`` is False',
    'In MMCV v',
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments (list[str] | None): Arguments of the command line. If ``None``, those of the process. Default: None.
    """
    if sys.stderr is None:  # it was closed before the process began, and libraries write to it
        _redirect_to_nowhere(2)
        sys.stderr = open(2, 'w', encoding='utf-8', closefd=False)
    try:
        try:
            _run_command(arguments)
        finally:
            print(end='', flush=True)  # here, where its errors are caught; there may be no stdout at all
    except KeyboardInterrupt:
        end_progress()
        print('sbp-mmdet: interrupted', file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # whoever read the answer has seen enough
        _redirect_to_nowhere(1)  # Python tries to write the rest of the answer when the process ends
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.errno not in _OF_FULL_DISKS:
            raise
        _redirect_to_nowhere(1)
        where = error.filename or 'the answer'
        print(f'sbp-mmdet: error: {where} cannot be written: {error.strerror}; make room there', file=sys.stderr)
        raise SystemExit(2) from None


def _redirect_to_nowhere(descriptor):
    """Discard what is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _run_command(arguments):
    parser = Parser('sbp-mmdet', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    metavar = 'plan | rehearse | report | verify | check'
    verbs = parser.add_subparsers(required=True, dest='verb', metavar=metavar)
    _add_plan(verbs)
    add_rehearse(verbs)
    add_report(verbs)
    add_verify(verbs)
    verbs.add_parser('check', help='whether this environment can train').set_defaults(run=None)
    whole = arguments is None
    args = parse_words(parser, verbs, sys.argv[1:] if whole else arguments)
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    if args.run is None:
        raise SystemExit(0 if check() else 1)
    args.answer = ''
    for message in _OF_LIBRARIES:
        warnings.filterwarnings('ignore', message)
    # torch warns of an operation of the model where a mode of this package runs it.
    warnings.filterwarnings('ignore', module=rf'{re.escape(__package__)}\.')
    # Classes of mmdet read attributes of their own that others of its classes call deprecated.
    warnings.filterwarnings('ignore', 'DeprecationWarning: ', module=r'mmdet\.')
    try:
        with _stdout_for_the_answer(args, whole) if getattr(args, 'json', False) else contextlib.nullcontext():
            if hasattr(args, 'check'):
                args.check(args)
            config = load_config(args.config, args.cfg_options)
            for problem in filter(None, (find_missing_import(config), find_dropped_hooks(config))):
                print(f'warning: {args.config}: {problem}', file=sys.stderr)
            args.run(args, config)
    except CannotRun as error:
        instead = error.elsewhere and hasattr(args, 'size')
        remedy = '; give the size of the images, for example --size 800x1333' if instead else ''
        parser.exit(2, f'sbp-mmdet: error: {args.config}: {error}{remedy}\n')
    except ValueError as error:
        parser.exit(2, f'sbp-mmdet: error: {error}\n')  # without the usage, which would hide it


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
        '--boxes',
        type=parse_count,
        help='boxes in an image (default: those of the annotations; without them, those of a crowded batch of COCO: 60 '
        'for 2 images, 20 for 32)',
    )
    verb.add_argument('--gpus', type=parse_count, default=1, help='above 1: with the buckets of distributed training')
    verb.add_argument('--adamw8bit', action='store_true', help='consider 8-bit optimizer states as well')
    verb.add_argument('--json', action='store_true', help='print the answer for scripts')
    verb.add_argument('--verbose', action='store_true', help='also what is allocated, and what torch reserves')
    verb.set_defaults(run=_plan, check=_check_plan)


def _check_plan(args):
    """Check what is known before the config is read, which takes seconds; ``budget`` and ``size`` become numbers."""
    args.budget, args.size = _parse_budget(args.budget), parse_size(args.size) if args.size else None
    for name in ('batch', 'boxes', 'gpus'):
        if getattr(args, name) not in (None, 'max') and getattr(args, name) < 1:
            raise ValueError(f'--{name} {getattr(args, name)} must be 1 or more')


def _plan(args, config):
    budget = args.budget
    refuse_strategies(args.config, config)
    refuse_uncounted_models(args.config, config)
    if not isinstance(config.optim_wrapper.get('optimizer'), dict):
        raise ValueError(
            f'{args.config}: optim_wrapper has no optimizer that is a dict; write '
            "optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)). Trainings with several optimizers are not "
            'counted; sbp-mmdet rehearse runs a step of theirs'
        )
    refuse_wrapped_detectors(args.config, config)
    if args.batch == 'max':
        return _plan_batches(args, config)
    inputs = _find_inputs(args, config, args.batch)
    args.boxes = _count_boxes(args, inputs, inputs.batch)
    batch_shape = dict(batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=args.boxes)
    batch_shape.update(usual=inputs.usual, channels=inputs.channels)
    if budget < WORKSPACES + CONTEXT and not args.json:
        raise SystemExit(
            f'Nothing fits into {format_gib(budget)}: CUDA takes {format_gib(WORKSPACES + CONTEXT)} with any model. '
            'Give the memory of a larger GPU, such as --budget 8GiB'
        )
    with _explain_failures(args, config):
        options = dict(eight_bit=args.adamw8bit, failed=functools.partial(_warn_of_failure, args, config))
        rows = count_variants(config, budget, batch_shape, ddp=args.gpus > 1, **options)
    best = choose_row(rows)
    unchanged = best is not None and best.variant == 'none' and is_plain(config) and not needs_mmpretrain(config)
    lines = '' if best is None else snippet(config, OWN if unchanged else best.variant)
    _print_answer(args, config, inputs, rows, best, lines, format_plan)


def _find_inputs(args, config, batch):
    """Return the largest batch; its source says where the number of boxes comes from."""
    inputs = find_training_inputs(config, batch, args.size, processes=args.gpus, count_boxes=args.boxes is None)
    if args.boxes is not None:
        room = (inputs.height // LEAST_SIDE) * (inputs.width // LEAST_SIDE)
        if args.boxes > room:
            raise ValueError(
                f'--boxes {args.boxes}: an image of {inputs.height} x {inputs.width} has room for {room} boxes of '
                f'{LEAST_SIDE} x {LEAST_SIDE} pixels; give the number of boxes in one image, such as --boxes 60'
            )
        return inputs
    whose = 'a crowded batch of COCO' if inputs.boxes is None else 'the annotations'
    return inputs._replace(source=f'{inputs.source}; boxes: of {whose}')


def _count_boxes(args, inputs, images):
    """Return the number of boxes in each image of a batch: the one given, or that of the annotations or of COCO."""
    boxes = inputs.boxes if args.boxes is None else args.boxes
    return count_crowded_boxes(images) if boxes is None else boxes


def _plan_batches(args, config):
    inputs, base = _find_inputs(args, config, None), make_plain(config)

    def measure(variant, images):
        boxes = _count_boxes(args, inputs, images)
        batch_shape = dict(batch=images, height=inputs.height, width=inputs.width, boxes=boxes, usual=inputs.usual)
        batch_shape.update(channels=inputs.channels, expandable=False)
        return count_step(base, variant, batch_shape, f'{variant}, {images} images')

    with _explain_failures(args, config):
        presets = list_presets(base)
        options = dict(found=_print_result, failed=functools.partial(_warn_of_failure, args, config))
        rows = find_largest_batches(base, args.budget, measure, presets, gpus=args.gpus, **options)
    exact = [row for row in rows if row.images and row.gradients == 'exact' and row.variant != 'with_cp']
    best = max(exact or [row for row in rows if row.images], key=lambda row: row.images, default=None)
    lines = '' if best is None else snippet(config, best.variant, best.images)
    _print_answer(args, config, inputs, rows, best, lines, format_batches)


@contextlib.contextmanager
def _explain_failures(args, config):
    """Raise what a counted step raises as an error that names the config, and end the line of the progress."""
    try:
        yield
    except Exception as error:  # whatever a model's own code raises where it cannot do with our batch or device
        raise bad_input(args.config, 'a training step cannot be run here', error, config, made_up=True) from error
    finally:
        end_progress()


def _print_answer(args, config, inputs, rows, best, lines, format_page):
    """Print the answer as a page or as JSON, and end with status 1 if nothing fits."""
    if args.json:
        _print_json(args, args.budget, inputs, rows, best, lines)
    else:
        print(format_page(args, config, inputs, args.budget, rows, best, lines))
    if best is None:
        raise SystemExit(1)


def _print_result(row):
    """Print a result while others are still counted, which takes minutes, so that an interruption does not lose it."""
    end_progress()
    answer = f'{row.images} image{"s" * (row.images > 1)} in' if row.images else 'not one image fits; it needs'
    print(f'{row.variant}: {answer} {format_gib(row.need)}', file=sys.stderr, flush=True)


def _warn_of_failure(args, config, variant, error):
    """Warn of a variant that is left out because its step fails, such as mixed precision in mmdet's DDQ."""
    end_progress()
    text = bad_input(args.config, f'a training step with {variant} cannot be run', error, config)
    print(f'sbp-mmdet: warning: {text}; it is left out', file=sys.stderr, flush=True)


def _print_json(args, budget, inputs, rows, best, lines):
    inputs = dict(inputs._asdict(), truth=None, branches=None)  # the boxes of the data set are not printed
    result = dict(budget=budget, inputs=inputs, rows=[row._asdict() for row in rows])
    args.answer = json.dumps(dict(result, answer=best and best.variant, lines=lines), indent=1) + '\n'


def _parse_budget(text):
    if text is not None:
        return parse_bytes(text)
    if not torch.cuda.is_available():
        raise ValueError('this machine has no GPU; give the memory of yours, for example --budget 8GiB')
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


if __name__ == '__main__':
    main()
