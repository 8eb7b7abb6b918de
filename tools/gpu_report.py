"""Runs the parts of `tools/gpu_parts.py`, each in its own process, and writes a page and an archive of the results.

Each row of a part is on the disk as soon as it is measured, and what ended its process is a row too: the rows behind it
are measured by a new process. Called again with the same --out it goes on with the rows that are not there.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import gpu_parts
from gpu_parts import ROOT, Part

sys.path[:0] = [str(ROOT), str(ROOT / 'research')]
_running, _stopping = set(), threading.Event()


def lines_of(file: Path) -> list[dict]:
    """Read the whole lines of a file; a line that a killed process left unfinished is skipped."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def rows_of(part: Part, out: Path) -> tuple[dict[str, dict], collections.Counter]:
    """Return the rows by preset, and for presets without a row how often they were begun."""
    lines = [line for line in lines_of(out / f'{part.name}.jsonl') if 'preset' in line]
    rows = {line['preset']: line for line in lines if line.get('state') != 'begun'}
    return rows, collections.Counter(line['preset'] for line in lines if line['preset'] not in rows)


def missing(part: Part, out: Path) -> list[str]:
    """Return the presets to measure. One that ended together with the whole report is tried once more."""
    rows, begun = rows_of(part, out)
    return [name for name in part.presets if name not in rows and begun[name] < 2]


def run_part(part: Part, out: Path, end: float, rehearse: bool) -> None:
    """Run a part until each of its rows is there, none came, or too little time is left."""
    from tables import append_line  # noqa: PLC0415  it takes torch with it

    while (start := time.monotonic()) + part.seconds < end:
        file, before, (rows, _) = out / f'{part.name}.jsonl', missing(part, out), rows_of(part, out)
        base = [name for name in part.presets if name in rows and 'reason' not in rows[name]][:1]
        words = dict(out=[str(out)], lines=[str(file)], presets=[*base, *before])
        state = _run(part, out, words, min(start + 2 * part.seconds, end), rehearse)
        if _stopping.is_set():  # nothing that ran is to blame
            return
        for name in rows_of(part, out)[1]:
            append_line(file, dict(preset=name, reason=f'its process ended: {state}'))
        seconds = round(time.monotonic() - start)
        append_line(out / 'states.jsonl', dict(part=part.name, state=state, seconds=seconds))
        print(f'[gpu_report] {part.name}: {state}, {seconds} s', flush=True)
        if missing(part, out) in ([], before):
            return


