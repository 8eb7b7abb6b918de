"""``sbp-mmdet report CONFIG``: which modules of a config's model are changed, which are left unchanged, and why."""

import argparse

from mmengine.config import Config

from ..apply import apply_settings
from ..hooks import LeanHook
from ..presets import PRESETS, Settings
from ..report import thinned_line
from ..surgery import model_hooks
from .config_checks import add_config
from .detector import build_model, refuse_unknown_optimizer
from .errors import bad_input
from .variants import make_plain

__all__ = ['add_report', 'list_changes']


def add_report(verbs) -> None:
    """Add the subcommand ``report`` to a parser."""
    verb = verbs.add_parser('report', help='what a config or a preset changes in the model')
    add_config(verb)
    help_text = "in place of what the config says (default: its LeanHook or sbp_cfg; 'exact' if it has none)"
    verb.add_argument('--preset', help=f'{help_text}: {", ".join(PRESETS)}')
    verb.set_defaults(run=_report)


def list_changes(config: Config, preset: str | None = None) -> list[tuple[str, Settings]]:
    """Return the changes that a config asks for.

    Args:
        config (Config): Config of a detector.
        preset (str | None): Preset for the whole model, in place of the config's changes. If ``None``, the config's.
            Default: None.

    Returns:
        list[tuple[str, Settings]]: Name of each changed part of the model ('' is the whole model) and its settings. If
        the config changes nothing, 'exact' for the whole model.

    Raises:
        ValueError: If a setting of the config is invalid.
    """
    if preset is not None:
        return [('', Settings.parse(dict(preset=preset), where='--preset'))]
    return _asked_for(config) or list_changes(config, 'exact')


def _asked_for(config):
    hooks = [*model_hooks(config.get('custom_hooks'))]
    changes = [('', hook.settings) for hook in hooks if isinstance(hook, LeanHook)]
    if (cfg := (config.model.get('backbone') or {}).get('sbp_cfg')) is not None:
        changes.append(('backbone', Settings.parse(cfg)))
    return changes


def _report(args: argparse.Namespace, config: Config) -> None:
    changes = list_changes(config, args.preset)
    if args.preset is None and not _asked_for(config):
        print("The config has no LeanHook and no sbp_cfg, so it changes nothing. With preset='exact':")
    try:
        model = build_model(make_plain(config), 'cpu')  # without its optimizer, which may not run here
        refuse_unknown_optimizer(config.optim_wrapper)
    except Exception as error:  # whatever a model's own code raises
        raise bad_input(args.config, 'its model cannot be built here', error, config) from error
    for part, settings in changes:
        owner = model.get_submodule(part)
        try:
            report = apply_settings(owner, settings)
        except ValueError as error:
            raise bad_input(args.config, f'{part or "its model"} cannot be changed', error, config) from error
        prefix = f'{part}.' if part else ''
        names = [f'{prefix}{name} ({report.kinds[name]}): {meaning}' for name, meaning in report.changed.items()]
        message = f"{part}{': ' if part else ''}preset='{settings.preset.name}': {report}"
        print(*filter(None, (message, thinned_line(owner), *names)), sep='\n')
