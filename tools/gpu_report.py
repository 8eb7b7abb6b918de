"""Runs what `tools/gpu_report.sh` measures, part by part, and writes a page from what is there so far."""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = 'configs/sbp_convnext/'
T = CONFIGS + 'mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'
B = CONFIGS + 'cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
SHAPES = CONFIGS + 'mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
LEAN = 'block+targets+cp-heads+cp-rpn+cp-neck'
BIG = ['none', 'with_cp', 'recompute', 'exact-block', 'int8-block', LEAN]
TESTS = ['test_ops*.py', 'test_convnext.py', 'test_convnext_layers.py', 'test_vit.py', 'test_swin.py']
# What stands behind a command to rehearse it: of an option that is given twice, the last one counts.
TINY_BLOCK = ' --device cpu --arch atto --size 64 64 --batch 1 --rounds 1 --presets none recompute'
TINY_STEP = ' --device cpu --size 64x64 --batch 1 --boxes 2 --rounds 1 --variants none recompute'
TINY_RIVALS = ' --rivals selective save-on-cpu'


@dataclasses.dataclass(frozen=True)
class Part:
    """Something to measure.

    Attributes:
        name (str): Of its files.
        title (str): Above its section.
        minutes (float): Its time limit.
        commands (tuple): Words of each, run one after another by this python. '{out}' is the folder of the report.
        needs_gpu (bool): It cannot be rehearsed. Default: False.
    """

    name: str
    title: str
    minutes: float
    commands: tuple[tuple[str, ...], ...]
    needs_gpu: bool = False


def parts_of_report(rehearse: bool) -> list[Part]:
    """What is measured, in the order of what matters most.

    Args:
        rehearse (bool): In tiny sizes on a CPU, and one part of each kind.
    """
    parts = [_tests(rehearse), *_backbones(rehearse, 'fp16', ''), *_steps(rehearse), *_caps(), *_rivals(rehearse)]
    parts += [_memory(rehearse), _training(rehearse)]
    for amp, layout in () if rehearse else (('bf16', ''), ('fp16', 'nhwc'), ('bf16', 'nhwc')):
        parts += _backbones(rehearse, amp, layout)
    return parts


def _tests(rehearse):
    files = sorted(str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / 'tests').glob(name))
    words = '-m pytest -o addopts= -q -rfE --tb=short -p no:cacheprovider' + (' --collect-only' if rehearse else '')
    return Part('tests', 'Tests on the device', 8, ((*words.split(), *files),))


def _backbones(rehearse, amp, layout):
    tool = f'tools/analysis_tools/benchmark_block.py --unit backbone --amp {amp}'
    tool += ' --channels-last' if layout else ''
    return [
        _measured(
            '_'.join(filter(None, ('backbone', name, amp, layout))),
            f'Backbone of {name.upper()}, {amp}{", channels last" if layout else ""}',
            4,
            f'{tool} --device cuda --arch {arch}' + (TINY_BLOCK + ' --amp bf16' if rehearse else ''),
            plot=True,
        )
        for name, arch in (('t', 'tiny'), ('b', 'base'))[: 1 if rehearse else 2]
    ]


def _steps(rehearse):
    variants = '--variants none with_cp reference recompute block exact exact-block nearest pool int8 recompute+skip '
    cases = (('t', T, variants + 'exact-block+skip none'), ('b', B, variants + 'none'))
    return [
        _measured(
            f'steps_{name}',
            f'Whole steps of {name.upper()}',
            8,
            f'tools/analysis_tools/benchmark_steps.py {SHAPES if rehearse else config} --device cuda {words}'
            + (TINY_STEP if rehearse else ''),
            plot=True,
        )
        for name, config, words in cases[: 1 if rehearse else 2]
    ]


