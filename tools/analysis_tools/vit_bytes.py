"""What a ViT stores for the backward pass, by preset, under bf16 autocast: counted, without the arithmetic.

    python tools/analysis_tools/vit_bytes.py --json docs/results/vit_bytes.json

"maps" is no preset: the plain backbone with attention maps stored, as the paper counts it. Parameters and images are not counted. Bytes are of one image: they grow with the batch.
"""

import argparse

import torch

from sbp_mmdet import SBPViT
from sbp_mmdet.analysis import saved_bytes
from sbp_mmdet.analysis.cuda_rules import autocast
from sbp_mmdet.analysis.hollow import SkipArithmetic
from sbp_mmdet.families import FAMILIES, presets_of
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import Column, add_outputs, markdown_table, write_outputs

# arch, side of the image, arguments: classification, and a detector's four scales
CASES = (('tiny', 224, dict(out_type='cls_token')), ('base', 224, dict(out_type='cls_token')), ('base', 1024, {}))
MAPS = dict(sbp_cfg=dict(implementation='reference', keep_ratio=1.0))


def count(arch: str, size: int, arguments: dict) -> int:
    """Bytes that one image stores."""
    model, image = SBPViT(arch, **arguments).train(), torch.zeros(1, 3, size, size)

    def forward():
        with autocast('cpu', torch.bfloat16), SkipArithmetic(lambda: True):
            return model(image)

    return saved_bytes(forward, [*model.parameters(), image])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='of presets that drop something (default: 0.5)')
    add_outputs(parser, plot=False)
    args = parser.parse_args()
    variants = {p.name: p.arguments(keep_ratio=args.keep_ratio) for p in presets_of(FAMILIES['ViT'])}
    variants = {'none': variants.pop('none'), 'maps': MAPS, **variants}
    rows = []
    for arch, size, options in CASES:
        for name, arguments in variants.items():
            rows.append(dict(arch=arch, size=size, preset=name, saved_bytes=count(arch, size, options | arguments)))
        plain = rows[-len(variants)]['saved_bytes']
        columns = [
            Column('preset', lambda row: row['preset']),
            Column('MB an image', lambda row: f'{row["saved_bytes"] / 1e6:.1f}'),
            Column('of plain', lambda row, plain=plain: f'{row["saved_bytes"] / plain:.3f}'),
        ]
        print(f'\n{arch}, {size} x {size}\n\n{markdown_table(columns, rows[-len(variants) :])}', flush=True)
    found = dict(machine=describe_machine('cpu'), family='ViT', amp='bf16', keep_ratio=args.keep_ratio, rows=rows)
    write_outputs(args, found, indent=1)


if __name__ == '__main__':
    main()
