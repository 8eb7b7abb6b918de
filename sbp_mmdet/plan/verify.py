"""``sbp-mmdet verify CONFIG``: a table that compares each kind of changed module with its own code on this device."""

import argparse
import copy
import dataclasses

from mmengine.config import Config

from ..apply import apply_settings
from ..presets import PRESETS, Settings
from ..verify.dry_run import NoUpdate
from ..verify.findings import Findings
from ..verify.first_pass import verify_changed
from .batch import at_the_first_step
from .config_checks import add_config, refuse_uncounted_models
from .detector import build_training
from .device import check_device
from .errors import bad_input
from .inputs import add_inputs, find_training_inputs
from .planner import parse_size
from .report import list_changes
from .tables import Column, format_table
from .variants import make_plain

__all__ = ['add_verify', 'verify_config']


def add_verify(verbs) -> None:
    """Add the subcommand ``verify`` to a parser."""
    verb = verbs.add_parser('verify', help='compare changed modules with their own code, on this device')
    add_config(verb)
    names = [name for name, preset in PRESETS.items() if preset.form is not None]
    help_text = "in place of what the config says (default: its LeanHook or sbp_cfg; 'exact' if it has none)"
    verb.add_argument('--preset', help=f'{help_text}: {", ".join(names)}')
    verb.add_argument('--device', default='cpu', type=check_device, help="'cpu' or 'cuda' (default: cpu)")
    add_inputs(verb)
    verb.set_defaults(run=_verify)


def verify_config(
    config: Config, settings: Settings, device: str, batch: int, height: int, width: int, channels: int = 3
) -> Findings:
    """Verify a config's model on a synthetic batch.

    Args:
        config (Config): Config of a detector.
        settings (Settings): What to change in it, and how.
        device (str): 'cpu' or 'cuda'.
        batch (int): Number of images.
        height (int): Height of the images, in pixels.
        width (int): Width of the images, in pixels.
        channels (int): Number of channels of the images. Default: 3.

    Returns:
        Findings: Results of the comparison.
    """
    with at_the_first_step():
        batch_shape = dict(batch=batch, height=height, width=width, boxes=5, channels=channels, device=device)
        model, wrapper, data = build_training(make_plain(config), trained=False, **batch_shape)
        report = apply_settings(model, settings)
        run = lambda dry: dry.train_step(copy.deepcopy(data), NoUpdate(wrapper))  # noqa: E731
        return verify_changed(model, report, settings, run)


def _verify(args: argparse.Namespace, config: Config) -> None:
    hint = 'LeanHook verifies its modules itself when a training begins'
    refuse_uncounted_models(args.config, config, 'verified by this command', hint)
    inputs = find_training_inputs(config, args.batch, parse_size(args.size) if args.size else None)
    size = inputs.batch, inputs.height, inputs.width, inputs.channels
    asked_for = list_changes(config, args.preset)
    changes = [(part, settings) for part, settings in asked_for if settings.preset.form is not None]
    if not changes:
        raise ValueError(
            f'{args.config}: preset {asked_for[0][1].preset.name!r} leaves every operation as it is, so there is '
            'nothing to verify; name another one, such as --preset exact'
        )
    results = [_verify_change(args, config, part, settings, *size) for part, settings in changes]
    if not all(results):
        raise SystemExit(1)


def _verify_change(args, config, part, settings, *size) -> bool:
    """Verify and print one of a config's changes; return whether all modules that it changes agree."""
    settings = dataclasses.replace(settings, modules=(part,)) if part else settings
    try:
        findings = verify_config(config, settings, args.device, *size)
    except Exception as error:  # whatever a model's own code raises
        raise bad_input(args.config, 'its model cannot be verified here', error, config) from error
    columns = [
        Column('kind', lambda row: row.name),
        Column('modules', lambda row: f'{len(row.modules)}'),
        Column('outputs', lambda row: f'{row.outputs:.0e}'),
        Column('gradients', lambda row: f'{row.gradients:.0e}'),
        Column('stored MB', lambda row: f'{row.bytes["now"] / 1e6:,.1f}'),
        Column('unchanged', lambda row: f'{row.bytes["before"] / 1e6:,.1f}'),
        Column('s', lambda row: f'{row.seconds:.2f}'),
        Column('', lambda row: row.disagrees or row.skipped or 'agrees'),
    ]
    title = f"preset='{settings.preset.name}', modules={[*settings.modules]}:\n" if settings.modules else ''
    print(title, format_table(columns, findings.kinds), f'\n\n{findings}', sep='')
    return not findings.failed and not findings.skipped