def _run(part, out, words, end, rehearse):
    """Run the commands of a part; return 'done', 'too long', or how it failed."""
    variables = dict(os.environ, SBP_TEST_DEVICE='cpu' if rehearse else 'cuda')
    if not part.timed:  # beside others
        variables.setdefault('OMP_NUM_THREADS', '2')
    with open(out / f'{part.name}.log', 'a') as log:
        for text in part.commands:
            found = [words.get(word[1:-1]) or [word.replace('{out}', str(out))] for word in text.split()]
            # A group of its own: workers of a data loader and compilers end with it.
            options = dict(cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            process = subprocess.Popen([sys.executable, *itertools.chain(*found)], **options)
            _running.add(process)
            try:
                if code := process.wait(max(end - time.monotonic(), 1)):
                    return f'killed by signal {-code}' if code < 0 else f'failed with status {code}'
            except subprocess.TimeoutExpired:
                return 'too long'
            finally:
                _end(process)
    return 'done'


def _end(process):
    _running.discard(process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_page(parts: list[Part], out: Path, archive: Path, title: str) -> None:
    """Write the page, and the archive of everything that was written."""
    states = {line['part']: line for line in lines_of(out / 'states.jsonl')}
    machines = [line['machine'] for part in parts for line in lines_of(out / f'{part.name}.jsonl') if 'machine' in line]
    lines = [title, '', ', '.join(f'{key} {value}' for key, value in (machines or [{}])[0].items() if key != 'command')]
    for part in parts:
        state = states.get(part.name)
        told = f'{state["state"]}, after {state["seconds"]} s: {part.name}.log' if state else 'Not measured yet.'
        lines += ['', f'## {part.name}', '', told, '']
        try:
            lines += _table(part, out)
        except Exception as error:  # what cannot be read takes no other part's table with it
            lines += [f'Its results cannot be read: {type(error).__name__}: {error}']
    (out / 'report.md').write_text('\n'.join(lines) + '\n')
    new = archive.with_name(archive.name + '.new')
    with tarfile.open(new, 'w:gz') as tar:
        for file in sorted(out.rglob('*')):  # not the data, the weights, or what was installed
            name = file.relative_to(out)
            if file.suffix in ('.md', '.json', '.jsonl', '.log') and name.parts[0] not in ('data', 'site'):
                tar.add(file, f'{out.name}/{name}')
    new.replace(archive)


def _table(part, out):
    if part.name.startswith('training'):
        from trainings import read_log  # noqa: PLC0415

        found = read_log(out / part.name)
        return [f'    {key}: {found[key]}' for key in ('ap', 'step_s', 'memory')] if found and found['loss'] else []
    if not part.presets:
        log = out / f'{part.name}.log'
        told = re.compile(
            r'(FAILED|ERROR) |.*\d+ (passed|failed|skipped|tests collected)|verified |not verified|.* (off|agrees)$'
        )
        return ['    ' + line for line in log.read_text().splitlines() if told.match(line)] if log.exists() else []
    from tables import benchmark_table  # noqa: PLC0415

    found, begun = rows_of(part, out)
    found.update({name: dict(preset=name, reason='its process ended') for name in begun})
    rows = [found[name] for name in part.presets if name in found]
    if part.counted:
        name, key, measured = part.counted
        counted = json.loads((ROOT / f'docs/results/detector_bytes_{name}.json').read_text())['rows']
        counted = {row['variant']: row[key] for row in counted}
        for row in rows:
            row['counted'] = counted[row['preset']]
            row['of_counted'] = row[measured] / row['counted'] if row.get(measured) else None
    return [benchmark_table(rows, markdown=True)] if rows else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='what matters most, in ten minutes')
    parser.add_argument('--minutes', type=float, help='of this call (default: 8.5 with --quick, else 25)')
    parser.add_argument('--out', type=Path, required=True, help='folder of the report; the archive is beside it')
    parser.add_argument('--archive', type=Path, help='file of the archive (default: OUT.tar.gz)')
    parser.add_argument('--rehearse', action='store_true', help='in a tiny size on a CPU')
    parser.add_argument('--parts', nargs='+', metavar='NAME', help='only these, those that failed too')
    args = parser.parse_args()
    end = time.monotonic() + 60 * (args.minutes or (8.5 if args.quick else 25))
    parts = [part for part in gpu_parts.parts_of_report(args.rehearse) if part.quick or not args.quick]
    names = [part.name for part in parts]
    if unknown := set(args.parts or ()) - set(names):
        parser.error(f'--parts: {sorted(unknown)} are unknown; choose from {names}')
    out, archive = args.out.resolve(), (args.archive or Path(f'{args.out.resolve()}.tar.gz')).resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    for name in args.parts or ():
        for file in (out / f'{name}.jsonl', out / f'{name}.log'):
            file.unlink(missing_ok=True)
    title = '# Rehearsal on a CPU: no figure here counts' if args.rehearse else '# Measured on a GPU'
    cut = {line['part'] for line in lines_of(out / 'states.jsonl')}

    def wanted(part):
        # What was cut or failed is not repeated, unless somebody has mended it and names it.
        if args.parts:
            return part.name in args.parts
        return bool(missing(part, out)) if part.presets else part.name not in cut

    todo = [part for part in parts if wanted(part)]
    several = max(1, min(8, (os.cpu_count() or 1) // 2))
    for workers, timed in ((several, False), (1, True)):
        with ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(run_part, part, out, end, args.rehearse) for part in todo if part.timed is timed]
            for future in as_completed(running):
                future.result()
                write_page(parts, out, archive, title)
    write_page(parts, out, archive, title)
    states = {line['part']: line['state'] for line in lines_of(out / 'states.jsonl')}
    left = [part.name for part in todo if missing(part, out) or part.name not in states]
    failed = [part.name for part in parts if states.get(part.name, 'done') != 'done']
    print(f'[gpu_report] {out}/report.md and {archive}' + (f'; run it again for {", ".join(left)}' if left else ''))
    if failed:
        print(f'[gpu_report] not done: {", ".join(failed)}; their logs say why, and --parts tries them again')


def _stop(*_):
    _stopping.set()
    for process in [*_running]:
        _end(process)
    os._exit(143)  # threads would begin the next part


if __name__ == '__main__':
    main()
