"""Losses of the first steps of a training under presets, from the same weights, images and random numbers.

    python research/loss_curves.py research/configs/dino_r18_nuclei.py --steps 300 --json FILE --plot FILE

The first preset is trained a second time, from weights that differ in their last bit: how far trainings go apart by
chance. At the end the presets' gradients of a batch are compared with the first one's, by the weights that it reached.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
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


def runner_of(config: Config, preset: str, steps: int) -> Runner:
    """A runner with initialised weights, whose model has the preset.

    Args:
        config (Config): A plain detector's.
        preset (str): A key of ``PRESETS``.
        steps (int): Of the training.
    """
    config = copy.deepcopy(config)
    config.update(work_dir=tempfile.mkdtemp(), randomness=dict(seed=0), log_level='ERROR', visualizer=None)
    config.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_interval=steps + 1)
    for phase in ('val', 'test'):
        config.update({f'{phase}_{part}': None for part in ('cfg', 'dataloader', 'evaluator')})
    config.default_hooks = dict(checkpoint=None, logger=None)
    runner = Runner.from_cfg(config)
    runner._init_model_weights()
    runner._init_model_weights = lambda: None
    apply_lean(runner.model, preset)
    return runner


def train(runner: Runner) -> list[float]:
    """The losses of its steps."""
    losses = _Losses()
    runner.register_hook(losses)
    torch.manual_seed(0)
    runner.train()
    return losses.found


def gradient(model: torch.nn.Module, batch: dict, preset: str) -> dict[str, torch.Tensor]:
    """Of all parameters, by name."""
    apply_lean(model, preset)
    torch.manual_seed(0)
    data = model.data_preprocessor(copy.deepcopy(batch), True)
    model.parse_losses(model(**data, mode='loss'))[0].backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def errors(found: dict, exact: dict) -> dict[str, float]:
    """Relative error of the gradients of each child, and of its layers where it has such, and of all."""
    parts = {'all': ''} | {name.split('.')[0]: name.split('.')[0] for name in exact}
    parts |= {'.'.join(name.split('.')[:3]): name.rsplit('.', 1)[0] for name in exact if '.layers.' in name}

    def norm(gradients, prefix):
        return sum(g.square().sum().item() for n, g in gradients.items() if n.startswith(prefix)) ** 0.5

    difference = {name: found[name] - g for name, g in exact.items()}
    return {part: norm(difference, part * (part != 'all')) / norm(exact, part * (part != 'all')) for part in parts}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses, and their distance from those of the first preset."""
    figure, ((left, right),) = panels(1, 2, figsize=(11, 4))
    base = next(iter(curves.values()))
    for (label, losses), colour in zip(curves.items(), COLOURS, strict=False):
        left.plot(losses, label=label, color=colour, linewidth=1)
        if losses is not base:
            apart = [abs(a - b) / abs(b) for a, b in zip(losses, base, strict=True)]
            right.semilogy([max(d, 1e-9) for d in apart], label=label, color=colour, linewidth=1)
    left.set(xlabel='step', ylabel='loss')
    right.set(xlabel='step', ylabel=f"distance from {next(iter(curves))}'s loss, relative")
    save_picture(figure, path, legend=left.get_legend_handles_labels()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--presets', nargs='+', default=['none', 'exact', 'int8'])
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    parser.add_argument('--json', type=output_file, help='write the results here')
    parser.add_argument('--plot', type=output_file, help='write a picture (PNG) here')
    args = parser.parse_args()
    config, curves = plain(load_config(args.config, args.cfg_options)), {}
    for preset in (*args.presets, CHANCE):
        runner = runner_of(config, args.presets[0] if preset == CHANCE else preset, args.steps)
        if preset == CHANCE:
            for p in runner.model.parameters():
                p.data.mul_(1 + 2**-23)
        curves[preset] = train(runner)
        print(preset, *(f'{loss:.6g}' for loss in curves[preset][:: max(args.steps // 10, 1)]), flush=True)
        if len(curves) == 1:
            model, batch = runner.model, next(iter(runner.train_dataloader))
            model = copy.deepcopy(model)
    exact, *others = (gradient(model, batch, preset) for preset in args.presets)
    found = {preset: errors(other, exact) for preset, other in zip(args.presets[1:], others, strict=True)}
    for preset, parts in found.items():
        print(preset, *(f'{part} {error:.2e}' for part, error in parts.items()))
    if args.json:
        case = dict(config=args.config, steps=args.steps)
        write_json(args.json, dict(machine=describe_machine(), case=case, losses=curves, gradient_errors=found))
    if args.plot:
        draw(curves, args.plot)


if __name__ == '__main__':
    main()
