"""Summary of the quick start: losses and memory of the trainings, AP, and the paths of the results.

python tools/quickstart_summary.py CONFIG WORK_DIR    WORK_DIR has the trainings plain, lean and sbp, and the test
"""

import json
import sys
from pathlib import Path

from mmengine.config import Config

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant

STEPS = 30  # that all trainings have
SHOWN = (1, 5, 10, 15, 20, 25, 30)
BOXES = 40  # nuclei in an image, about
TRAININGS = {'plain': 'plain', 'lean': 'LeanHook', 'sbp': 'SBPConvNeXt'}  # folders and their names


def latest(folder: Path, pattern: str) -> Path:
    """Return the newest file."""
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise FileNotFoundError(f'{folder}/{pattern}: no such file; run tools/quickstart.sh to the end')
    return paths[-1]


def read_losses(folder: Path) -> dict[int, float]:
    """Return the losses of a training by step, as the visualizer wrote them."""
    rows = map(json.loads, latest(folder, '2*/vis_data/scalars.json').read_text().splitlines())
    return {row['step']: row['loss'] for row in rows if 'loss' in row}


def peaks(config: Config) -> dict[str, float]:
    """Return the MB that a training step of the config holds at most, counted by CUDA's rules, by variant."""
    preset = next(hook.preset for hook in config.custom_hooks if hook.type == 'LeanHook')
    base, size = make_plain(config), dict(batch=config.train_dataloader.batch_size, height=256, width=256, boxes=BOXES)
    variants = dict(plain='none', lean=preset, sbp='sbp', with_cp='with_cp')
    return {name: measure_detector(with_variant(base, key), **size)['peak'] / 1e6 for name, key in variants.items()}


def plot_losses(losses: dict[str, dict[int, float]], path: Path) -> None:
    """Plot the losses of all trainings in one picture."""
    import matplotlib.pyplot as plt

    for (name, curve), style in zip(losses.items(), ('k-', 'r--', 'b:'), strict=True):
        steps = [step for step in sorted(curve) if step <= STEPS]
        plt.plot(steps, [curve[step] for step in steps], style, label=TRAININGS[name])
    plt.legend(), plt.xlabel('step'), plt.ylabel('loss')
    plt.savefig(path)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        config, work_dir = load_config(sys.argv[1]), Path(sys.argv[2])
    except ValueError as error:
        sys.exit(f'error: {error}')
    try:
        losses = {name: read_losses(work_dir / name) for name in TRAININGS}
        checkpoint = (work_dir / 'lean/last_checkpoint').read_text().strip()
        log = latest(work_dir / 'lean', '2*/*.log')
        scores = json.loads(latest(work_dir / 'test', '2*/*.json').read_text())
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')
    plot_losses(losses, work_dir / 'losses.png')
    held = peaks(config)
    print(f'{"":<32}' + ''.join(f'{name:>14}' for name in TRAININGS.values()))
    for step in SHOWN:
        print(f'{f"loss, step {step}":<32}' + ''.join(f'{curve[step]:>14.4f}' for curve in losses.values()))
    print(f'{"peak of a step, MB":<32}' + ''.join(f'{held[name]:>14.0f}' for name in TRAININGS))
    print(f'{"  all blocks checkpointed, MB":<32}{held["with_cp"]:>14.0f}')
    print(f"""
box AP              {scores['coco/bbox_mAP']:.3f}   (AP50 {scores['coco/bbox_mAP_50']:.3f}), images that were held out
mask AP             {scores['coco/segm_mAP']:.3f}   (AP50 {scores['coco/segm_mAP_50']:.3f})
loss curves         {work_dir / 'losses.png'}
predictions         {latest(work_dir / 'test', '2*/predictions')}
log                 {log}
checkpoint          {checkpoint}""")


if __name__ == '__main__':
    main()
