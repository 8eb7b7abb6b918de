"""What the ways to drop gradients in attention cost in gradient quality, attention alone: the MLPs stay exact.

    python tools/analysis_tools/attention_study.py configs/nuclei/mask-rcnn_sbp-vit-s14_fpn_nuclei.py \\
        --backbone work_dirs/vit_s14.pth --batches 4 --json docs/results/attention_forms.json

CONFIG has an SBPViT. Every form gets the same images and the gradient at the backbone's outputs of the exact pass.
Beside the forms of sbp_cfg stands "parts": Algorithm 1 with the whole attention as its function, so that kept tokens
attend to kept ones and dropped ones to dropped ones. Its forward pass is another one.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbp_mmdet.analysis.cuda_rules import full_fp32
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.families import require
from sbp_mmdet.functional import sbp
from sbp_mmdet.provenance import describe_machine
from sbp_mmdet.reporting import Column, add_outputs, compact, text_table, write_outputs
from sbp_mmdet.settings import ATTENTION
from sbp_mmdet.study.gradients import ExactPass, backbone_with, exact_pass
from sbp_mmdet.study.measures import compare
from sbp_mmdet.study.subject import build_model, train_batches

FORMS = {a: dict(attention=a) for a in ATTENTION}
FORMS |= {f'{a}, pool': dict(attention=a, dropped='pool') for a in ('qkv', 'query')}
FORMS['parts'] = dict()
LAYERS = ('attn.qkv', 'attn.proj', 'mlp.fc1')


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of a detector with an SBPViT')
    parser.add_argument('--backbone', required=True, help='its weights, under any name that is known')
    parser.add_argument('--batches', type=int, default=4, help='of the train dataloader (default: 4)')
    parser.add_argument('--images', type=int, default=2, help='of a batch (default: 2)')
    parser.add_argument('--keep-ratio', type=float, default=0.5)
    parser.add_argument('--seed', type=int, default=0)
    add_outputs(parser, plot=False)
    return parser, parser.parse_args()


def read_inputs(args):
    """Config, model and batches. Raises a ValueError for what cannot be studied."""
    for name in ('batches', 'images'):
        if getattr(args, name) < 1:
            raise ValueError(f'--{name} {getattr(args, name)} must be 1 or more')
    config = load_config(args.config, {'train_dataloader.batch_size': args.images})
    if (found := require(config.model.get('backbone')).backbone) != 'SBPViT':
        raise ValueError(f'{args.config} has an {found}; give the config of a detector with an SBPViT')
    for cfg in FORMS.values():
        backbone_with(config, dict(cfg, keep_ratio=args.keep_ratio))
    model = build_model(config, seed=args.seed, backbone=args.backbone)
    return config, model, list(train_batches(config, args.batches, args.seed))


def attention_in_parts(block: nn.Module, x: Tensor, positions=None, heads=None, factor=None) -> Tensor:
    """A block's attention with its residual connection: kept tokens among themselves, and dropped ones."""

    def branch(x):
        y = block.attn.qkv(block.norm1(x)).unflatten(2, (3, block.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = block.attn.proj(F.scaled_dot_product_attention(*y.unbind(0)).transpose(1, 2).flatten(2))
        gamma = getattr(block.ls1, 'gamma', None)
        return y if gamma is None else y * gamma

    return x + (branch(x) if positions is None else sbp(branch, x, positions))


def gradients(backbone: nn.Module, exact: ExactPass, form: str) -> tuple[dict[str, Tensor], float]:
    """Of all parameters, and how far the outputs are from the exact ones, relative to these."""
    for block in backbone.blocks:
        block.channel_mlp = lambda x, positions=None, factor=None, run=block.channel_mlp: run(x, None, factor)
        if form == 'parts':
            block.attend = attention_in_parts.__get__(block)
    torch.manual_seed(exact.seed)
    outputs = backbone(exact.images)
    pairs = list(zip(outputs, exact.outputs, strict=True))
    error = sum((a - b).norm() ** 2 for a, b in pairs).sqrt() / sum(b.norm() ** 2 for _, b in pairs).sqrt()
    torch.autograd.backward(outputs, exact.output_gradients)
    found = {f'backbone.{name}': p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    for p in backbone.parameters():
        p.grad = None
    return found, error.item()


def row_of(backbone: nn.Module, parts: dict) -> dict[str, float]:
    """Cosine and norm ratio of the backbone, and of the blocks that are thinned out, layer by layer."""
    row = {'cosine': parts['backbone']['cosine'], 'norm_ratio': parts['backbone']['norm_ratio']}
    thinned = [block for _, block in sorted(backbone.keep_ratios())]
    for layer in LAYERS:
        for block in thinned:
            row[f'blocks.{block}.{layer}'] = parts[f'blocks.{block}.{layer}']['cosine']
        row[layer] = statistics.fmean(row[f'blocks.{block}.{layer}'] for block in thinned)
    return row


@full_fp32()
def main():
    parser, args = parse_args()
    try:
        config, model, batches = read_inputs(args)
    except ValueError as error:
        parser.error(str(error))
    family = require(config.model.backbone)
    rows = {form: [] for form in FORMS}
    for i, batch in enumerate(batches):
        exact = exact_pass(model, batch, args.seed + i)
        only = {name: g for name, g in exact.gradients.items() if name.startswith('backbone.')}
        for form, cfg in FORMS.items():
            backbone = backbone_with(config, dict(cfg, keep_ratio=args.keep_ratio), model.backbone)
            found, error = gradients(backbone, exact, form)
            rows[form].append(row_of(backbone, compare(only, found, family)) | dict(forward_error=error))
        print(f'batch {i + 1} of {args.batches}', flush=True)
    means = {
        form: {key: statistics.fmean(row[key] for row in found) for key in found[0]} for form, found in rows.items()
    }
    columns = ('cosine', 'norm_ratio', *LAYERS, 'forward_error')
    heads = [Column('form', lambda row: row['form'])]
    heads += [Column(key, lambda row, key=key: f'{row[key]:.3f}') for key in columns]
    print(text_table(heads, [dict(row, form=form) for form, row in means.items()]))
    case = dict(config=Path(args.config).stem, backbone=Path(args.backbone).name, batches=args.batches)
    case |= dict(images=args.images, keep_ratio=args.keep_ratio, seed=args.seed)
    write_outputs(args, compact(dict(machine=describe_machine('cpu'), case=case, forms=means), 4))


if __name__ == '__main__':
    main()
