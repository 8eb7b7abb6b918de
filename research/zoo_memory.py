"""Counted against measured memory of a training step: all configs of mmdet with a figure in their metafile.

    python research/zoo_memory.py                    # counts what docs/results/zoo_memory.json lacks, and goes on there
    python research/zoo_memory.py --only rtmdet dino # of configs whose names contain one of these
    python research/zoo_memory.py --report           # counts nothing: the table, docs/pictures/zoo_memory.png

``metafile.yml`` says "Training Memory (GB)": ``torch.cuda.max_memory_allocated`` in GiB of a whole training, so of its
worst batch, on GPUs of OpenMMLab. Counted is the plain config's worst batch.
"""

import argparse
import json
import logging
import signal
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import mmdet
import yaml
from mmengine.logging import MMLogger

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import BOXES, inputs_of
from sbp_mmdet.plan.tables import write_json
from sbp_mmdet.plan.variants import load_config, plain

_HERE = Path(__file__).resolve().parents[1]
RESULTS = _HERE / 'docs/results/zoo_memory.json'
PICTURE = _HERE / 'docs/pictures/zoo_memory.png'
_SECONDS = 200  # at most, for one config


def measured() -> dict[str, float]:
    """Configs with a figure, first one of each family, then the second ones, and so on."""
    root = Path(mmdet.__file__).parent / '.mim'
    families = []
    for file in sorted(root.glob('configs/*/metafile.yml')):
        models = yaml.safe_load(file.read_text())
        found = {}
        for model in models if isinstance(models, list) else models.get('Models') or []:
            memory = (model.get('Metadata') or {}).get('Training Memory (GB)')
            if memory and (root / model['Config']).exists():
                found[model['Config'].removeprefix('configs/')] = float(memory)
        families.append(list(found.items()))
    longest = max(map(len, families))
    return dict(family[i] for i in range(longest) for family in families if i < len(family))


def count(name: str) -> dict:
    """What the planner counts of a config, in a process of its own; ``error`` where it cannot."""
    try:
        with ProcessPoolExecutor(1, get_context('fork')) as pool:
            return pool.submit(_count, name).result()
    except BrokenProcessPool:
        return dict(error='the process was killed: too little memory in this machine')


def _count(name):
    start = time.process_time()
    try:
        config = plain(load_config(f'mmdet::{name}'))
        inputs = inputs_of(config)
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # of its own CPU time, whoever else runs here
        row = measure_detector(config, batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=BOXES)
        keys = ('parameters', 'optimizer', 'gradients', 'saved', 'forward', 'peak', 'peak_phase', 'peaks')
        found = {key: row[key] for key in keys}
        found.update(size=[inputs.batch, inputs.height, inputs.width], amp='Amp' in str(config.optim_wrapper.type))
    except Exception as error:  # whatever a model's own code raises: the next one is counted all the same
        found = dict(error=f'{type(error).__name__}: {" ".join(str(error).split())[:160]}')
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return dict(found, seconds=round(time.process_time() - start, 1))


def _too_long(*_):
    raise TimeoutError(f'no answer in {_SECONDS} s')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', help='count configs whose names contain one of these')
    parser.add_argument('--again', action='store_true', help='count what was counted, too')
    parser.add_argument('--report', action='store_true', help='count nothing')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    signal.signal(signal.SIGPROF, _too_long)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures = measured()
    for i, (name, memory) in enumerate(figures.items()) if not args.report else ():
        if (args.only and not any(word in name for word in args.only)) or (name in rows and not args.again):
            continue
        rows[name] = dict(measured=memory, **count(name))
        write_json(RESULTS, rows)
        said = rows[name].get('error') or f'{rows[name]["peak"] / 2**30:.2f} counted, {memory} measured'
        print(f'{i + 1}/{len(figures)}  {name}: {said}', flush=True)


if __name__ == '__main__':
    main()
