"""Summary of the quick start: losses and memory of both trainings, AP, and the paths of the results.

python tools/quickstart_summary.py CONFIG WORK_DIR    WORK_DIR has the trainings 'plain' and 'lean', and 'test'
"""

import json
import sys
from pathlib import Path

from mmengine.config import Config

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.variants import load_config, plain, with_variant

STEPS = 30  # of plain training
SHOWN = (1, 5, 10, 15, 20, 25, 30)
BOXES = 40  # nuclei in an image, about


def latest(folder: Path, pattern: str) -> Path:
    """Return the newest file."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f'{folder}/{pattern}: no such file; run tools/quickstart.sh to the end')
    return found[-1]


def read(folder: Path) -> tuple[dict[int, float], dict]:
    """Return losses by step, and what else the visualizer wrote."""
    rows = [json.loads(line) for line in latest(folder, '2*/vis_data/scalars.json').read_text().splitlines()]
    losses = {row['step']: row['loss'] for row in rows if 'loss' in row}
    return losses, {key: value for row in rows if 'loss' not in row for key, value in row.items()}


def peaks(config: Config) -> list[float]:
    """Return the MB of a training step, plain and by the config's LeanHook, counted by CUDA's rules."""
    preset = next(hook.preset for hook in config.custom_hooks if hook.type == 'LeanHook')
    base, size = plain(config), dict(batch=config.train_dataloader.batch_size, height=256, width=256, boxes=BOXES)
    return [measure_detector(with_variant(base, variant), **size)['peak'] / 1e6 for variant in ('none', preset)]


def draw(losses: list[dict[int, float]], path: Path) -> None:
    """Draw both curves in one picture."""
    import matplotlib.pyplot as plt

    for curve, style, label in zip(losses, ('k-', 'r--'), ('plain', 'LeanHook'), strict=True):
        steps = [step for step in sorted(curve) if step <= STEPS]
        plt.plot(steps, [curve[step] for step in steps], style, label=label)
    plt.legend(), plt.xlabel('step'), plt.ylabel('loss')
    plt.savefig(path)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    config, work_dir = load_config(sys.argv[1]), Path(sys.argv[2])
    try:
        (before, _), (after, said) = read(work_dir / 'plain'), read(work_dir / 'lean')
        checkpoint = (work_dir / 'lean/last_checkpoint').read_text().strip()
        log = latest(work_dir / 'lean', '2*/*.log')
        scores = json.loads(latest(work_dir / 'test', '2*/*.json').read_text())
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')
    draw([before, after], work_dir / 'losses.png')
    print(f'{"":<44}{"plain":>10}{"LeanHook":>10}')
    for step in SHOWN:
        print(f'{f"loss, step {step}":<44}{before[step]:>10.4f}{after[step]:>10.4f}')
    stored = [said[f'lean/stored_mb_{key}'] for key in ('before', 'now')]
    for what, (first, second) in {
        'stored for the backward pass, MB': stored,
        'peak of a step, MB': peaks(config),
    }.items():
        print(f'{what:<44}{first:>10.1f}{second:>10.1f}')
    print(f"""
box AP              {scores['coco/bbox_mAP']:.3f}   (AP50 {scores['coco/bbox_mAP_50']:.3f}), images that were held out
mask AP             {scores['coco/segm_mAP']:.3f}   (AP50 {scores['coco/segm_mAP_50']:.3f})
loss curves         {work_dir / 'losses.png'}
predictions         {latest(work_dir / 'test', '2*/predictions')}
log                 {log}
checkpoint          {checkpoint}""")


if __name__ == '__main__':
    main()
