"""Runs the parts of `tools/gpu_parts.py`, each in its own process, and writes a page and an archive of the results.

Each row of a part is written to disk as soon as it is measured. If an error ends the process, the error is a row too,
and a new process measures the remaining rows. A second call with the same --out measures the missing rows.
"""

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import gpu_parts
from gpu_page import write_page
from gpu_parts import ROOT, Part
from gpu_rows import lines_of, missing, read_rows, rows_to_run

sys.path[:0] = [str(ROOT), str(ROOT / 'research')]
_running, _stopping = set(), threading.Event()
_NO_TIME = 'no time left'


def run_part(part: Part, out: Path, end: float, rehearse: bool) -> None:
    """Run a part until all of its rows exist, no new row comes, or too little time is left."""
    from tables import append_line  # noqa: PLC0415  it takes torch with it

    while (start := time.monotonic()) + part.seconds < end:
        file, before = out / f'{part.name}.jsonl', missing(part, out)
        words = dict(out=[str(out)], lines=[str(file)], rows=rows_to_run(part, out), end=[str(end)])
        state = _run(part, out, words, end, rehearse)
        if _stopping.is_set():  # nothing that ran is to blame
            return
        for name in read_rows(part, out)[1] if state != _NO_TIME else ():
            append_line(file, dict(row=name, preset=name.rpartition('/')[2], reason=f'its process ended: {state}'))
        seconds = round(time.monotonic() - start)
        append_line(out / 'states.jsonl', dict(part=part.name, state=state, seconds=seconds))
        print(f'[gpu_report] {part.name}: {state}, {seconds} s', flush=True)
        if missing(part, out) in ([], before):
            return


def _run(part, out, words, end, rehearse):
    """Run the commands of a part; return 'done', 'too long', 'no time left', or how it failed."""
    variables = dict(os.environ, SBP_TEST_DEVICE='cpu' if rehearse else 'cuda')
    if not part.timed:  # beside others
        variables.setdefault('OMP_NUM_THREADS', '2')
    with open(out / f'{part.name}.log', 'a', encoding='utf-8') as log:
        for text in part.commands:
            found = [words.get(word[1:-1]) or [word.replace('{out}', str(out))] for word in text.split()]
            # A group of its own: workers of a data loader and compilers end with it.
            options = dict(cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            process = subprocess.Popen([sys.executable, *itertools.chain(*found)], **options)
            _running.add(process)
            try:
                state = _wait(process, words['lines'][0], 2 * part.seconds, end)
            finally:
                _end(process)
            if state != 'done':
                return state
    return 'done'


def _wait(process, lines, seconds, end):
    """Wait for a process: at most ``seconds`` from its start and from each line that it writes."""
    last, size = time.monotonic(), None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.5)
            return 'done' if not code else f'killed by signal {-code}' if code < 0 else f'failed with status {code}'
        now, before = time.monotonic(), size
        size = os.path.getsize(lines) if os.path.exists(lines) else 0
        last = last if size == before else now
        if now > end:
            return _NO_TIME
        if now > last + seconds:
            return 'too long'


def _end(process):
    _running.discard(process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--quick', action='store_true', help='make only the most important measurements, in ten minutes'
    )
    parser.add_argument('--minutes', type=float, help='time limit of this call (default: 9 with --quick, otherwise 25)')
    parser.add_argument('--out', type=Path, required=True, help='folder of the report; the archive is beside it')
    parser.add_argument('--archive', type=Path, help='file of the archive (default: OUT.tar.gz)')
    parser.add_argument('--rehearse', action='store_true', help='use tiny sizes on a CPU')
    parser.add_argument('--parts', nargs='+', metavar='NAME', help='run only these parts, and repeat their failed rows')
    args = parser.parse_args()
    end = time.monotonic() + 60 * (args.minutes or (9 if args.quick else 25))
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
    cut = {line['part'] for line in lines_of(out / 'states.jsonl') if line['state'] != _NO_TIME}

    def wanted(part):
        # What was cut or failed is not repeated, unless somebody has mended it and names it.
        if args.parts:
            return part.name in args.parts
        return bool(missing(part, out)) if part.rows else part.name not in cut

    todo, cores = [part for part in parts if wanted(part)], os.cpu_count() or 1
    # Few at a time: each has a context on the GPU. What is timed runs alone, unless no figure counts.
    several = cores if args.rehearse else max(1, min(4, cores // 4))
    for timed, group in itertools.groupby(todo, key=lambda part: part.timed and not args.rehearse):
        with ThreadPoolExecutor(1 if timed else several) as pool:
            running = [pool.submit(run_part, part, out, end, args.rehearse) for part in group]
            for future in as_completed(running):
                future.result()
                write_page(parts, out, archive, title)
    write_page(parts, out, archive, title)
    states = {line['part']: line['state'] for line in lines_of(out / 'states.jsonl')}
    left = [part.name for part in todo if missing(part, out) or states.get(part.name, _NO_TIME) == _NO_TIME]
    failed = [part.name for part in parts if states.get(part.name, 'done') not in ('done', _NO_TIME)]
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
