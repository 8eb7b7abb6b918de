"""The settings that a study of gradients compares: the paper's, ready made, and any other, as text."""

import argparse
import shlex

from mmengine.config import Config, DictAction

from ..analysis.variants import applicable, without_hook
from ..settings import ATTENTION, PRESETS
from .gradients import HEAD_PIECES, backbone_with

__all__ = ['GROUPS', 'INCREASING', 'group', 'increasing', 'parse_setting']

# Section 4, "How much gradients should be kept": increasing keep ratios of eight blocks, 0.5 on average.
INCREASING = (0.25, 0.32, 0.39, 0.46, 0.53, 0.60, 0.68, 0.75)

_PAPER = PRESETS['recompute']  # all presets with the paper's gradients send the same ones

GROUPS = {
    'ratios': 'keep ratios 0.25, 0.5 and 0.75 on all SBP blocks',
    'orders': "the paper's increasing and decreasing ratios, 0.5 everywhere, and the two ratios that keep as much",
    'samplers': 'grid and random masks at 0.25, 0.5 and 0.75',
    'options': "presets: the paper's gradients, other ones of dropped positions, and int8 storage",
    'blocks': "0.5 on stage 1, on stages 1 and 2, on the config's (or the paper's) blocks, on stages 1 to 3, on all",
    'attention': 'attention drops QKV, query or heads, at 0.5; dropped tokens send nothing, or what a kept one sends',
    'heads': 'SBP in neck, RPN and mask heads, alone and with 0.5 in the backbone, and the pieces that are exact',
}


def _options(with_downsampling: bool) -> dict[str, dict]:
    """The presets whose gradients differ from the exact ones, by their names, and what else was asked of 'nearest'."""
    others = [preset for preset in PRESETS.values() if preset.gradients not in ('exact', 'paper')]
    settings = {preset.name: preset.arguments(keep_ratio=0.5)['sbp_cfg'] for preset in (_PAPER, *others)}
    nearest = settings['nearest']
    if with_downsampling:
        settings['nearest, downsample=False'] = dict(nearest, downsample=False)
    return settings | {'nearest, keep_ratio=0.25': dict(nearest, keep_ratio=0.25)}


def increasing(blocks: int) -> list[float]:
    """The paper's eight increasing keep ratios, spread evenly over a number of blocks.

    Args:
        blocks (int): SBP blocks, 1 or more.

    Returns:
        list[float]: A ratio for each; for one block, where nothing can increase, 0.5.
    """
    if blocks == 1:
        return [0.5]
    return [INCREASING[round(i * (len(INCREASING) - 1) / (blocks - 1))] for i in range(blocks)]


