"""Losses of the first steps of a training under presets, from the same weights, images and random numbers.

    python research/loss_curves.py configs/nuclei/dino_r18_nuclei.py --steps 300 --json FILE --plot FILE

The plain detector is trained a second time, from weights that differ in their last bit: so far trainings go apart by
chance. --checkpoint keeps the weights that it reached the first time.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from tables import COLOURS, panels, save_picture

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.tables import describe_machine, output_file, write_json
from sbp_mmdet.plan.variants import load_config, plain

CHANCE = 'last bit changed'
SOON = 30  # steps, before what is rounded otherwise has grown


class _Losses(Hook):
    """Keeps the loss of each step."""

    def __init__(self):
        self.found = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.found.append(outputs['loss'].item())


def train(config: Config, preset: str, steps: int, checkpoint: Path | None = None) -> list[float]:
    """The losses of a training's steps; ``preset`` is a key of ``PRESETS``, or ``CHANCE``."""
    config, losses = copy.deepcopy(config), _Losses()
    config.update(work_dir=tempfile.mkdtemp(), randomness=dict(seed=0), log_level='ERROR', visualizer=None)
    config.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_interval=steps + 1)
    for phase in ('val', 'test'):
        config.update({f'{phase}_{part}': None for part in ('cfg', 'dataloader', 'evaluator')})
    config.default_hooks = dict(checkpoint=None, logger=None)
    runner = Runner.from_cfg(config)
    runner._init_model_weights()
    runner._init_model_weights = lambda: None
    if preset == CHANCE:
        for p in runner.model.parameters():
            p.data.mul_(1 + torch.finfo(p.dtype).eps)
    else:
        apply_lean(runner.model, preset)
    runner.register_hook(losses)
    torch.manual_seed(0)
    runner.train()
    if checkpoint:
        torch.save(dict(state_dict=runner.model.state_dict()), checkpoint)
    return losses.found


def distances(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """From the losses of the first one, relative."""
    base, *_ = curves.values()
    return {name: [abs(a - b) / abs(b) for a, b in zip(losses, base, strict=True)] for name, losses in curves.items()}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses, and their distance from those of the plain training."""
    figure, ((left, right),) = panels(1, 2, figsize=(11, 4))
    apart = distances(curves)
    for (label, losses), colour in zip(curves.items(), COLOURS, strict=False):
        left.plot(losses, label=label, color=colour, linewidth=1)
        if any(apart[label]):
            right.semilogy([max(d, 1e-9) for d in apart[label]], color=colour, linewidth=1)
    left.set(xlabel='step', ylabel='loss')
    right.set(xlabel='step', ylabel='distance from the plain loss, relative')
    save_picture(figure, path, legend=left.get_legend_handles_labels()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--presets', nargs='+', default=['exact', 'int8'])
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--checkpoint', type=Path, help='write the weights of the plain training here')
    parser.add_argument('--json', type=output_file, help='write the results here')
    parser.add_argument('--plot', type=output_file, help='write a picture (PNG) here')
    args = parser.parse_args()
    config, curves = plain(load_config(args.config)), {}
    for preset in ('none', *args.presets, CHANCE):
        curves[preset] = train(config, preset, args.steps, None if curves else args.checkpoint)
        apart = distances(curves)[preset]
        print(preset, f'{curves[preset][-1]:.6g}, first {SOON} steps {max(apart[:SOON]):.1e}', flush=True)
    if args.json:
        soon = {name: max(apart[:SOON]) for name, apart in distances(curves).items()}
        case = dict(config=Path(args.config).stem, steps=args.steps)
        found = dict(machine=describe_machine(), case=case, losses=curves, first_30_steps=soon)
        write_json(args.json, found, indent=None)
    if args.plot:
        draw(curves, args.plot)


if __name__ == '__main__':
    main()
