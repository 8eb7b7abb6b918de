"""The page and the archive of the GPU report."""

import re
import tarfile
from pathlib import Path

from gpu_estimates import add_counted, compare_estimates, table
from gpu_parts import Part
from gpu_rows import lines_of, read_rows

__all__ = ['write_page']

_TOLD = re.compile(r'(FAILED|ERROR) |.*\d+ (passed|failed|skipped|tests collected)')
_SHOWN = 8  # kernels, and operations of the CPU, of a block; the others are in its file


def write_page(parts: list[Part], out: Path, archive: Path, title: str) -> None:
    """Write the page, and the archive of everything that was written.

    Args:
        parts (list[Part]): Parts of the report.
        out (Path): Folder of the report.
        archive (Path): File of the archive.
        title (str): First line of the page.
    """
    states = {line['part']: line for line in lines_of(out / 'states.jsonl')}
    machines = [line['machine'] for part in parts for line in lines_of(out / f'{part.name}.jsonl') if 'machine' in line]
    lines = [title, '', ', '.join(f'{key} {value}' for key, value in (machines or [{}])[0].items() if key != 'command')]
    found, waiting = [], [part.name for part in parts if part.name not in states and not _begun(part, out)]
    for part in parts:
        if part.name in waiting:
            continue
        state = states.get(part.name)
        text = f'{state["state"]}, after {state["seconds"]} s: {part.name}.log' if state else 'It has not ended.'
        lines += ['', f'## {part.name}', '', text, '']
        try:
            lines += _trials(part, out, found) if part.trials else _of_commands(part, out)
        except Exception as error:  # what cannot be read takes no other part's table with it
            lines += [f'Its results cannot be read: {type(error).__name__}: {error}']
    lines += ['', f'Not measured yet: {", ".join(waiting)}.'] if waiting else []
    lines += ['', '## Estimates that were wrong', '', *table(found)]
    (out / 'report.md').write_text('\n'.join(lines) + '\n')
    new = archive.with_name(archive.name + '.new')
    with tarfile.open(new, 'w:gz') as tar:
        for file in sorted(out.rglob('*')):  # not the data, the weights, or what was installed
            name = file.relative_to(out)
            if file.suffix in ('.md', '.json', '.jsonl', '.log') and name.parts[0] not in ('data', 'site'):
                tar.add(file, f'{out.name}/{name}')
    new.replace(archive)


def _begun(part, out):
    return any((out / f'{part.name}{suffix}').exists() for suffix in ('.jsonl', '.log'))


def _of_commands(part, out):
    if part.name.startswith('training'):
        from trainings import read_log  # noqa: PLC0415  it takes torch with it

        found = read_log(out / part.name)
        return [f'    {key}: {found[key]}' for key in ('ap', 'step_s', 'memory')] if found and found['loss'] else []
    log = out / f'{part.name}.log'
    return ['    ' + line for line in log.read_text().splitlines() if _TOLD.match(line)] if log.exists() else []


def _trials(part, out, found):
    """Return a table for each trial, and append its estimates to ``found``."""
    from tables import benchmark_table  # noqa: PLC0415  it takes torch with it

    measured, begun = read_rows(part, out)
    measured.update({name: dict(preset=name.rpartition('/')[2], reason='its process ended') for name in begun})
    lines = []
    for trial in part.trials:
        rows = {measured[name]['preset']: measured[name] for name in trial.rows if name in measured}
        if not rows:
            continue
        add_counted(part, trial, rows)
        found += compare_estimates(trial, rows)
        lines += [f'**{trial.name}**', '', benchmark_table([*rows.values()], markdown=True), '']
        for row in rows.values() if part.name == 'blocks' else ():
            lines += _profile(row)
    return lines


def _profile(row):
    """Return the slowest kernels and the slowest CPU operations of a block."""
    lines = []
    for key, name in (('kernels', 'kernel'), ('operations', 'operation of the CPU')):
        if longest := row.get(key):
            lines += [f'| `{row["preset"]}`: {name} | number | ms |', '|---|---|---|']
            lines += [f'| {_short(what)} | {n} | {1e3 * s:.3f} |' for what, n, s in longest[:_SHOWN]] + ['']
    return lines


def _short(name):
    """Return the name of a kernel without template arguments and without characters that Markdown interprets."""
    return name.replace('void ', '').replace('|', '/')[:100]
