"""The planner's answer for many configs: one line each, three minutes of a processor at most each.

    python tools/analysis_tools/sweep.py --budget 11GiB --json docs/results/sweep.json            # mmdet's families
    python tools/analysis_tools/sweep.py mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py --budget 8GiB

Without configs: one of each family in the installed mmdet's configs, the first by name that trains on COCO's boxes or
masks. Each runs in a process of its own, with exact gradients only. Where the JSON file is there already, answers of
other configs stay in it, so a config can be asked again; with --missing only those are asked that it lacks. All of a
file are of the same --budget and --limit.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import mmdet
import mmdet.models  # noqa: F401  what every config needs is imported once, before the processes part

import sbp_mmdet.analysis.detector  # noqa: F401
from sbp_mmdet.analysis.planner import parse_bytes
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs

PLANNER = Path(__file__).parents[1] / 'plan_memory.py'


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='*', help='configs (default: one of each family of mmdet)')
    parser.add_argument('--budget', default='11GiB', help='memory of the GPU (default: 11GiB)')
    parser.add_argument('--limit', type=int, default=180, help='seconds of a processor for a config (default: 180)')
    parser.add_argument('--memory', type=float, default=8, help="GB of this machine's memory for it (default: 8)")
    parser.add_argument('--missing', action='store_true', help='only configs that the JSON file has no answer for')
    add_outputs(parser, plot=False)
    return parser, parser.parse_args()


def families() -> list[str]:
    """One config of each family in the installed mmdet."""
    package = Path(mmdet.__file__).parent
    folder = package / '.mim/configs' if (package / '.mim/configs').is_dir() else package.parent / 'configs'
    found = []
    for family in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != '_base_'):
        files = sorted(family.glob('*coco*.py'))
        if files:
            found.append(f'mmdet::{family.name}/{files[0].name}')
    return found


def ask(config: str, budget: str, limit: int, memory: float = 8) -> dict:
    """Runs the planner.

    Args:
        config (str): The config.
        budget (str): Memory of the GPU.
        limit (int): Seconds of a processor.
        memory (float): GB of this machine's memory. Default: 8.

    Returns:
        dict: ``config``, ``answer`` (one line), ``images`` (how many of what size), ``seconds`` of a processor.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, 'out'), Path(folder, 'err')
        before, words = _processor(), [str(PLANNER), config, '--budget', budget, '--exact']
        process = multiprocessing.get_context('fork').Process(target=_plan, args=(words, limit, out, err))
        process.start()
        while process.is_alive() and (used := _resident(process.pid)) < memory * 1e9:
            process.join(0.5)
        if process.is_alive():
            process.kill()
        process.join()
        output, errors = (path.read_text() if path.exists() else '' for path in (out, err))
    answer = read_answer(output, errors)
    if process.exitcode == -signal.SIGXCPU:
        answer = answer.removeprefix('nothing fits; ') + f'; no more within {limit} s of a processor'
    elif process.exitcode == -signal.SIGKILL:
        answer = (
            answer.removeprefix('nothing fits; ')
            + f"; to count more takes over {used / 1e9:.1f} GB of this machine's memory"
        )
    images = re.search(r'^\d+ images of \d+ x \d+', output, re.MULTILINE)
    seconds = round(_processor() - before)
    return dict(config=config, images=images[0] if images else '', answer=answer, seconds=seconds)


def _plan(words, limit, out, err):
    """In a process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = open(1, 'w'), open(2, 'w')  # noqa: SIM115  until the process ends
    sys.argv = words
    runpy.run_path(words[0], run_name='__main__')


def _processor():
    """Seconds of a processor that processes of this one used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident(pid):
    """Bytes of memory; 0 where that is not told."""
    try:
        return int(Path(f'/proc/{pid}/statm').read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def read_answer(output: str, errors: str) -> str:
    """The line of the planner's output, or of its errors, that says most."""
    looked_at = re.findall(r'^  (\S+) +(\S+ \S+)  (fits|too much)$', output, re.MULTILINE)
    needs = {variant: need for variant, need, _ in looked_at}
    if found := re.search(r'^The fastest that fits: (.*)$', output, re.MULTILINE):
        return f'{found[1]}: {needs[found[1]]}'
    if needs:
        return 'nothing fits; ' + ', '.join(f'{variant}: {need}' for variant, need in needs.items())
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    found = re.search(r'^.*(?:no training step of it runs here|error): (.*)$', errors, re.MULTILINE)
    return (found[1] if found else lines[-1] if lines else 'no output')[:300]


def main():
    parser, args = parse_args()
    case = dict(budget=args.budget, limit_s=args.limit)
    known, found = {}, {}
    try:
        parse_bytes(args.budget)
        if args.missing and not args.json:
            raise ValueError('--missing needs --json, the file with the answers that there are')
        if args.json and args.json.exists():
            found = json.loads(args.json.read_text())
    except ValueError as error:
        parser.error(str(error))
    if found:
        if found.get('case') != case:
            parser.error(f'--json {args.json} is of {found.get("case")}, and not of {case}; give another --json')
        known = {row['config']: row for row in found['rows']}
    configs = [name for name in args.configs or families() if not (args.missing and name in known)]
    machine = describe_machine('cpu')
    for i, config in enumerate(configs, 1):
        known[config] = ask(config, args.budget, args.limit, args.memory) | dict(commit=machine['commit'])
        print(f'{i} of {len(configs)}: {config}: {known[config]["answer"]}', flush=True)
        # A sweep takes hours: what is known so far is written each time.
        write_outputs(args, dict(machine=machine, case=case, rows=[known[key] for key in sorted(known)]), indent=1)


if __name__ == '__main__':
    main()
