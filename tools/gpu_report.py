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
PRESETS = 'none with_cp exact int8 nearest paper'
TESTS = ['test_ops*.py', 'test_training.py']
BENCHMARK = 'research/benchmark.py {config} --device {device} --presets {presets} --json {out}/{name}.json'
TINY = ' --size 64x64 --batch 1 --boxes 2 --rounds 1'


@dataclasses.dataclass(frozen=True)
class Part:
    """Something to measure: the name of its files, the title of its section, its time limit, its commands for python
    ('{out}' is the folder of the report), and whether it cannot be rehearsed without a GPU."""

    name: str
    title: str
    minutes: float
    commands: tuple[str, ...]
    needs_gpu: bool = False


def parts_of_report(rehearse: bool) -> list[Part]:
    """What is measured, in the order of what matters most."""

    def measured(name, title, config, options='', presets=PRESETS, minutes=8, **more):
        config, device = (SHAPES, 'cpu') if rehearse else (config, 'cuda')
        presets = 'none exact' if rehearse else presets
        command = BENCHMARK.format(name=name, config=config, device=device, presets=presets, out='{out}')
        return Part(name, title, minutes, (command + options + TINY * rehearse,), **more)

    files = sorted(str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / 'tests').glob(name))
    words = '-m pytest -o addopts= -q -rfE --tb=short -p no:cacheprovider' + ' --collect-only' * rehearse
    amps = ['fp16'] if rehearse else ['fp16', 'bf16']
    rivals = ' --rivals ' + ('selective' if rehearse else '')
    layouts = [] if rehearse else [(amp, ' --channels-last') for amp in amps]
    return [
        Part('tests', 'Tests on the device', 8, (' '.join([words, *files]),)),
        measured('backbone_b_fp16', 'Backbone of B, fp16', B, ' --batch 2' + ' --amp fp16' * (not rehearse)),
        measured('steps_t', 'Whole steps of T', T, ' --step --batch 2 --boxes 60', PRESETS + ' none'),
        *(
            measured(
                f'cap_b_{cap}',
                f'B while torch may have {cap} GiB',
                B,
                f' --step --batch 2 --cap {cap}',
                'none with_cp exact int8 paper',
                5,
                needs_gpu=True,
            )  # fmt: skip
            for cap in (8, 6)
        ),
        measured('steps_b', 'Whole steps of B', B, ' --step --batch 2 --boxes 60', PRESETS + ' none'),
        measured('backbone_t', 'Backbone of T, fp16', T, ' --batch 2'),
        measured('block_t', 'A block of T, stage 1', T, ' --batch 2 --rounds 30 --module backbone.stages.0.0'),
        measured('rivals_t', 'What others offer: backbone of T', T, ' --batch 2' + rivals, 'none with_cp exact', 9),
        _training(rehearse),
        *(
            measured(
                f'backbone_b_{amp}{"_nhwc" * bool(layout)}',
                f'Backbone of B, {amp}{layout}',
                B,
                f' --batch 2 --amp {amp}{layout}',
            )  # fmt: skip
            for amp, layout in [('bf16', ''), *layouts]
        ),
    ]


def _training(rehearse):
    images, size, epochs = (4, 64, 1) if rehearse else (1000, 128, 6)
    commands = [
        f'tools/make_synthetic_coco.py --out {{out}}/shapes --train {images} --val {images} --size {size} --seed 0'
    ]
    for preset in ('none', 'exact', 'paper'):
        words = f'tools/train.py {SHAPES} --work-dir {{out}}/training_{preset} --cfg-options'
        words += f' model.backbone.sbp_cfg.preset={preset} train_cfg.max_epochs={epochs}'
        words += f' train_cfg.val_interval={epochs} default_hooks.logger.interval=1'
        words += ' train_dataloader.dataset.data_root={out}/shapes/ val_dataloader.dataset.data_root={out}/shapes/'
        words += ' val_evaluator.ann_file={out}/shapes/annotations/instances_val.json'
        words += ' train_dataloader.batch_size=2' if rehearse else ' train_dataloader.num_workers=8'
        commands.append(words + ' optim_wrapper.type=' + ('OptimWrapper' if rehearse else 'AmpOptimWrapper'))
    return Part('training', 'A short training on rendered shapes', 9, tuple(commands))


def run_part(part: Part, out: Path, rehearse: bool, seconds: float) -> dict:
    """Runs a part, all that it prints into a file.

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
        for text in part.commands:
            command = [sys.executable, *(word.replace('{out}', str(out)) for word in text.split())]
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
    """The page, from what is there so far."""
    rehearsal = states.get('rehearsal')
    lines = ['# Rehearsal on a CPU: no figure here counts' if rehearsal else '# Measured on a GPU', '']
    for part in parts:
        state = states.get(part.name)
        told = state and f'State: {state["state"]}, after {state["seconds"]} s. Output: {part.name}.log.'
        lines += [f'## {part.title}', '', told or 'Not measured yet.', '']
        try:
            lines += [_table(part, out), '']
        except Exception as error:  # what cannot be read takes no other part's table with it
            lines += [f'Its results cannot be read: {type(error).__name__}: {error}', '']
    page = out / 'report.md'
    page.write_text('\n'.join(lines))
    return page


def _table(part, out):
    sys.path[:0] = [str(ROOT / 'research')]
    if part.name == 'tests':
        told = re.compile(r'(FAILED|ERROR) |.*\d+ (passed|failed|skipped|tests collected)')
        log = out / 'tests.log'
        return '\n'.join('    ' + line for line in log.read_text().splitlines() if told.match(line)) * log.exists()
    if part.name == 'training':
        return _training_table(out)
    from tables import benchmark_table

    file = out / f'{part.name}.json'
    if not file.exists():
        return ''
    found = json.loads(file.read_text())
    machine = ', '.join(str(found['machine'][key]) for key in ('date', 'device', 'torch', 'commit', 'command'))
    return f'{benchmark_table(found["rows"], markdown=True)}\n\n*{machine}*'


def _training_table(out):
    from trainings import read_log

    lines = ['| preset | box AP | last loss | step, s | memory, MiB |', '|---|---|---|---|---|']
    for preset in ('none', 'exact', 'paper'):
        found = read_log(out / f'training_{preset}')
        if found and found['loss']:
            cells = found['ap'].get('box AP'), found['loss'][-1][1], found['step_s'], found['memory']
            texts = ['' if cell is None else f'{cell:.4g}' for cell in cells]
            lines.append(f'| {preset} | {" | ".join(texts)} |')
    return '\n'.join(lines)


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
    if not args.rehearse:
        import torch  # slow, and a rehearsal does without

        if not torch.cuda.is_available():
            parser.error('torch sees no GPU; --rehearse runs everything in tiny sizes on a CPU')
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
        new = file.with_suffix('.new')  # whole or not at all: it is read by the next call
        new.write_text(json.dumps(states, indent=1))
        new.replace(file)
        write_page(parts, states, args.out)
    found = {name: states.get(name, {}).get('state') for name in names}
    missing = [name for name, state in found.items() if state in (None, 'too long')]
    failed = [name for name, state in found.items() if state == 'failed']
    page = write_page(parts, states, args.out)
    print(f'[gpu_report] {page}' + (f'; run it again for {", ".join(missing)}' if missing else ''))
    if failed:
        print(f'[gpu_report] failed: {", ".join(failed)}; their logs say why, and --parts tries them again')


if __name__ == '__main__':
    main()