def group(name: str, config: Config) -> dict[str, dict]:
    """Settings that belong together, on top of the config's own ``sbp_cfg``.

    Args:
        name (str): A key of ``GROUPS``.
        config (Config): Config of a detector whose backbone SBP applies to.

    Returns:
        dict[str, dict]: Label to setting, see :func:`.gradients.study`.

    Raises:
        ValueError: For an unknown name, a config whose ``sbp_cfg`` is wrong, or one that the group has nothing for.
    """
    if name not in GROUPS:
        raise ValueError(f'group {name!r} is unknown; choose from {list(GROUPS)}')
    config = without_hook(config)
    base = dict(config.model.backbone.get('sbp_cfg') or {})
    # Skipping draws a stochastic depth of its own, and there would be no exact pass to compare with.
    left_out = ('keep_ratio', 'sampler', 'skip_dropped_images')
    base = {key: value for key, value in base.items() if key not in left_out}
    backbone = backbone_with(config, base)
    if name == 'ratios':
        return {f'{r:g}': dict(base, keep_ratio=r) for r in (0.75, 0.5, 0.25)}
    if name == 'options':
        rest = {key: value for key, value in base.items() if key in ('blocks', 'downsample')}
        options = _options(with_downsampling=len(backbone.depths) > 1)
        return {label: {**rest, **keys} for label, keys in options.items()}
    if name == 'samplers':
        return {
            f'{s} {r:g}': dict(base, keep_ratio=r, sampler=s) for r in (0.75, 0.5, 0.25) for s in ('grid', 'random')
        }
    if name == 'orders':
        ratios = increasing(sum(backbone.sbp.blocks))
        settings = {'uniform 0.5': 0.5, 'increasing': ratios, 'decreasing': ratios[::-1]}
        # Early blocks have more positions, so the two do not keep half. What keeps as much, uniformly:
        for order in (ratios, ratios[::-1]):
            r = _kept_share(order, backbone.sbp.blocks)
            settings.setdefault(f'uniform {r:g}', r)
        return {label: dict(base, keep_ratio=r) for label, r in settings.items()}
    if name == 'heads':
        return _heads(config, base)
    if name == 'attention':
        forms = {f'{a}, {d}': dict(attention=a, dropped=d) for d in ('zero', 'pool') for a in ATTENTION}
        return {label: dict(base, keep_ratio=0.5, **form) for label, form in forms.items()}
    depths = backbone.depths
    choices = [(*depths[:n], *[0] * (len(depths) - n)) for n in range(1, len(depths) + 1)]
    choices = sorted({*choices, tuple(backbone.sbp.blocks)}, key=sum)
    return {f'blocks {"-".join(map(str, c))}': dict(base, keep_ratio=0.5, blocks=c) for c in choices}


def _heads(config, base):
    found, _ = applicable(config, [f'none+{piece}' for piece in HEAD_PIECES])
    pieces = [variant.removeprefix('none+') for variant in found]
    sbp = [piece for piece in pieces if piece.startswith('sbp-')]
    exact = [piece for piece in pieces if piece not in sbp]
    if not sbp:
        raise ValueError("group 'heads': neck and heads of the model have nothing that SBP applies to; name another")
    half = dict(base, keep_ratio=0.5)
    return {
        **{piece: dict(pieces=[piece]) for piece in sbp},
        '+'.join(sbp): dict(pieces=sbp),
        'backbone 0.5': half,
        '+'.join(['backbone 0.5', *sbp]): dict(half, pieces=sbp),
        '+'.join(exact): dict(pieces=exact),
    }


def _kept_share(ratios, blocks):
    """Of what the blocks store for their kept positions: channels x positions, halved from stage to stage."""
    weights = [0.5**stage for stage, depth in enumerate(blocks) for _ in range(depth)]
    return round(sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights), 2)


def parse_setting(text: str) -> tuple[str, dict]:
    """Reads 'label: keep_ratio=0.25 sampler=random pieces=sbp-neck,sbp-rpn', values as in ``--cfg-options``.

    Args:
        text (str): Label, colon, keys and values of ``sbp_cfg``, and pieces; the label may be left out with its colon.

    Returns:
        tuple[str, dict]: Label and setting, see :func:`.gradients.study`; its values are checked there.

    Raises:
        ValueError: If it cannot be read.
    """
    label, colon, rest = text.partition(':')
    if not colon:
        label, rest = text, text
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ValueError(f'setting {text!r}: {error}') from error
    if not label.strip() or not words or any('=' not in word for word in words):
        raise ValueError(f"setting {text!r} cannot be read; write it as 'label: keep_ratio=0.25 sampler=random'")
    parser = argparse.ArgumentParser()
    parser.add_argument('--options', nargs='+', action=DictAction)
    setting = parser.parse_args(['--options', *words]).options
    if 'pieces' in setting:
        pieces = setting['pieces']
        setting['pieces'] = pieces = [pieces] if isinstance(pieces, str) else pieces  # a list of one is a word
        if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
            raise ValueError(f'setting {text!r}: pieces={pieces!r} must be names, such as pieces=sbp-neck,sbp-rpn')
    return label.strip(), setting
