"""The planner's answer for many configs: one line each, three minutes at most each.

    python tools/analysis_tools/sweep.py --budget 11GiB --json docs/results/sweep.json            # mmdet's families
    python tools/analysis_tools/sweep.py mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py --budget 8GiB

Without configs: one of each family in the installed mmdet's configs, the first by name that trains on COCO's boxes or
masks. Each runs in a process of its own, with exact gradients only.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import mmdet
from mmengine.utils import ProgressBar

from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs

PLANNER = Path(__file__).parents[1] / 'plan_memory.py'


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='*', help='configs (default: one of each family of mmdet)')
    parser.add_argument('--budget', default='11GiB', help='memory of the GPU (default: 11GiB)')
    parser.add_argument('--limit', type=float, default=180, help='seconds for a config (default: 180)')
    add_outputs(parser, plot=False)
    return parser.parse_args()


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


def ask(config: str, budget: str, limit: float) -> dict:
    """Runs the planner.

    Args:
        config (str): The config.
        budget (str): Memory of the GPU.
        limit (float): Seconds.

    Returns:
        dict: ``config``, ``answer`` (one line), ``images`` (how many of what size), ``seconds``.
    """
    start = time.perf_counter()
    command = [sys.executable, str(PLANNER), config, '--budget', budget, '--exact']
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        answer, output = read_answer(done.stdout, done.stderr), done.stdout
    except subprocess.TimeoutExpired:
        answer, output = f'no answer within {limit:.0f} s', ''
    images = re.search(r'^\d+ images of \d+ x \d+', output, re.MULTILINE)
    seconds = round(time.perf_counter() - start)
    return dict(config=config, images=images[0] if images else '', answer=answer, seconds=seconds)


def read_answer(output: str, errors: str) -> str:
    """The line of the planner's output, or of its errors, that says most."""
    looked_at = re.findall(r'^  (\S+) +(\S+ \S+)  (fits|too much)$', output, re.MULTILINE)
    needs = {variant: need for variant, need, _ in looked_at}
    if found := re.search(r'^The fastest that fits: (.*)$', output, re.MULTILINE):
        return f'{found[1]}: {needs[found[1]]}'
    if needs:
        return 'nothing fits; ' + ', '.join(f'{variant}: {need}' for variant, need in needs.items())
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else 'no output'


def main():
    args = parse_args()
    configs = args.configs or families()
    bar, rows = ProgressBar(len(configs)), []
    for config in configs:
        rows.append(ask(config, args.budget, args.limit))
        bar.update()
        if args.json:  # a sweep takes hours: what is known so far stays
            Path(args.json).with_suffix('.part').write_text(json.dumps(rows, indent=1))
    print('\n\n| config | images | answer | seconds |\n|---|---|---|---|')
    for row in rows:
        print('| {config} | {images} | {answer} | {seconds} |'.format(**row))
    case = dict(budget=args.budget, limit_s=args.limit)
    write_outputs(args, dict(machine=describe_machine('cpu'), case=case, rows=rows), indent=1)
    if args.json:
        Path(args.json).with_suffix('.part').unlink(missing_ok=True)


if __name__ == '__main__':
    main()
