"""Which variant of a detector fits into a GPU, and is fast."""

import re
import statistics
from collections.abc import Callable, Mapping

from mmengine.config import Config

from ..families import family_of, presets_of
from ..settings import GRADIENTS, PRESETS
from .variants import applicable, backbone_change, imports_of, imports_with_plugin, piece_change, without_hook

__all__ = [
    'CONTEXT',
    'MARGIN',
    'candidates',
    'cfg_options',
    'choose',
    'measured_times',
    'needed',
    'parse_bytes',
    'parse_size',
    'snippet',
    'worst_case',
]

# On top of the counted bytes: rounding and fragmentation of CUDA's allocator, and what kernels use inside themselves,
# are a share; CUDA's context and its libraries' workspaces are about this much, whatever the model.
MARGIN = 0.10
CONTEXT = 0.6e9

# What pieces add to the time of a step, relative to the plain backbone's: the share of the step that runs again. A
# guess, where nothing was measured.
_TIME_MORE = {
    'targets': 0.01,
    'cp-heads': 0.08,
    'cp-rpn': 0.04,
    'cp-neck': 0.03,
    'cp-transformer': 0.15,
    'adamw8bit': 1.0,
}
_PIECES = [
    [],
    ['targets'],
    ['targets', 'cp-heads'],
    ['targets', 'cp-transformer'],
    ['targets', 'cp-heads', 'cp-transformer', 'cp-rpn', 'cp-neck'],
]


def parse_bytes(text: str) -> int:
    """Reads a budget.

    Args:
        text (str): Number and unit: '8GiB', '7.5 GB', '6000MiB'.

    Returns:
        int: Bytes.

    Raises:
        ValueError: If it cannot be read, or is not positive.
    """
    match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*', str(text), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(f'budget {text!r} cannot be read; give a number and a unit, such as 8GiB or 7.5GB')
    unit = match[2].lower()
    return int(float(match[1]) * (1024 if 'i' in unit else 1000) ** (1 + 'kmgt'.index(unit[0])))


def parse_size(text: str) -> tuple[int, int]:
    """Reads the size of an image.

    Args:
        text (str): Height and width: '800x1333'.

    Returns:
        tuple[int, int]: Height and width.

    Raises:
        ValueError: If it cannot be read, or a side is below 32 pixels.
    """
    match = re.fullmatch(r'\s*(\d+)\s*[x,]\s*(\d+)\s*', str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f'size {text!r} cannot be read; give height and width, such as 800x1333')
    height, width = int(match[1]), int(match[2])
    if min(height, width) < 32:
        raise ValueError(f'size {text!r} is too small for a detector; both sides must be 32 or more')
    return height, width


def measured_times(results: dict) -> dict[str, float]:
    """Times of steps from a measurement.

    Args:
        results (dict): What ``benchmark_steps.py`` writes with ``--json``, or ``benchmark_memory.py`` on a GPU.

    Returns:
        dict[str, float]: Variant to the time of its step, relative to that of 'none'.

    Raises:
        ValueError: If there are no times, or 'none' is not among them.
    """
    found = {}
    for row in results.get('rows', ()):
        name = str(row.get('variant'))
        if row.get('step_s') and name.split('+')[0] in PRESETS:
            found.setdefault(name, []).append(row.get('ratio', row['step_s']))
    if 'none' not in found:
        raise ValueError(f"there is no time of 'none', only of {[*found]}; measure it with benchmark_steps.py")
    times = {name: statistics.mean(values) for name, values in found.items()}
    return {name: time / times['none'] for name, time in times.items()}


