"""``sbp-mmdet rehearse CONFIG``: one step on the largest batch of the data set, on this machine."""

import argparse
import tempfile

import torch
from mmengine.config import Config
from mmengine.runner import Runner

from .config_checks import add_config
from .detector import refuse_unknown_optimizer
from .errors import bad_input
from .pages import describe_missing_backbone
from .pipeline import CannotRun
from .planner import parse_bytes
from .quiet import without_reading_of_files
from .rehearse import DoesNotFit, RehearseHook
from .strategies import refuse_strategies
from .transforms import name_of
from .variants import needs_mmpretrain

__all__ = ['add_rehearse']


def add_rehearse(verbs) -> None:
    """Add the subcommand ``rehearse`` to a parser."""
    verb = verbs.add_parser('rehearse', help='one step on the largest batch of the data set')
    add_config(verb, 'config file, with its data in place')
    verb.add_argument('--budget', help="memory that may be used: 8GiB (default: all of this machine's GPU)")
    verb.set_defaults(run=_rehearse, check=_check)


def _check(args):
    """Check what is known before the config is read, which takes seconds."""
    if args.budget is not None:
        parse_bytes(args.budget)


class _Runner(Runner):
    """Runner that neither prints nor writes its config, because formatting a config with a teacher takes a minute."""

    def _log_env(self, env_cfg):
        pass

    def dump_config(self):
        """Write no file, because a rehearsal is not resumed."""


def _rehearse(args: argparse.Namespace, config: Config) -> None:
    refuse_strategies(args.config, config)
    if missing := [key for key in ('train_dataloader', 'train_cfg') if not config.get(key)]:
        raise ValueError(
            f"{args.config} has no {' and no '.join(missing)}; rehearse runs a step of the config's own training"
        )
    if needs_mmpretrain(config):
        raise ValueError(f'{args.config}: {describe_missing_backbone(config)}')
    if name_of(config.optim_wrapper) == 'AmpOptimWrapper' and not torch.cuda.is_available():
        raise ValueError(
            f'{args.config}: optim_wrapper: AmpOptimWrapper (mixed precision) needs a GPU, and none is there; rehearse '
            'on the GPU, or in fp32: --cfg-options optim_wrapper.type=OptimWrapper'
        )
    try:
        refuse_unknown_optimizer(config.optim_wrapper)
    except ValueError as error:
        raise ValueError(f'{args.config}: {error}') from error
    config.log_level = 'ERROR'  # stdout has the answer alone
    with tempfile.TemporaryDirectory() as folder:
        config.work_dir = folder
        try:
            with without_reading_of_files():
                runner = _Runner.from_cfg(config)
                runner.register_hook(RehearseHook(budget=args.budget, stop=True))
                runner.train()
        except DoesNotFit as error:
            raise SystemExit(str(error)) from None
        except CannotRun:  # of this package, in a line already
            raise
        except Exception as error:  # whatever a config, its data and its model may raise
            raise bad_input(args.config, 'it cannot be rehearsed here', error, config) from error