def _rivals(rehearse):
    """What others offer: compilers take minutes, so each table is a part of its own."""
    ours = 'none with_cp recompute exact exact-block int8-block'
    block = 'tools/analysis_tools/benchmark_block.py --unit {} --device cuda --presets ' + ours
    steps = f'tools/analysis_tools/benchmark_steps.py {SHAPES if rehearse else T} --device cuda --variants {ours}'
    tiny = (TINY_BLOCK + TINY_RIVALS, TINY_STEP + TINY_RIVALS) if rehearse else ('', '')
    return [
        _measured(
            'rivals_block',
            'What others offer: a block of T, stage 1',
            5,
            f'{block.format("block")} --arch tiny --stage 1 --rivals{tiny[0]}',
            plot=True,
        ),
        _measured('rivals_steps', 'What others offer: whole steps of T', 9, f'{steps} --rivals{tiny[1]}', plot=True),
        _measured(
            'rivals_backbone',
            'What others offer: backbone of T',
            9,
            f'{block.format("backbone")} --arch tiny --rivals{tiny[0]}',
            plot=True,
        ),
    ]


def _caps():
    tool = 'tools/analysis_tools/run_under_cap.py'
    cases = [('b', B, 8), ('b', B, 6), ('b', B, 4), ('t', T, 4)]
    variants = f'none recompute {LEAN} {LEAN.replace("block", "int8-block")}'
    return [
        _measured(
            f'cap_{name}_{cap}',
            f'{name.upper()} while torch may have {cap} GiB',
            5,
            f'{tool} {config} --cap {cap}GiB --variants {variants}',
            needs_gpu=True,
        )
        for name, config, cap in cases
    ]


def _memory(rehearse):
    tool = f'tools/analysis_tools/benchmark_memory.py {SHAPES if rehearse else T} --variants {" ".join(BIG)}'
    counted, measured = (
        f'{tool} --device {device}{TINY_STEP if rehearse else ""} --json {{out}}/memory_{name}.json'
        for device, name in (('cpu', 'counted'), ('cuda', 'measured'))
    )
    return Part('memory', 'The planner beside the measurement: T', 8, (_words(counted), _words(measured)))


def _training(rehearse):
    images, size, epochs = (4, 64, 1) if rehearse else (1000, 128, 6)
    commands = [
        f'tools/make_synthetic_coco.py --out {{out}}/shapes --train {images} --val {images} --size {size} --seed 0'
    ]
    for name, setting in (('plain', 'model.backbone.sbp_cfg=None'), ('sbp', '')):
        words = f'tools/train.py {SHAPES} --work-dir {{out}}/training_{name} --cfg-options {setting}'
        words += f' train_cfg.max_epochs={epochs} train_cfg.val_interval={epochs} default_hooks.logger.interval=1'
        words += ' train_dataloader.dataset.data_root={out}/shapes/ val_dataloader.dataset.data_root={out}/shapes/'
        words += ' val_evaluator.ann_file={out}/shapes/annotations/instances_val.json'
        words += ' train_dataloader.batch_size=2' if rehearse else ' train_dataloader.num_workers=8'
        words += ' optim_wrapper.type=' + ('OptimWrapper' if rehearse else 'AmpOptimWrapper')
        commands.append(words)
    return Part('training', 'A short training on rendered shapes', 9, tuple(map(_words, commands)))


def _words(text):
    return tuple(text.split())


def _measured(name, title, minutes, text, plot=False, needs_gpu=False):
    words = f'{text} --json {{out}}/{name}.json' + (f' --plot {{out}}/{name}.png' if plot else '')
    return Part(name, title, minutes, (_words(words),), needs_gpu)


def run_part(part: Part, out: Path, rehearse: bool, seconds: float) -> dict:
    """Runs a part, all that it prints into a file.

    Args:
        part (Part): What to run.
        out (Path): Folder of the report.
        rehearse (bool): On a CPU.
        seconds (float): Its limit.

    Returns:
        dict: ``state`` ('done', 'failed', 'too long' or 'needs a GPU') and ``seconds``.
    """
    if rehearse and part.needs_gpu:
        return dict(state='needs a GPU', seconds=0)
    variables = dict(os.environ, SBP_TEST_DEVICE='cpu' if rehearse else 'cuda')
    if rehearse:
        variables['CUDA_VISIBLE_DEVICES'] = ''
    start, state = time.monotonic(), 'done'
    with open(out / f'{part.name}.log', 'w') as log:
        for words in part.commands:
            command = [sys.executable, *(word.replace('{out}', str(out)) for word in words)]
            state = _run(command, log, variables, seconds - (time.monotonic() - start))
            if state != 'done':
                break
    return dict(state=state, seconds=round(time.monotonic() - start))


