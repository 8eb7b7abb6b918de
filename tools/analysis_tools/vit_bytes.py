"""What a ViT stores for the backward pass, by preset, under bf16 autocast: counted, without the arithmetic.

    python tools/analysis_tools/vit_bytes.py --json docs/results/vit_bytes.json

"maps" is no preset: the plain backbone with attention maps stored, as the paper counts it. Nor is "selective":
checkpointed blocks that save the results of matrix products. Parameters and images are not counted, copies of
parameters in half precision are. Bytes of one and of two images give those of the batch.
"""

import argparse

import torch

from sbp_mmdet import SBPViT
from sbp_mmdet.analysis import saved_bytes
from sbp_mmdet.analysis.cuda_rules import autocast
from sbp_mmdet.analysis.hollow import SkipArithmetic
from sbp_mmdet.analysis.memory import LiveBytes
from sbp_mmdet.analysis.rivals import RIVALS
from sbp_mmdet.families import FAMILIES, presets_of
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import Column, add_outputs, markdown_table, write_outputs

# arch, side of the image, batch, arguments: the paper's classification (table 1), and a detector's four scales
CASES = (
    ('tiny', 224, 256, dict(out_type='cls_token')),
    ('base', 224, 64, dict(out_type='cls_token')),
    ('base', 1024, 2, {}),
)
MAPS = dict(sbp_cfg=dict(implementation='reference', keep_ratio=1.0))


def count(arch: str, size: int, batch: int, arguments: dict, selective: bool = False) -> int:
    """Bytes that a batch stores."""
    model = SBPViT(arch, **arguments).train()
    run = RIVALS['selective'].wrap(model) if selective else model

    def stored(images):
        x, counter = torch.zeros(images, 3, size, size), LiveBytes()

        def forward():
            with autocast('cpu', torch.bfloat16), SkipArithmetic(lambda: True), counter:
                return run(x)

        if not selective:
            return saved_bytes(forward, [*model.parameters(), x])
        # What is saved by choice lies out of sight of hooks on saved tensors: all that lives is counted.
        graph = [out.grad_fn for out in forward()]
        return counter.live if graph else 0

    one, two = stored(1), stored(2)
    return one + (batch - 1) * (two - one)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='of presets that drop something (default: 0.5)')
    parser.add_argument('--presets', nargs='+', help='these only (default: all that ViT has, maps and selective)')
    add_outputs(parser, plot=False)
    args = parser.parse_args()
    variants = {p.name: p.arguments(keep_ratio=args.keep_ratio) for p in presets_of(FAMILIES['ViT'])}
    variants = {'none': variants['none'], 'maps': MAPS, 'selective': variants['with_cp'], **variants}
    if unknown := set(args.presets or ()) - set(variants):
        parser.error(f'--presets {sorted(unknown)}: unknown; choose from {list(variants)}')
    variants = {name: value for name, value in variants.items() if name in (args.presets or variants)}
    rows = []
    for arch, size, batch, options in CASES:
        case = dict(arch=arch, size=size, batch=batch)
        for name, arguments in variants.items():
            stored = count(**case, arguments=options | arguments, selective=name == 'selective')
            rows.append(dict(case, preset=name, saved_bytes=stored))
        found = rows[-len(variants) :]
        plain = found[0]['saved_bytes']
        columns = [
            Column('preset', lambda row: row['preset']),
            Column('MB', lambda row: f'{row["saved_bytes"] / 1e6:.1f}'),
            Column('of plain', lambda row, plain=plain: f'{row["saved_bytes"] / plain:.3f}'),
        ]
        print(f'\n{arch}, {batch} x {size} x {size}\n\n{markdown_table(columns, found)}', flush=True)
    found = dict(machine=describe_machine('cpu'), family='ViT', amp='bf16', keep_ratio=args.keep_ratio, rows=rows)
    write_outputs(args, found, indent=1)


if __name__ == '__main__':
    main()
