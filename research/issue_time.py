"""Measures the work of issuing a step: Python calls, operations, autograd nodes and the process's CPU time.

    python research/issue_time.py --json docs/results/issue_time.json
    python research/issue_time.py --models ResNet-50 CSPNeXt --presets none exact --rounds 5
    python research/issue_time.py --write                     writes docs/costs.md from the JSON file

Feature maps are so small that arithmetic hardly matters, and there is one thread: this is the time for which a fast GPU
waits. Presets take turns, and the minimum over all rounds is reported, because other processes can only add time. The
counts have no noise: calls of Python functions, operations of torch's dispatcher (including allocations and views) and
nodes of autograd's graph, for a forward and backward pass after the first two.
"""

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoder
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from provenance import describe_machine, write_json
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet import apply_lean

__all__ = ['PRESETS', 'count', 'measure', 'models', 'table']

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / 'docs/results/issue_time.json'
PRESETS = ('none', 'with_cp', 'exact', 'exact_min', 'int8', 'sampled', 'sbp')
_CONVOLUTIONAL = ('ResNet-50', 'CSPNeXt')  # nothing to sample or to drop in them
_CONFIGS = {
    'ResNet-50': dict(
        type='mmdet.ResNet',
        depth=50,
        frozen_stages=1,
        norm_cfg=dict(type='BN', requires_grad=True),
        norm_eval=True,
        base_channels=8,
    ),
    'CSPNeXt': dict(
        type='mmdet.CSPNeXt',
        arch='P5',
        deepen_factor=0.33,
        widen_factor=0.125,
        norm_cfg=dict(type='BN'),
        act_cfg=dict(type='SiLU', inplace=True),
    ),
    'Swin': dict(
        type='mmdet.SwinTransformer',
        embed_dims=24,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        drop_path_rate=0.0,
    ),
    'ConvNeXt': dict(
        type='SBPConvNeXt',
        arch=dict(depths=[3, 3, 9, 3], channels=[16, 32, 48, 64]),
        out_indices=[0, 1, 2, 3],
        drop_path_rate=0.0,
        gap_before_final_norm=False,
    ),
}


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]]:
    """Return by name the functions that build each model, and those that run it and sum its output."""
    images = torch.randn(1, 3, 64, 64)

    def run(model):
        return sum(out.sum() for out in model(images))

    found = {name: (lambda cfg=cfg: MODELS.build(cfg), run) for name, cfg in _CONFIGS.items()}
    return found | {"DINO's encoder": (_encoder, _run_encoder())}


def build(name: str, preset: str) -> nn.Module:
    """Build a model in training mode, with weights of seed 0, and change it.

    Args:
        name (str): A key of :func:`models`.
        preset (str): Preset; 'none' changes nothing.
    """
    torch.manual_seed(0)
    model = models()[name][0]()
    model.train()  # mmdet's backbones return nothing here
    if preset != 'none':
        apply_lean(model, preset=preset, verify=False)
    return model


def _encoder():
    layer = dict(
        self_attn_cfg=dict(embed_dims=32, num_levels=4, dropout=0.0),
        ffn_cfg=dict(embed_dims=32, feedforward_channels=64, ffn_drop=0.0),
    )
    return DeformableDetrTransformerEncoder(num_layers=6, layer_cfg=layer)


def _run_encoder():
    shapes = torch.tensor([[8, 8], [4, 4], [2, 2], [1, 1]])
    sizes = shapes.prod(1)
    tokens = int(sizes.sum())
    query = torch.randn(1, tokens, 32)
    inputs = dict(
        query_pos=query,
        key_padding_mask=torch.zeros(1, tokens, dtype=torch.bool),
        spatial_shapes=shapes,
        level_start_index=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]]),
        valid_ratios=torch.ones(1, 4, 2),
    )
    return lambda model: model(query=query, **inputs).sum()


class _Operations(TorchDispatchMode):
    """Mode that counts operations."""

    def __init__(self):
        super().__init__()
        self.number: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number[func._schema.name] = self.number.get(func._schema.name, 0) + 1
        return func(*args, **(kwargs or {}))


