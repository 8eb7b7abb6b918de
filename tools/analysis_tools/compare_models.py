"""How alike are detectors: their weights, and what they find on the images of the config's test set.

    python tools/analysis_tools/compare_models.py CONFIG plain/epoch_12.pth sbp/epoch_12.pth
    python tools/analysis_tools/compare_models.py CONFIG plain.pth sbp.pth plain_other_seed.pth --start start.pth

The first checkpoint is compared with each of the others. Training with and without SBP gives the same names and shapes,
so either may come from either. To judge a figure, compare with a second plain training, with another seed: give it as
one more checkpoint. With --start, also the cosine of what training added to the common start.

Weights: cosine by layer, by part, and of all together. Detections: objects at or above --score-thr are paired one to
one within an image where classes are equal and the IoU is 0.5 or more; the agreement is the mean of the share of A's
objects that have a partner in B and the share of B's that have one in A. Where the test set is annotated, each model's
agreement with the annotations is counted in the same way.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import DictAction
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from mmengine.runner import CheckpointLoader, Runner, load_checkpoint
from mmengine.utils import ProgressBar

from sbp_mmdet.analysis.device import check_device
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import add_outputs, write_outputs
from sbp_mmdet.study.similarity import agreement, annotations, cosines, detections, picture, relabel, table, updates

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoints import check_checkpoint  # noqa: E402
from preflight import check_config  # noqa: E402

__all__ = ['compare', 'load_model']

IOU = 0.5


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('a', metavar='CKPT_A', help='checkpoint')
    parser.add_argument('b', metavar='CKPT_B', nargs='+', help='checkpoints, each compared with the first')
    parser.add_argument('--config-b', help='config of the other checkpoints, if it is not that of the first')
    parser.add_argument('--start', help='checkpoint that all began from: compare what training added to it as well')
    parser.add_argument('--score-thr', type=float, default=0.5, help='lowest score that counts as found (default 0.5)')
    parser.add_argument('--num', type=int, help='images, the first of the test set (default: all)')
    parser.add_argument('--weights-only', action='store_true', help='compare weights; needs no images')
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the configs')
    add_outputs(parser)
    return parser, parser.parse_args()


def load_model(config, path):
    """A detector with the weights of a checkpoint.

    Args:
        config (Config): Its config.
        path (str): The checkpoint.

    Returns:
        tuple: The detector in eval mode, and the names of its classes, None if the checkpoint does not say.
    """
    init_default_scope(config.get('default_scope', 'mmdet'))
    model = revert_sync_batchnorm(MODELS.build(config.model)).eval()
    meta = load_checkpoint(model, path, map_location='cpu').get('meta') or {}
    return model, (meta.get('dataset_meta') or {}).get('classes') or meta.get('CLASSES')


def find(config, model, threshold, num, device):
    """What a model finds in the test set of its config.

    Returns:
        tuple[dict, Dataset]: As :func:`detections` returns it, and the data set.
    """
    loader = Runner.build_dataloader(config.get('test_dataloader') or config.val_dataloader, seed=0)
    batches = len(loader) if num is None else min(len(loader), -(-num // loader.batch_size))
    bar = ProgressBar(min(len(loader.dataset), batches * loader.batch_size))
    found = detections(model.to(device), islice(loader, batches), threshold, bar.update)
    print()
    return dict(islice(found.items(), num)), loader.dataset


def compare(config, a, others, config_b=None, start=None, threshold=0.5, num=None, weights_only=False, device='cpu'):
    """Compares a detector with others.

    Args:
        config (Config): Of the first, and of the others if ``config_b`` is None.
        a (str): Checkpoint of the first.
        others (list[str]): Checkpoints of the others.
        config_b (Config | None): Of the others. Default: None.
        start (str | None): Checkpoint that all began from. Default: None.
        threshold (float): Lowest score of a detection. Default: 0.5.
        num (int | None): Number of images. Default: None, all.
        weights_only (bool): No detections. Default: False.
        device (str): Where the models run. Default: 'cpu'.

    Returns:
        dict: ``pairs``, one for each of the others: ``name``, ``weights`` and ``updates`` (of :func:`cosines`) and
        ``detections`` (of :func:`agreement`), None where it was not compared; ``annotations``, the agreement of each
        model with them, by name, empty if there are none.

    Raises:
        ValueError: For checkpoints of another model, test sets with other images, and no common class.
    """
    checks = [('CKPT_A', a, config), *(('CKPT_B', path, config_b or config) for path in others)]
    for key, path, own in checks:
        check_checkpoint(path, key, own, all_weights=True)
    origin = None
    if start:
        check_checkpoint(start, '--start', config)
        content = CheckpointLoader.load_checkpoint(start, map_location='cpu')
        origin = {name.removeprefix('module.'): value for name, value in content.get('state_dict', content).items()}
    pairs, agreed, first = [], {}, None
    for (_, path, own), label in zip(checks, labels([a, *others]), strict=True):
        model, classes = load_model(own, path)
        weights = dict(model.named_parameters())
        found = truth = None
        if not weights_only:
            print(f'{label}:')
            found, dataset = find(own, model, threshold, num, device)
            classes = list(classes or dataset.metainfo['classes'])
            truth = annotations(dataset)
        if first is None:
            first = label, {name: value.cpu() for name, value in weights.items()}, found, classes
        else:
            pair = dict(name=f'{first[0]} - {label}', weights=None, updates=None, detections=None)
            try:
                pair['weights'] = cosines(first[1], weights)
            except ValueError as error:
                if config_b is None or weights_only:
                    raise
                print(f'weights not compared: {error}')
            if origin and pair['weights']:
                pair['updates'] = cosines(updates(first[1], origin), updates(weights, origin))
            if found is not None:
                pair['detections'] = _agreement(found=(first[2], found), classes=(first[3], classes))
            pairs.append(pair)
        if truth:
            truth = {image: truth[image] for image in found}
            names = list(dataset.metainfo['classes'])
            agreed[f'{label} - annotations'] = _agreement(found=(found, truth), classes=(classes, names))
    return dict(pairs=pairs, annotations=agreed)


def _agreement(found, classes):
    common = [name for name in classes[0] if name in classes[1]]
    if not common:
        some = [', '.join(names[:3]) + (', ...' if len(names) > 3 else '') for names in classes]
        raise ValueError(f'the two have no class in common: {some[0]} and {some[1]}')
    return agreement(*(relabel(one, names, common) for one, names in zip(found, classes, strict=True)), common, IOU)


def labels(paths):
    """Short names: of each path as many of the last components as it takes to tell them apart, 'sbp/epoch_6'."""
    paths = [Path(path).with_suffix('').parts for path in paths]
    names = ['/'.join(parts) for parts in paths]
    for depth in range(1, 5):
        short = ['/'.join(parts[-depth:]) for parts in paths]
        if len(set(short)) == len(set(names)):
            return short
    return names


def main():
    parser, args = parse_args()
    try:
        if not 0 <= args.score_thr < 1:
            raise ValueError(f'--score-thr {args.score_thr} must be in [0, 1)')
        if args.num is not None and args.num < 1:
            raise ValueError(f'--num {args.num} must be 1 or more')
        if args.plot and args.plot.suffix != '.png':
            raise ValueError(f'--plot {args.plot} must end in .png')
        configs = [load_config(path, args.cfg_options) for path in (args.config, args.config_b) if path]
        for config in configs:
            check_config(config, () if args.weights_only else ('test',))
            if not (args.weights_only or config.get('test_dataloader') or config.get('val_dataloader')):
                raise ValueError(f'{config.filename} has no test_dataloader; --weights-only compares without images')
        results = compare(
            configs[0],
            args.a,
            args.b,
            configs[1] if args.config_b else None,
            args.start,
            args.score_thr,
            args.num,
            args.weights_only,
            args.device,
        )
    except ValueError as error:
        parser.error(str(error))
    print(f'\n{table(results)}')
    case = dict(config=Path(args.config).stem, start=args.start)
    if not args.weights_only:
        case.update(score_thr=args.score_thr, iou=IOU, images=results['pairs'][0]['detections']['images'])
    results = dict(machine=describe_machine(args.device), case=case, **results)
    write_outputs(args, results, lambda path: picture(results, path), indent=1)


if __name__ == '__main__':
    main()
