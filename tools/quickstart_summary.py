"""What the quick start reached: AP, bytes stored for the backward pass, and where things lie.

python tools/analysis_tools/quickstart_summary.py CONFIG WORK_DIR
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner

from sbp_mmdet.analysis import saved_bytes

__all__ = ['backbone_bytes', 'latest']


def latest(folder, pattern):
    """The file that was written last.

    Args:
        folder (Path): where to look.
        pattern (str): glob below `folder`.

    Returns:
        Path: the file.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f'{folder}/{pattern}: no such file; run tools/quickstart.sh to the end')
    return found[-1]


def backbone_bytes(config, batch):
    """Bytes that the backbone stores for the backward pass of one training batch.

    Args:
        config (Config): an mmdet config.
        batch (dict): of its training data loader.

    Returns:
        tuple[int, torch.Size]: bytes, without parameters, buffers and the images, and the shape of the images.
    """
    model = MODELS.build(config.model).train()
    images = model.data_preprocessor(batch, training=True)['inputs']
    known = [*model.parameters(), *model.buffers(), images]
    return saved_bytes(lambda: model.backbone(images), exclude=known), images.shape


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('work_dir', type=Path)
    args = parser.parse_args()
    try:
        checkpoint = (args.work_dir / 'last_checkpoint').read_text().strip()
        log = latest(args.work_dir, '2*/*.log')
        scores = json.loads(latest(args.work_dir / 'test', '2*/*.json').read_text())
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')

    config = Config.fromfile(args.config)
    init_default_scope('mmdet')
    loader = copy.deepcopy(config.train_dataloader)
    loader.update(num_workers=0, persistent_workers=False)
    batch = next(iter(Runner.build_dataloader(loader, seed=0)))
    plain = copy.deepcopy(config)
    plain.model.backbone.sbp_cfg = None
    torch.manual_seed(0)
    with_sbp, shape = backbone_bytes(config, copy.deepcopy(batch))
    without, _ = backbone_bytes(plain, batch)

    print(f"""
box AP              {scores['coco/bbox_mAP']:.3f}   (AP50 {scores['coco/bbox_mAP_50']:.3f}), held-out images
mask AP             {scores['coco/segm_mAP']:.3f}   (AP50 {scores['coco/segm_mAP_50']:.3f})
stored for backward by the backbone, one batch of {' x '.join(map(str, shape))}:
  without SBP       {without / 1e6:.1f} MB
  with SBP          {with_sbp / 1e6:.1f} MB   ({with_sbp / without:.0%})
log                 {log}
checkpoint          {checkpoint}
picture             {args.work_dir / 'predictions.png'}""")


if __name__ == '__main__':
    main()
