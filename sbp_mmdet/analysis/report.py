"""Tables and pictures of what :func:`.detector.measure_detector` counted, and of steps' times."""

from pathlib import Path

__all__ = [
    'ORDER',
    'format_bytes',
    'groups',
    'markdown',
    'picture',
    'steps_markdown',
    'steps_picture',
    'steps_table',
    'table',
]

ORDER = ['stem', 'stage 1', 'stage 2', 'stage 3', 'stage 4', 'output norms', 'backbone', 'neck', 'RPN']
_BACKBONE = ('stem', 'stage 1', 'stage 2', 'stage 3', 'stage 4', 'output norms', 'backbone')


def format_bytes(n: int) -> str:
    """GB (1e9 bytes), or MB below one GB."""
    return f'{n / 1e9:.2f} GB' if n >= 1e9 else f'{n / 1e6:.0f} MB'


def groups(row: dict) -> dict[str, int]:
    """The bars of the picture: they add up to the peak.

    Args:
        row (dict): Of ``measure_detector``.

    Returns:
        dict[str, int]: Name to bytes.
    """
    saved = row['saved']
    bars = {'parameters': row['parameters'], 'optimizer states': row['optimizer']}
    bars['saved: backbone'] = sum(saved.get(part, 0) for part in _BACKBONE)
    bars['saved: neck and RPN'] = saved.get('neck', 0) + saved.get('RPN', 0)
    bars['saved: heads'] = sum(n for part, n in saved.items() if part not in (*_BACKBONE, 'neck', 'RPN'))
    bars['gradients and temporaries at the peak'] = row['peak'] - sum(bars.values())
    return bars


def table(rows: list[dict]) -> str:
    """Text for a terminal: a line for each setting, ratios to the first.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``setting``.

    Returns:
        str: Lines.
    """
    base = rows[0]
    timed = base.get('step_s') is not None
    width = max(len('setting'), *(len(row['setting']) for row in rows)) + 2
    parts = [part for part in ORDER if any(part in row['saved'] for row in rows)]
    parts += sorted({part for row in rows for part in row['saved']} - set(parts))
    fixed = 'params', 'optim.', 'grads'
    head = f'{"MB (1e6 bytes)":<{width}}' + ''.join(f'{name:>8}' for name in fixed)
    head += ''.join(f'{_short(part):>9}' for part in parts) + f'{"peak":>9}{"ratio":>7}  peak in'
    lines = [head + (f'{"reserved":>18}{"step ms":>9}{"ratio":>7}' if timed else '')]
    for row in rows:
        line = f'{row["setting"]:<{width}}'
        line += ''.join(f'{row[key] / 1e6:>8.0f}' for key in ('parameters', 'optimizer', 'gradients'))
        line += ''.join(f'{row["saved"].get(part, 0) / 1e6:>9.0f}' for part in parts)
        line += f'{row["peak"] / 1e6:>9.0f}{row["peak"] / base["peak"]:>7.3f}  {row["peak_phase"] or "":<8}'
        if timed:
            line += f'{row["reserved"] / 1e6:>18.0f}{row["step_s"] * 1e3:>9.1f}{row["step_s"] / base["step_s"]:>7.2f}'
        lines.append(line.rstrip())
    return '\n'.join(lines)


def _short(part):
    return {'output norms': 'norms', 'box heads': 'boxes', 'mask heads': 'masks'}.get(part, part)[:8]