def candidates(
    config: Config, gradients: str = 'paper', *, eight_bit: bool = False, measured: Mapping[str, float] | None = None
) -> list[str]:
    """Variants to consider, fastest first, smallest last.

    Args:
        config (Config): Config of a detector.
        gradients (str): A key of ``settings.GRADIENTS``. Default: 'paper'.
        eight_bit (bool): After all others, those with 8-bit optimizer states too. Default: False.
        measured (Mapping[str, float] | None): Of :func:`measured_times`; None: all times are guesses. Default: None.

    Returns:
        list[str]: Variants that apply to the model; where SBP does not apply to its backbone, only exact ones do.

    Raises:
        ValueError: For unknown gradients; and see :func:`.variants.without_hook`.
    """
    config = without_hook(config)
    if gradients not in GRADIENTS:
        raise ValueError(f'gradients={gradients!r} is unknown; choose from {list(GRADIENTS)}')
    family = family_of(config.model.get('backbone'))
    presets = {preset.name: preset for preset in presets_of(family) if preset.gradients == gradients}
    # In fp32 checkpointing may store less than what is better than it in mixed precision.
    amp = 'Amp' in str(config.optim_wrapper.get('type'))
    names = [name for name, preset in presets.items() if preset.better not in presets or (preset.with_cp and not amp)]
    combined = [[*pieces, *more] for pieces in _PIECES for more in ([], *([['adamw8bit']] if eight_bit else []))]
    names = [name + '+skip' if applicable(config, [name + '+skip'])[0] else name for name in names]
    variants = [_fitting(config, [*name.split('+'), *pieces]) for name in names for pieces in combined]
    kept, _ = applicable(config, list(dict.fromkeys(variants)))
    # Blocks drop half of the last one's rate on average.
    dropped = ((config.model.get('backbone') or {}).get('drop_path_rate') or 0) / 2
    others, smallest = kept[:-1], kept[-1:]

    def guess(name, *skip):
        time = family.time(PRESETS[name]) if family else PRESETS[name].time
        return time * (1 - dropped if skip else 1)

    return sorted(others, key=lambda variant: _time(variant, guess, measured or {})) + smallest


def _time(variant, guess, measured):
    """Of a step, relative to the plain one: measured as far as possible."""
    if variant in measured:
        return measured[variant]
    name, *pieces = variant.split('+')
    backbone = [name, *(['skip'] if 'skip' in pieces else [])]
    time = measured.get('+'.join(backbone))
    if time is None:
        time = 1 + _share(guess, measured) * (guess(*backbone) - 1)
    return time + sum(_more(piece, measured) for piece in pieces if piece != 'skip')


def _share(guess, measured):
    """Of the backbone in a step: guesses are of the backbone alone. 1 where nothing says it."""
    alone = [words for words in (variant.split('+') for variant in measured) if words[1:] in ([], ['skip'])]
    pairs = [(measured['+'.join(words)] - 1, guess(*words) - 1) for words in alone]
    squares = sum(guessed**2 for _, guessed in pairs)
    return max(sum(found * guessed for found, guessed in pairs) / squares, 0.0) if squares else 1.0


def _more(piece, measured):
    """What a piece adds, where variants with and without it were measured."""
    found = []
    for variant, time in measured.items():
        words = variant.split('+')
        without = '+'.join(word for word in words if word != piece)
        if piece in words and without in measured:
            found.append(time - measured[without])
    return statistics.mean(found) if found else _TIME_MORE[piece]


def worst_case(variant: str) -> str:
    """The variant whose bytes bound those of this one from above: as if stochastic depth dropped nothing."""
    return '+'.join(word for word in variant.split('+') if word != 'skip')


def _fitting(config, words):
    """The variant without the pieces that the model has nothing for."""
    heads = [config.model.get(head) for head in ('rpn_head', 'roi_head', 'bbox_head')]
    points = (config.model.get('panoptic_head') or {}).get('type') == 'Mask2FormerHead'
    if not any(heads) and not points:
        words = [word for word in words if word != 'targets']
    name = words[0]
    return '+'.join([name, *(piece for piece in words[1:] if applicable(config, [f'{name}+{piece}'])[0])])


def needed(row: dict, ddp: bool = False) -> int:
    """Bytes of GPU memory that a variant needs.

    Args:
        row (dict): Of ``measure_detector``.
        ddp (bool): With the buckets of distributed training, which hold all gradients once more. Default: False.

    Returns:
        int: The peak with the margin, plus CUDA's context.
    """
    return int((row['peak'] + (row['gradients'] if ddp else 0)) * (1 + MARGIN) + CONTEXT)


