"""Do gradients vanish under SBP? Norms of the gradients over a short training, with and without it.

    python tools/analysis_tools/gradient_norms.py CONFIG --steps 100 --plot norms.png --json norms.json
    python tools/analysis_tools/gradient_norms.py CONFIG --checkpoint FILE --setting 'a: keep_ratio=0.25'

CONFIG is any mmdet config whose backbone SBP applies to; batches come from its train dataloader, its optimizer and
gradient clipping are used, its learning rate schedule is not (--lr, --warmup). Everything in fp32. Without --setting:
no SBP, keep ratio 0.5, and two extreme cases that no sbp_cfg can make: SBP layers that keep, in turn, the positions
that the next one drops; and blocks whose two pointwise layers keep disjoint positions, where the paper predicts that
gradients vanish.
"""

import argparse
from pathlib import Path

import torch
from mmengine.config import DictAction
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.device import check_device
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, compact, write_outputs
from sbp_mmdet.study.gradient_norms import DISJOINT, norms_over_training
from sbp_mmdet.study.report import norms_picture, norms_table
from sbp_mmdet.study.settings import parse_setting
from sbp_mmdet.study.subject import train_batches


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--checkpoint', help="weights (default: the config's load_from, or its start, not downloaded)")
    parser.add_argument('--backbone', help='weights of the backbone alone, pretrained, under any name that is known')
    parser.add_argument('--steps', type=int, default=50, help='training steps of each setting (default: 50)')
    parser.add_argument('--batches', type=int, default=None, help='different batches (default: as many as steps)')
    parser.add_argument('--seed', type=int, default=0, help='of batches, masks and all that is drawn (default: 0)')
    parser.add_argument(
        '--setting', action='append', default=[], help="instead of 0.5: 'label: keep_ratio=0.25'; may repeat"
    )
    parser.add_argument('--no-disjoint', action='store_true', help='without the extreme cases; some families have none')
    parser.add_argument('--lr', type=float, help="learning rate (default: the config's)")
    parser.add_argument('--warmup', type=int, default=10, help='steps over which it grows linearly (default: 10)')
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    add_outputs(parser)
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        for name in ('steps', 'batches'):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(f'--{name} {getattr(args, name)} must be 1 or more')
        config = load_config(args.config, args.cfg_options)
        settings = dict(map(parse_setting, args.setting)) or {'keep ratio 0.5': dict(keep_ratio=0.5)}
        variants = {'without SBP': (None, None), **{label: (cfg, None) for label, cfg in settings.items()}}
        if not args.no_disjoint:
            variants.update({label: (dict(keep_ratio=0.5), change) for label, change in DISJOINT.items()})
        batches = list(train_batches(config, args.batches or args.steps, args.seed))
        bar = ProgressBar(args.steps * len(variants))
        results = norms_over_training(
            config, variants, batches, args.steps, args.seed, bar.update,
            checkpoint=args.checkpoint, backbone=args.backbone, device=args.device, lr=args.lr, warmup=args.warmup,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    found = compact(dict(
        machine=describe_machine(args.device),
        case=dict(
            config=Path(args.config).stem, checkpoint=args.checkpoint and Path(args.checkpoint).name,
            backbone=args.backbone and Path(args.backbone).name, seed=args.seed, steps=args.steps,
            batches=len(batches), images=len(batches[0]['inputs']),
        ),
        settings={label: cfg for label, (cfg, _) in variants.items()},
        results=results,
    ), 4)  # fmt: skip
    title = f'{found["case"]["config"]}: {args.steps} steps of {found["case"]["images"]} images'
    print(f'\n\n{title}\n\n{norms_table(found)}\n')
    print('norms of the backbone and its stages: median over the steps of the ratio to the first row')
    write_outputs(args, found, lambda path: norms_picture(found, title, path))


if __name__ == '__main__':
    main()