def _sees_gpu():
    import torch  # slow, and a rehearsal does without

    return torch.cuda.is_available()


def _run(command, log, variables, seconds):
    # A group of its own: workers of a data loader and compilers end with it.
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return 'failed' if process.wait(max(seconds, 1)) else 'done'
    except subprocess.TimeoutExpired:
        return 'too long'
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write_page(parts: list[Part], states: dict, out: Path) -> Path:
    """The page, from what is there so far.

    Args:
        parts (list[Part]): All parts.
        states (dict): Name to what :func:`run_part` returned.
        out (Path): Folder of the report.

    Returns:
        Path: The page.
    """
    lines = [
        '# Measured on a GPU' if not states.get('rehearsal') else '# Rehearsal on a CPU: no figure here counts',
        '',
    ]
    for part in parts:
        state = states.get(part.name)
        lines += [f'## {part.title}', '', _sentence(part, state), '']
        lines += [*_tables(part, out), '']
        if (out / f'{part.name}.png').exists():
            lines += [f'![{part.title}]({part.name}.png)', '']
    page = out / 'report.md'
    page.write_text('\n'.join(lines))
    return page


def _sentence(part, state):
    if state is None:
        return 'Not measured yet.'
    return f'State: {state["state"]}, after {state["seconds"]} s. Output: {part.name}.log.'


def _tables(part, out):
    """Markdown of what a part has written. What cannot be read takes no other part's table with it."""
    try:
        return _tables_of(part, out)
    except Exception as error:
        return [f'Its results cannot be read: {type(error).__name__}: {error}']


def _tables_of(part, out):
    sys.path[:0] = [str(ROOT / 'tools/analysis_tools')]
    import update_tables

    if part.name == 'tests':
        return _test_lines(out / 'tests.log')
    if part.name == 'training':
        return _training_table(out)
    if part.name == 'memory':
        return _memory_tables(out, update_tables.table)
    file = out / f'{part.name}.json'
    results = json.loads(file.read_text()) if file.exists() else None
    if results is None:
        return []
    return [_cap_table(results) if 'cap' in results.get('case', {}) else update_tables.table(results)]


def _test_lines(log):
    told = re.compile(r'(FAILED|ERROR) |.*\d+ (passed|failed|skipped|tests collected)')
    return ['    ' + line for line in log.read_text().splitlines() if told.match(line)] if log.exists() else []


def _memory_tables(out, table):
    """What was counted without the GPU, then beside it what the GPU's allocator says."""
    found = {name: out / f'memory_{name}.json' for name in ('counted', 'measured')}
    found = {name: json.loads(file.read_text()) for name, file in found.items() if file.exists()}
    tables = [table(results) for results in found.values()]
    if len(found) < 2:
        return tables
    from sbp_mmdet.reporting import Column, format_bytes, markdown_table

    measured = {row['variant']: row for row in found['measured']['rows']}
    rows = [dict(row, other=measured.get(row['variant'], dict(fits=False))) for row in found['counted']['rows']]

    def cell(form):
        return lambda row: form(row) if row['other'].get('fits') else None

    columns = [Column('variant', lambda row: f'`{row["variant"]}`')]
    columns.append(Column('peak counted', lambda row: format_bytes(row['peak'])))
    columns.append(Column('peak measured', cell(lambda row: format_bytes(row['other']['peak']))))
    columns.append(Column('measured / counted', cell(lambda row: f'{row["other"]["peak"] / row["peak"]:.3f}')))
    columns.append(Column('reserved', cell(lambda row: format_bytes(row['other']['reserved'] or 0))))
    return [*tables, '', markdown_table(columns, rows)]


