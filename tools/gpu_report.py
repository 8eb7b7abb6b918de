"""Runs what `tools/gpu_report.sh` measures, part by part, and writes a page from what is there so far."""

import argparse
import dataclasses
import json
import os
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
TESTS = ['tests/test_convnext.py']


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
    """What is measured, in the order of what matters most."""
    device = '--device cpu' if rehearse else '--device cuda'
    parts = [
        Part('tests', 'Tests on the device', 5, (_words(f'-m pytest -q -x {"--co " if rehearse else ""}', *TESTS),))
    ]
    parts += _backbones(rehearse, device) + _steps(rehearse, device) + _caps()
    parts += [_planner(rehearse), _training(rehearse)]
    return parts


def _words(text, *more):
    return (*text.split(), *more)


def _backbones(rehearse, device):
    tool = 'tools/analysis_tools/benchmark_block.py --unit backbone ' + device
    if rehearse:
        tool += ' --arch atto --size 64 64 --batch 1 --rounds 1 --presets none recompute --rivals save-on-cpu'
        return [_measured('backbone_t_fp16', 'Backbone', 1, tool, plot=True)]
    names = {'tiny': 't', 'base': 'b'}
    return [
        _measured(
            f'backbone_{names[arch]}_{amp}{"_nhwc" if layout else ""}',
            f'Backbone of {names[arch].upper()}, {amp}{", channels last" if layout else ""}',
            6,
            f'{tool} --arch {arch} --amp {amp} {layout} {"" if layout else "--rivals"}',
            plot=True,
        )
        for layout in ('', '--channels-last')
        for amp in ('fp16', 'bf16')
        for arch in ('tiny', 'base')
    ]


def _steps(rehearse, device):
    tool = f'tools/analysis_tools/benchmark_steps.py {{}} {device} --variants'
    if rehearse:
        tiny = f'{tool.format(SHAPES)} none recompute --size 64x64 --batch 1 --boxes 2 --rounds 1'
        return [_measured('steps_t', 'Whole steps', 1, tiny, plot=True)]
    variants = 'none with_cp reference recompute block exact exact-block nearest pool int8 recompute+skip '
    return [
        _measured(f'steps_{name}', f'Whole steps of {name.upper()}', 8, words, plot=True)
        for name, words in (
            ('t', f'{tool.format(T)} {variants} exact-block+skip none --rivals'),
            ('b', f'{tool.format(B)} {variants} none'),
        )
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


def _planner(rehearse):
    tool = f'tools/analysis_tools/benchmark_memory.py {SHAPES if rehearse else T} '
    tool += '--size 64x64 --batch 1 --boxes 2 --variants none recompute' if rehearse else '--variants ' + ' '.join(BIG)
    on = 'cpu' if rehearse else 'cuda'
    commands = [f'{tool} --device cpu --json {{out}}/memory_counted.json']
    commands.append(f'{tool} --device {on} --json {{out}}/memory.json')
    return Part('memory', 'Memory of a step: counted without a GPU, and measured', 8, tuple(map(_words, commands)))


def _training(rehearse):
    images, size, epochs = (4, 64, 1) if rehearse else (1000, 128, 6)
    commands = [
        f'tools/make_synthetic_coco.py --out {{out}}/shapes --train {images} --val {images} --size {size} --seed 0'
    ]
    for name, setting in (('plain', 'model.backbone.sbp_cfg=None'), ('sbp', '')):
        words = f'tools/train.py {SHAPES} --work-dir {{out}}/training_{name} --cfg-options {setting}'
        words += f' train_cfg.max_epochs={epochs} train_cfg.val_interval={epochs} default_hooks.logger.interval=1'
        words += ' train_dataloader.dataset.data_root={out}/shapes/ val_dataloader.dataset.data_root={out}/shapes/'
        words += ' val_evaluator.ann_file={out}/shapes/annotations/val.json'
        words += ' optim_wrapper.type=' + ('OptimWrapper' if rehearse else 'AmpOptimWrapper')
        commands.append(words)
    return Part('training', 'A short training on rendered shapes', 9, tuple(map(_words, commands)))


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
    """Markdown of what a part has written."""
    sys.path[:0] = [str(ROOT / 'tools/analysis_tools')]
    import update_tables

    if part.name == 'tests' and (out / 'tests.log').exists():
        return ['    ' + line for line in (out / 'tests.log').read_text().splitlines()[-1:]]
    if part.name == 'training':
        return _training_table(out)
    files = [out / f'{part.name}.json']
    if part.name == 'memory':
        files = [out / 'memory_counted.json', *files]
    found = [json.loads(path.read_text()) for path in files if path.exists()]
    return [
        _cap_table(results) if 'cap' in results.get('case', {}) else update_tables.table(results) for results in found
    ]


def _cap_table(results):
    from sbp_mmdet.reporting import Column, format_bytes, markdown_table

    columns = [Column('variant', lambda row: row['setting'])]
    columns.append(Column('', lambda row: 'fits' if row['fits'] else 'out of memory'))
    columns.append(Column('peak', lambda row: format_bytes(row['peak']) if row['fits'] else None))
    columns.append(Column('step, ms', lambda row: f'{row["step_s"] * 1e3:.0f}' if row.get('step_s') else None))
    return markdown_table(columns, results['rows'])


def _training_table(out):
    from sbp_mmdet.reporting import Column, markdown_table

    rows = []
    for name in ('plain', 'sbp'):
        logs = sorted((out / f'training_{name}').glob('*/vis_data/scalars.json'))
        entries = [json.loads(line) for line in logs[-1].read_text().splitlines()] if logs else []
        steps = [entry for entry in entries if 'loss' in entry]
        scores = [entry for entry in entries if 'coco/bbox_mAP' in entry]
        if steps:
            times = sorted(entry['time'] for entry in steps)
            rows.append(dict(name=name, time=times[len(times) // 2], loss=steps[-1]['loss']))
            rows[-1].update(memory=steps[-1].get('memory'), ap=scores[-1]['coco/bbox_mAP'] if scores else None)
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
    args.out.mkdir(parents=True, exist_ok=True)
    file, end = args.out / 'states.json', time.monotonic() + 60 * args.minutes
    states = json.loads(file.read_text()) if file.exists() else {}
    if states.setdefault('rehearsal', args.rehearse) != args.rehearse:
        parser.error(f'{args.out} holds a {"rehearsal" if states["rehearsal"] else "report"}; give another --out')
    for part in parts:
        wanted = part.name in (args.parts or names) and states.get(part.name, {}).get('state') != 'done'
        left = end - time.monotonic()
        if not wanted or left < 20:
            continue
        print(f'[gpu_report] {part.name}', flush=True)
        states[part.name] = run_part(part, args.out, args.rehearse, min(60 * part.minutes, left))
        print(f'[gpu_report] {part.name}: {states[part.name]["state"]}', flush=True)
        file.write_text(json.dumps(states, indent=1) + '\n')
        write_page(parts, states, args.out)
    page = write_page(parts, states, args.out)
    missing = [name for name in names if states.get(name, {}).get('state') not in ('done', 'needs a GPU')]
    print(f'[gpu_report] {page}' + (f'; run it again for {", ".join(missing)}' if missing else ''))


if __name__ == '__main__':
    main()