def markdown(rows: list[dict]) -> str:
    """A Markdown table.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``setting``.

    Returns:
        str: Lines.
    """
    timed = rows[0].get('step_s') is not None
    lines = [
        '| setting | parameters | optimizer | gradients | saved: backbone | neck, RPN | heads | peak | ratio |'
        + (' step, ratio |' if timed else ''),
        '|---|---|---|---|---|---|---|---|---|' + ('---|' if timed else ''),
    ]
    for row in rows:
        bars = groups(row)
        numbers = [row['parameters'], row['optimizer'], row['gradients']]
        numbers += [bars[f'saved: {name}'] for name in ('backbone', 'neck and RPN', 'heads')] + [row['peak']]
        cells = [f'`{row["setting"]}`', *map(format_bytes, numbers), f'{row["peak"] / rows[0]["peak"]:.3f}']
        cells += [f'{row["step_s"] / rows[0]["step_s"]:.2f}'] if timed else []
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def picture(rows: list[dict], title: str, path: Path) -> None:
    """Draws a bar for each setting, stacked to its peak.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``setting``.
        title (str): Above the bars.
        path (Path): A PNG file.
    """
    colours = ['#9aa0a6', '#5f6b7a', '#1f77b4', '#6fb1e0', '#f2a541', '#e8e3d9']
    figure, axes, places = _axes(rows)
    left = [0.0] * len(rows)
    for i, name in enumerate(groups(rows[0])):
        values = [groups(row)[name] / 1e9 for row in rows]
        axes.barh(places, values, left=left, height=0.68, color=colours[i], label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, row, end in zip(places, rows, left, strict=True):
        ratio = row['peak'] / rows[0]['peak']
        axes.text(end, place, f'  {row["peak"] / 1e9:.2f} GB  ({ratio:.2f}x)', va='center', fontsize=9)
    axes.set_xlim(0, max(left) * 1.22)
    figure.legend(loc='outside lower center', ncols=3, fontsize=8, frameon=False)
    _save(figure, axes, title, 'peak of a training step, GB (1e9 bytes)', path)


def _axes(rows):
    """Figure, axes, and the place of each row's bar, the first on top."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.45 * len(rows)), layout='constrained')
    places = range(len(rows))[::-1]
    axes.set_yticks(list(places), [row['setting'].replace('+', ' + ') for row in rows], fontsize=9)
    axes.spines[['top', 'right']].set_visible(False)
    return figure, axes, places


def _save(figure, axes, title, label, path):
    import matplotlib.pyplot as plt

    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10, loc='left')
    figure.savefig(path, dpi=140)
    plt.close(figure)


def steps_table(rows: list[dict]) -> str:
    """Text for a terminal: a line for each setting.

    Args:
        rows (list[dict]): Of :func:`.step_times.measure_steps`.

    Returns:
        str: Lines.
    """
    width = max(len('setting'), *(len(row['setting']) for row in rows)) + 2
    lines = [f'{"setting":<{width}}{"step, s":>9}  ratio (min to max)']
    lines += [f'{row["setting"]:<{width}}{row["step_s"]:>9.3g}  {_ratio(row)}' for row in rows]
    return '\n'.join(lines)


def _ratio(row):
    return f'{row["ratio"]:.2f} ({row["ratio_min"]:.2f} to {row["ratio_max"]:.2f})'


def steps_markdown(rows: list[dict]) -> str:
    """A Markdown table.

    Args:
        rows (list[dict]): Of :func:`.step_times.measure_steps`.

    Returns:
        str: Lines.
    """
    lines = ['| setting | step, s | ratio (min to max) |', '|---|---|---|']
    lines += [f'| `{row["setting"]}` | {row["step_s"]:.3g} | {_ratio(row)} |' for row in rows]
    return '\n'.join(lines)


def steps_picture(rows: list[dict], title: str, path: Path) -> None:
    """Draws a bar for each setting: the median of its ratios to the first, and a line from the least to the most.

    Args:
        rows (list[dict]): Of :func:`.step_times.measure_steps`.
        title (str): Above the bars.
        path (Path): A PNG file.
    """
    figure, axes, places = _axes(rows)
    ratios, low, high = ([row[key] for row in rows] for key in ('ratio', 'ratio_min', 'ratio_max'))
    spread = [[r - a for r, a in zip(ratios, low, strict=True)], [b - r for r, b in zip(ratios, high, strict=True)]]
    axes.barh(places, ratios, height=0.68, color='#6fb1e0', xerr=spread, ecolor='#5f6b7a', capsize=3)
    axes.axvline(1, color='#5f6b7a', lw=0.8, ls=':')
    for place, row in zip(places, rows, strict=True):
        axes.text(row['ratio_max'], place, f'  {row["ratio"]:.2f}x  ({row["step_s"]:.3g} s)', va='center', fontsize=9)
    axes.set_xlim(0, max(high) * 1.22)
    _save(figure, axes, title, f'time of a training step, relative to {rows[0]["setting"]}', path)
