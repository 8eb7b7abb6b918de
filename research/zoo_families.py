"""Does each family of mmdet get an answer from the planner, how soon, and what do exact and int8 save there?

    python research/zoo_families.py            # counts what docs/results/zoo_families.json lacks, and goes on there
    python research/zoo_families.py --report   # counts nothing: the table of docs/research/zoo_families.md

One config a family: the first with a measured figure (see zoo_memory.py), or else the first that trains. A family is a
folder of mmdet's configs with such a config, unless it is of trackers.
"""

import argparse
import json
import logging
import signal
import time
import warnings
from pathlib import Path

import mmdet
from mmengine.logging import MMLogger
from zoo_memory import apart, measured, too_long

from sbp_mmdet.plan.detector import build_detector, measure_detector
from sbp_mmdet.plan.inputs import BOXES, inputs_of
from sbp_mmdet.plan.tables import Column, describe_machine, format_bytes, markdown_table, write_json
from sbp_mmdet.plan.variants import load_config, plain, presets_of, with_variant

RESULTS = Path(__file__).resolve().parents[1] / 'docs/results/zoo_families.json'
VARIANTS = ('none', 'exact', 'int8')
_SECONDS = 60  # of CPU time for each count, as the planner is to answer


def families() -> dict[str, str]:
    """Folder to its config."""
    root = Path(mmdet.__file__).parent / '.mim/configs'
    names = [*measured(), *(str(file.relative_to(root)) for file in sorted(root.glob('*/*.py')))]
    found = {}
    for name in names:
        if (folder := name.split('/')[0]) not in found:
            try:
                config = load_config(str(root / name))
            except ValueError:  # no model, or a package that is missing
                continue
            preprocessor = str((config.model.get('data_preprocessor') or {}).get('type'))
            if config.get('train_dataloader') and not any(kind in preprocessor for kind in ('Track', 'ReID')):
                found[folder] = name
    return dict(sorted(found.items()))


def count(name: str) -> dict:
    """Peak and seconds of each variant of a config; ``error`` where there is none."""
    found = dict(config=name, peaks={}, seconds={})
    try:
        config = plain(load_config(f'mmdet::{name}'))
        inputs = inputs_of(config)
        case = dict(batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=BOXES)
        found.update(case)
        apply = presets_of(build_detector(config, 'cpu')[0])
        for variant in VARIANTS:
            if apply[variant] is None:
                start = time.process_time()
                signal.setitimer(signal.ITIMER_PROF, _SECONDS)
                # A step may drop no image of a batch, see the planner.
                keys = dict(skip_dropped_images=False) if variant != 'none' else {}
                row = measure_detector(with_variant(config, variant, **keys), **case)
                found['peaks'][variant] = row['peak']
                found['seconds'][variant] = round(time.process_time() - start, 1)
    except Exception as error:  # whatever a model's own code raises: the next one is counted all the same
        found['error'] = f'{type(error).__name__}: {" ".join(str(error).split())[:160]}'
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found


def report(rows: dict[str, dict]) -> str:
    """How many families get an answer, and the table of them all."""
    answered = [row for row in rows.values() if 'none' in row.get('peaks', {})]
    slowest = max((seconds for row in answered for seconds in row['seconds'].values()), default=0)
    said = f'{len(answered)} of {len(rows)} families get an answer; the slowest count took {slowest:.0f} s of one core.'

    def share(variant):
        return lambda row: f'{row["peaks"][variant] / row["peaks"]["none"]:.2f}' if variant in row['peaks'] else None

    columns = [
        Column('family', lambda row: row['family']),
        Column('config', lambda row: row.get('config', '').split('/')[-1].removesuffix('.py')),
        Column('plain peak', lambda row: format_bytes(row['peaks']['none']) if 'none' in row['peaks'] else None),
        Column('with `exact`', share('exact')),
        Column('with `int8`', share('int8')),
        Column('', lambda row: row.get('error')),
    ]
    records = [dict(dict(peaks={}), **row, family=family) for family, row in sorted(rows.items())]
    return f'{said}\n\n{markdown_table(columns, records)}'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', help='count these families')
    parser.add_argument('--report', action='store_true', help='count nothing')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    signal.signal(signal.SIGPROF, too_long)
    rows = json.loads(RESULTS.read_text())['rows'] if RESULTS.exists() else {}
    for family, name in families().items() if not args.report else ():
        if family not in rows and (not args.only or family in args.only):
            rows[family] = apart(count, name)
            write_json(RESULTS, dict(machine=describe_machine(), rows=rows))
            print(f'{family}: {rows[family].get("error") or rows[family]["peaks"]}', flush=True)
    print(report(rows))


if __name__ == '__main__':
    main()