def _cap_table(results):
    from sbp_mmdet.reporting import Column, format_bytes, markdown_table

    columns = [Column('variant', lambda row: row['variant'])]
    columns.append(Column('', lambda row: 'fits' if row['fits'] else 'out of memory'))
    columns.append(Column('peak', lambda row: format_bytes(row['peak']) if row['fits'] else None))
    columns.append(Column('step, ms', lambda row: f'{row["step_s"] * 1e3:.0f}' if row.get('step_s') else None))
    columns.append(Column('allocator retries', lambda row: str(row['retries']) if row.get('retries') else None))
    return markdown_table(columns, results['rows'])


def _training_table(out):
    from sbp_mmdet.reporting import Column, markdown_table
    from sbp_mmdet.study.trainings import read_log

    rows = []
    for name in ('plain', 'sbp'):
        found = read_log(out / f'training_{name}')
        if found and found['loss']:
            row = dict(name=name, time=found['step_s'], memory=found['memory'])
            rows.append(dict(row, loss=found['loss'][-1][1], ap=found['ap'].get('box AP')))
    forms = dict(ap=('box AP', '{:.3f}'), loss=('last loss', '{:.3f}'), time=('step, s', '{:.3f}'))
    forms['memory'] = ('memory, MiB', '{}')
    columns = [Column('', lambda row: row['name'])]
    for key, (head, form) in forms.items():
        columns.append(
            Column(head, lambda row, key=key, form=form: None if row.get(key) is None else form.format(row[key]))
        )
    return [markdown_table(columns, rows)] if rows else []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--minutes', type=float, default=25, help='of this call; it can be called again (default: 25)')
    parser.add_argument('--out', type=Path, required=True, help='folder of the report')
    parser.add_argument('--rehearse', action='store_true', help='in a tiny size on a CPU')
    parser.add_argument('--parts', nargs='+', metavar='NAME', help='only these')
    args = parser.parse_args()
    parts = parts_of_report(args.rehearse)
    names = [part.name for part in parts]
    if unknown := set(args.parts or ()) - set(names):
        parser.error(f'--parts: {sorted(unknown)} are unknown; choose from {names}')
    if not args.rehearse and not _sees_gpu():
        parser.error('torch sees no GPU; --rehearse runs everything in tiny sizes on a CPU')
    from sbp_mmdet.reporting import write_json  # slow too

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    file, end = args.out / 'states.json', time.monotonic() + 60 * args.minutes
    states = json.loads(file.read_text()) if file.exists() else {}
    if states.setdefault('rehearsal', args.rehearse) != args.rehearse:
        parser.error(f'{args.out} holds a {"rehearsal" if states["rehearsal"] else "report"}; give another --out')
    for part, seconds in _to_run(parts, states, args.parts, end):
        print(f'[gpu_report] {part.name}', flush=True)
        states[part.name] = run_part(part, args.out, args.rehearse, seconds)
        print(f'[gpu_report] {part.name}: {states[part.name]["state"]}', flush=True)
        write_json(file, states, indent=1)
        write_page(parts, states, args.out)
    page = write_page(parts, states, args.out)
    found = {name: states.get(name, {}).get('state') for name in names}
    missing = [name for name, state in found.items() if state in (None, 'too long')]
    failed = [name for name, state in found.items() if state == 'failed']
    print(f'[gpu_report] {page}' + (f'; run it again for {", ".join(missing)}' if missing else ''))
    if failed:
        print(f'[gpu_report] failed: {", ".join(failed)}; their logs say why, and --parts tries them again')


def _to_run(parts, states, names, end):
    """Parts and their seconds. What took too long before comes last; what failed would fail again, unless somebody has
    mended it and names it."""
    begun = False
    for part in sorted(parts, key=lambda part: part.name in states):
        before, left = states.get(part.name, {}).get('state'), end - time.monotonic()
        wanted = part.name in names if names else before not in ('failed', 'needs a GPU')
        # A part that the end of the call would kill is left to the next one.
        if wanted and before != 'done' and left >= (60 * part.minutes if begun else 20):
            begun = True
            yield part, min(60 * part.minutes, left)


if __name__ == '__main__':
    main()
