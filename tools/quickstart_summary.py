"""What the quick start reached: AP, bytes stored for the backward pass, and where things lie.

python tools/quickstart_summary.py CONFIG WORK_DIR
"""

import json
import sys
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.plan.memory import saved_bytes


def latest(folder: Path, pattern: str) -> Path:
    """The file that was written last."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f'{folder}/{pattern}: no such file; run tools/quickstart.sh to the end')
    return found[-1]


def stored(config: Config, presets: tuple[str, ...]) -> dict[str, int]:
    """Bytes that the backbone stores for the backward pass of a batch of 128 x 128 pixels, by preset."""
    init_default_scope('mmdet')
    backbone = MODELS.build(dict(config.model.backbone, sbp_cfg=None)).train()
    images, found = torch.zeros(config.train_dataloader.batch_size, 3, 128, 128), {}
    for preset in presets:
        remove_lean(backbone)
        if preset != 'none':
            apply_lean(backbone, preset=preset)
        found[preset] = saved_bytes(lambda: backbone(images), [*backbone.parameters(), *backbone.buffers(), images])
    return found


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    config, work_dir = Config.fromfile(sys.argv[1]), Path(sys.argv[2])
    try:
        checkpoint = (work_dir / 'last_checkpoint').read_text().strip()
        log = latest(work_dir, '2*/*.log')
        scores = json.loads(latest(work_dir / 'test', '2*/*.json').read_text())
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')
    trained = config.model.backbone.sbp_cfg.preset
    found = stored(config, tuple(dict.fromkeys(['none', 'exact', trained])))
    print(f"""
box AP              {scores['coco/bbox_mAP']:.3f}   (AP50 {scores['coco/bbox_mAP_50']:.3f}), held-out images
mask AP             {scores['coco/segm_mAP']:.3f}   (AP50 {scores['coco/segm_mAP_50']:.3f})
stored for backward by the backbone, a batch of {config.train_dataloader.batch_size} x 3 x 128 x 128:""")
    for preset, nbytes in found.items():
        told = ', this training' if preset == trained else ''
        print(f'  {preset:<18}{nbytes / 1e6:.1f} MB   ({nbytes / found["none"]:.0%}{told})')
    print(f"""log                 {log}
checkpoint          {checkpoint}
picture             {work_dir / 'predictions.png'}""")


if __name__ == '__main__':
    main()