def choose(
    variants: list[str],
    budget: int,
    measure: Callable[[str], dict],
    *,
    ddp: bool = False,
    tell: Callable[[str, int, bool], None] = lambda *_: None,
) -> str | None:
    """Finds the first variant that fits.

    The first one is looked at first, for mostly it is the answer. Then comes the last one: where that is far from
    fitting, nothing does.

    Args:
        variants (list[str]): Fastest first, smallest last.
        budget (int): Bytes of the GPU.
        measure (Callable): Gives ``measure_detector``'s row of a variant.
        ddp (bool): See :func:`needed`. Default: False.
        tell (Callable): Gets each variant that was looked at, the bytes that it needs, and whether it fits.

    Returns:
        str | None: The variant; None if nothing fits.
    """

    def look(variant):
        need = needed(measure(variant), ddp)
        tell(variant, need, need <= budget)
        return need

    fastest, *others = variants
    if look(fastest) <= budget:
        return fastest
    if not others:
        return None
    *faster, smallest = others
    need = look(smallest)
    # The smallest by rule: where little is left, or in fp32, another one can need less.
    if need > 1.25 * budget:
        return None
    last = smallest if need <= budget else None
    return next((variant for variant in faster if look(variant) <= budget), last)


def snippet(config: Config, variant: str) -> str:
    """What to paste into a config for a variant.

    Args:
        config (Config): The config that it is for.
        variant (str): The variant.

    Returns:
        str: Lines of Python.
    """
    changed, change = without_hook(config), piece_change(config, variant.split('+')[1:])
    backbone = backbone_change(changed, variant)
    lines = []
    if family_of(config.model.get('backbone')) or change['custom_hooks']:
        lines.append(f'custom_imports = dict(imports={imports_with_plugin(config)}, allow_failed_imports=False)')
    if backbone:
        was = config.model.backbone.type
        note = f'  # was: {was!r}' if backbone.get('type', was) != was else ''
        lines.append(f'model = dict(backbone={_literal(backbone)}){note}')
    if change['custom_hooks'] or changed is not config:
        hooks = [*(changed.get('custom_hooks') or []), *change['custom_hooks']]  # a child's list replaces its parent's
        listed = [f'    {_literal(hook)},' for hook in hooks]
        lines += ['custom_hooks = [', *listed, ']'] if hooks else ['custom_hooks = []']
    if change['optimizer']:
        lines.append(f'optim_wrapper = dict(optimizer={_literal(change["optimizer"])})  # needs bitsandbytes')
    return '\n'.join(lines)


def cfg_options(config: Config, variant: str) -> str | None:
    """The same for the command line, where that is possible: hooks and imports have to stand in a config.

    Args:
        config (Config): The config that it is for.
        variant (str): The variant.

    Returns:
        str | None: Arguments of ``tools/train.py``.
    """
    change = piece_change(config, variant.split('+')[1:])
    imported = 'sbp_mmdet' in imports_of(config)
    hooks = change['custom_hooks'] or without_hook(config) is not config
    if hooks or (family_of(config.model.get('backbone')) and not imported):
        return None
    wanted = {'model.backbone': backbone_change(config, variant), 'optim_wrapper.optimizer': change['optimizer']}
    options = [option for prefix, values in wanted.items() for option in _flat(config, prefix, values)]
    return '--cfg-options ' + ' '.join(options) if options else None


def _flat(config, prefix, values):
    """Options for the values that are not the config's already."""
    for key, value in values.items():
        name = f'{prefix}.{key}'
        if isinstance(value, dict):
            yield from _flat(config, name, value)
        elif _lookup(config, name) != value and (value or _lookup(config, name)):
            yield f'{name}={value}'.replace(' ', '')


def _lookup(config, name):
    for key in name.split('.'):
        config = config.get(key) if isinstance(config, (dict, Config)) else None
    return config


def _literal(value):
    if isinstance(value, dict):
        return 'dict(' + ', '.join(f'{key}={_literal(item)}' for key, item in value.items()) + ')'
    return repr(value)
