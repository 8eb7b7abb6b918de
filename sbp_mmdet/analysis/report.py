"""Tables and pictures of what :func:`.detector.measure_detector` counted."""

from pathlib import Path

__all__ = ['ORDER', 'format_bytes', 'groups', 'markdown', 'picture', 'table']

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


def markdown(results: dict) -> str:
    """A Markdown table, with what was measured below it.

    Args:
        results (dict): ``rows`` and ``machine``, as ``benchmark_memory.py --json`` writes them.

    Returns:
        str: Lines.
    """
    rows = results['rows']
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
    machine = results['machine']
    lines += ['', f'*{machine["date"]}, {machine["device"]}, torch {machine["torch"]}: `{machine["command"]}`*']
    return '\n'.join(lines) + '\n'


def picture(rows: list[dict], title: str, path: Path) -> None:
    """Draws a bar for each setting, stacked to its peak.

    Args:
        rows (list[dict]): Of ``measure_detector``, with ``setting``.
        title (str): Above the bars.
        path (Path): A PNG file.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    colours = ['#9aa0a6', '#5f6b7a', '#1f77b4', '#6fb1e0', '#f2a541', '#e8e3d9']
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.45 * len(rows)), layout='constrained')
    places = range(len(rows))[::-1]
    left = [0.0] * len(rows)
    for i, name in enumerate(groups(rows[0])):
        values = [groups(row)[name] / 1e9 for row in rows]
        axes.barh(places, values, left=left, height=0.68, color=colours[i], label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, row, end in zip(places, rows, left, strict=True):
        ratio = row['peak'] / rows[0]['peak']
        axes.text(end, place, f'  {row["peak"] / 1e9:.2f} GB  ({ratio:.2f}x)', va='center', fontsize=9)
    axes.set_yticks(list(places), [row['setting'].replace('+', ' + ') for row in rows], fontsize=9)
    axes.set_xlim(0, max(left) * 1.22)
    axes.set_xlabel('peak of a training step, GB (1e9 bytes)')
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_title(title, fontsize=10, loc='left')
    figure.legend(loc='outside lower center', ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)