def count(step: Callable[[], Tensor]) -> dict[str, int]:
    """Count ``calls`` of Python functions and of functions in C, ``operations`` and autograd ``nodes`` of a step.

    Args:
        step (Callable): Returns the loss of a forward pass.
    """
    for _ in range(2):  # what is made once is there at the third time
        step().backward()
    with _Operations() as operations:
        loss = step()
        nodes = _nodes(loss.grad_fn)
        loss.backward()
    del loss
    calls = 0

    def note(frame, event, argument):
        nonlocal calls
        calls += event in ('call', 'c_call')

    sys.setprofile(note)
    try:
        step().backward()
    finally:
        sys.setprofile(None)
    return dict(calls=calls, operations=sum(operations.number.values()), nodes=nodes)


def _nodes(root) -> int:
    seen, left = {root}, [root]
    while left:
        new = {node for node, _ in left.pop().next_functions if node is not None} - seen
        seen |= new
        left += new
    return len(seen)


def measure(name: str, presets: list[str], rounds: int, repeats: int) -> Iterator[dict]:
    """Yield a row for each preset of a model.

    Args:
        name (str): A key of :func:`models`.
        presets (list[str]): The presets, of which the first is what others are compared with.
        rounds (int): How many times each preset has its turn.
        repeats (int): Steps in a turn.
    """
    _, run = models()[name]
    steps, rows = {}, {}
    for preset in presets:
        model = build(name, preset)
        steps[preset] = lambda model=model: (model.zero_grad(), run(model))[1]
        rows[preset] = dict(model=name, preset=preset, **count(steps[preset]), seconds=float('inf'))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for preset, step in steps.items():
                for _ in range(repeats):
                    start = time.process_time()
                    step().backward()
                    rows[preset]['seconds'] = min(rows[preset]['seconds'], time.process_time() - start)
            gc.collect()
    finally:
        gc.enable()
    base = rows[presets[0]]
    for row in rows.values():
        yield row | {key: round(row[own] / base[own], 3) for key, own in _RATIOS.items()}


_RATIOS = dict(ratio='seconds', calls_ratio='calls', operations_ratio='operations')


def table(rows: list[dict]) -> str:
    """Format a line for each model: time relative to plain, and in brackets operations relative to plain."""
    presets = [preset for preset in dict.fromkeys(row['preset'] for row in rows) if preset != 'none']
    cells = {(row['model'], row['preset']): row for row in rows}
    lines = ['| model | plain | ' + ' | '.join(f'`{preset}`' for preset in presets) + ' |']
    lines.append('|---|---|' + '---|' * len(presets))
    for model in dict.fromkeys(row['model'] for row in rows):
        plain = cells[model, 'none']
        line = [model, f'{1e3 * plain["seconds"]:.1f} ms ({plain["operations"]})']
        for preset in presets:
            row = cells.get((model, preset))
            line.append('' if row is None else f'{row["ratio"]:.2f} ({row["operations_ratio"]:.2f})')
        lines.append(f'| {" | ".join(line)} |')
    return '\n'.join(lines)


def write(page: Path, text: str) -> None:
    """Put the table between its marks in a page."""
    before, mark, rest = page.read_text(encoding='utf-8').partition('<!-- results: issue_time -->\n')
    page.write_text(f'{before}{mark}{text}\n<!-- end -->{rest.partition("<!-- end -->")[2]}', encoding='utf-8')


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=[*_CONFIGS, "DINO's encoder"])
    parser.add_argument('--presets', nargs='+', choices=PRESETS, default=PRESETS)
    parser.add_argument('--rounds', type=int, default=10, help='turns of each preset (default: %(default)s)')
    parser.add_argument('--repeats', type=int, default=5, help='steps in a turn (default: %(default)s)')
    parser.add_argument('--json', type=Path, help='file to write')
    parser.add_argument('--write', action='store_true', help=f'write docs/costs.md from {FILE.relative_to(ROOT)}')
    args = parser.parse_args()
    if args.write:
        return write(ROOT / 'docs/costs.md', table(json.loads(FILE.read_text())['rows']))
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    init_default_scope('mmdet')
    rows = []
    for name in args.models or models():
        left = ('sampled', 'sbp') if name in _CONVOLUTIONAL else ()
        found = [*measure(name, [p for p in args.presets if p not in left], args.rounds, args.repeats)]
        for row in found:
            text = ', '.join(f'{row[key]} {key}' for key in ('calls', 'operations', 'nodes'))
            print(f'{name:15}{row["preset"]:10}{1e3 * row["seconds"]:7.2f} ms {row["ratio"]:6.2f}, {text}', flush=True)
        rows += found
    if args.json:
        write_json(args.json, dict(machine=describe_machine(), rows=rows))
    return print(table(rows))


if __name__ == '__main__':
    main()
