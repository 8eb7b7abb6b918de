"""What SBP costs in gradient quality on your model: its gradients next to the exact ones, same weights, same batches.

    python tools/analysis_tools/gradient_study.py CONFIG --checkpoint work_dirs/x/epoch_12.pth --plot study.png
    python tools/analysis_tools/gradient_study.py CONFIG --group orders samplers --batches 20 --json study.json
    python tools/analysis_tools/gradient_study.py CONFIG --group none --setting 'mine: keep_ratio=0.4 sampler=random'

CONFIG is any mmdet config whose backbone SBP applies to; batches come from its train dataloader.
All settings see the same proposals and sampled RoIs. Everything in fp32.
Cosine hides the length of a gradient: the relative error and the ratio of the norms show it. A layer's numbers are in
the JSON file.
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
from sbp_mmdet.study.gradients import HEAD_PIECES, study
from sbp_mmdet.study.kept import check_kept
from sbp_mmdet.study.measures import SUMS
from sbp_mmdet.study.report import study_picture, study_table
from sbp_mmdet.study.settings import GROUPS, group, parse_setting
from sbp_mmdet.study.subject import build_model, train_batches


def parse_args():
    groups = '\n'.join(f'  {name}: {text}' for name, text in GROUPS.items())
    pieces = '\n'.join(f'  {name}: {text}' for name, text in HEAD_PIECES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f'groups of settings, on top of the sbp_cfg of the config:\n{groups}\n\n'
        f"pieces outside of the backbone, 'label: pieces=sbp-neck,cp-rpn' or with keys of sbp_cfg beside them; alone\n"
        f'they leave the backbone without SBP:\n{pieces}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--checkpoint', help="weights (default: the config's load_from, or its start, not downloaded)")
    parser.add_argument(
        '--backbone',
        help='weights of the backbone alone, pretrained, under any name that is known (docs/pretrained.md)',
    )
    parser.add_argument('--batches', type=int, default=8, help='of the train dataloader (default: 8)')
    parser.add_argument('--seed', type=int, default=0, help='of batches, masks and all that is drawn (default: 0)')
    parser.add_argument(
        '--group', '--settings', nargs='+', default=['ratios'], help=f'groups of {[*GROUPS]}, or none (default: ratios)'
    )
    parser.add_argument(
        '--setting', action='append', default=[], help="one more: 'label: keep_ratio=0.25 sampler=random'; may repeat"
    )
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    add_outputs(parser)
    return parser, parser.parse_args()


def collect(config, names, texts):
    """Settings of groups, then those given as text.

    Args:
        config (Config): Config of a detector whose backbone SBP applies to.
        names (list[str]): Groups, or 'none'.
        texts (list[str]): Of :func:`parse_setting`.

    Returns:
        dict[str, dict]: Label to setting, see :func:`sbp_mmdet.study.gradients.study`.

    Raises:
        ValueError: For an unknown group, a text that cannot be read, a label that stands twice, or nothing.
    """
    settings = {}
    for name in names:
        settings.update({} if name == 'none' else group(name, config))
    for label, setting in map(parse_setting, texts):
        if label in settings:
            raise ValueError(f'setting {label!r} stands twice; give each a label of its own')
        settings[label] = setting
    if not settings:
        raise ValueError(f"no settings: give --group, of {[*GROUPS]}, or --setting 'label: keep_ratio=0.25'")
    return settings


def main():
    parser, args = parse_args()
    try:
        if args.batches < 1:
            raise ValueError(f'--batches {args.batches} must be 1 or more')
        config = load_config(args.config, args.cfg_options)
        settings = collect(config, args.group, args.setting)
        model = build_model(config, args.checkpoint, args.device, args.seed, args.backbone)
        batches = list(train_batches(config, args.batches, args.seed))
        bar = ProgressBar(len(batches) * (1 + len(settings)))
        kept = {}

        # Pieces may change the gradient that comes to the last SBP layer, so there is nothing to compare.
        backbones = {label: setting for label, setting in settings.items() if 'pieces' not in setting}

        def check(exact):
            if not kept:
                kept.update({label: check_kept(config, cfg, model.backbone, exact) for label, cfg in backbones.items()})

        results = study(config, settings, batches, args.seed, bar.update, model=model, on_exact=check)
    except ValueError as error:
        parser.error(str(error))
    sizes = sorted({'x'.join(map(str, image.shape[-2:])) for batch in batches for image in batch['inputs']})
    for row in results.values():  # values batch by batch for the sums only: layers are many
        for part in set(row) - set(SUMS):
            for measure in row[part].values():
                del measure['values']
    found = compact(dict(
        machine=describe_machine(args.device),
        case=dict(
            config=Path(args.config).stem, checkpoint=args.checkpoint and Path(args.checkpoint).name,
            backbone=args.backbone and Path(args.backbone).name, seed=args.seed,
            batches=len(batches), images=len(batches[0]['inputs']), sizes=sizes,
        ),
        settings=settings,
        kept={label: check and check._asdict() for label, check in kept.items()},
        results=results,
    ), 4)  # fmt: skip
    case = found['case']
    title = f'{case["config"]}: {case["batches"]} batches of {case["images"]} images, gradients against the exact ones'
    print(f'\n\n{title}\n\n{study_table(found)}\n')
    print('mean ± standard deviation over batches')
    if len(backbones) == len(settings):
        print('error of kept positions relative to the largest gradient there')
    write_outputs(args, found, lambda path: study_picture(found, title, path))


if __name__ == '__main__':
    main()
