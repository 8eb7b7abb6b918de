"""Losses of the first steps of a training under presets, from the same weights, images and random numbers.

    python research/loss_curves.py configs/nuclei/dino_r18_nuclei.py --steps 500 --json FILE --plot FILE

The plain detector is trained a second time, from weights that differ in their last bit: so far trainings go apart by
chance. --checkpoint keeps the weights that it reached the first time.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from tables import COLOURS, panels, save_picture

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.tables import describe_machine, output_file, write_json
from sbp_mmdet.plan.variants import load_config, plain

CHANCE = 'last bit changed'


class _Losses(Hook):
    """Keeps the loss of each step."""

    def __init__(self):
        self.found = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.found.append(outputs['loss'].item())


def train(name: str, preset: str, steps: int) -> tuple[list[float], torch.nn.Module]:
    """The losses of a training's steps, and the detector; ``preset`` is a key of ``PRESETS``, or ``CHANCE``."""
    config, losses = plain(load_config(name)), _Losses()
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
    return losses.found, runner.model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--presets', nargs='+', default=['exact', 'int8'])
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--checkpoint', type=output_file, help='write the weights of the plain training here')
    parser.add_argument('--json', type=output_file, required=True, help='write the losses here')
    parser.add_argument('--plot', type=output_file, required=True, help='write a picture (PNG) here')
    args = parser.parse_args()
    figure, ((left, right),) = panels(1, 2, figsize=(11, 4))
    curves, soon = {}, {}
    for preset, colour in zip(('none', *args.presets, CHANCE), COLOURS, strict=False):
        curves[preset], model = train(args.config, preset, args.steps)
        if preset == 'none' and args.checkpoint:
            torch.save(dict(state_dict=model.state_dict()), args.checkpoint)
        apart = [abs(a - b) / abs(b) for a, b in zip(curves[preset], curves['none'], strict=True)]
        soon[preset] = max(apart[:30])
        print(preset, f'{curves[preset][-1]:.6g}, first 30 steps {soon[preset]:.1e}', flush=True)
        left.plot(curves[preset], label=preset, color=colour, linewidth=1)
        if preset != 'none':
            right.semilogy([max(d, 1e-9) for d in apart], color=colour, linewidth=1)
    left.set(xlabel='step', ylabel='loss')
    right.set(xlabel='step', ylabel='distance from the plain loss, relative')
    save_picture(figure, args.plot, legend=left.get_legend_handles_labels()[0])
    case = dict(config=Path(args.config).stem, steps=args.steps)
    write_json(args.json, dict(machine=describe_machine(), case=case, losses=curves, first_30_steps=soon), indent=None)


if __name__ == '__main__':
    main()
