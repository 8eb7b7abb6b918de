"""Numbers that tell a training step, for every family and preset, and the file of them that an earlier state wrote.

    PYTHONPATH=. python tests/guards.py tests/guards.json

writes the file anew. The one that is there was written by the package of before presets were the interface (commit
a81d459, whose table OLD says which settings a preset stands for). Weights are drawn by the parameter's name, so how a
network is put together does not matter.
"""

import contextlib
import hashlib
import json
import sys
from pathlib import Path

import torch

from sbp_mmdet import SBPConvNeXt, SBPSwinTransformer, SBPViT
from sbp_mmdet.plan.cuda_rules import autocast
from sbp_mmdet.plan.memory import saved_bytes

FILE = Path(__file__).with_name('guards.json')

_CONVNEXT = dict(
    arch=dict(depths=[1, 1, 3, 1], channels=[8, 16, 32, 64]), out_indices=[0, 1, 2, 3], gap_before_final_norm=False
)
FAMILIES = {
    'ConvNeXt': lambda **more: SBPConvNeXt(**_CONVNEXT, layer_scale_init_value=0.5, **more),
    'ConvNeXtV2': lambda **more: SBPConvNeXt(**_CONVNEXT, layer_scale_init_value=0.0, use_grn=True, **more),
    'Swin': lambda **more: SBPSwinTransformer(
        embed_dims=24, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window_size=4, **dict(drop_path_rate=0.0) | more
    ),
    'ViT': lambda **more: SBPViT(
        dict(num_layers=3, embed_dims=32, num_heads=2), img_size=64, patch_size=8, layer_scale_init_value=0.5, **more
    ),
}
PRESETS = ('exact', 'int8', 'sbp', 'none', 'with_cp', 'reference')
# Options that a preset is frozen with, beside none: (family, preset, keys).
_RATIOS = [0.25, 0.5, 1, 0.75, 0.5]
OPTIONS = [
    ('ConvNeXt', 'sbp', dict(sampler='random', keep_ratio=_RATIOS)),
    ('ConvNeXt', 'sbp', dict(downsample=False)),
    ('Swin', 'sbp', dict(sampler='random', blocks=[1, 2, 0, 0])),
    ('ViT', 'sbp', dict(attention='query')),
    ('ViT', 'sbp', dict(attention='head')),
]


def cases():
    """What is frozen: (family, preset, keys of sbp_cfg, rate of stochastic depth, 'fp64' or 'bf16')."""
    for family in FAMILIES:
        for preset in PRESETS:
            if family == 'ConvNeXtV2' and preset in ('sbp', 'reference'):
                continue  # GRN looks at all positions
            yield family, preset, {}, 0.0, 'fp64'
            yield family, preset, {}, 0.0, 'bf16'
            if preset not in ('none', 'with_cp') and family != 'ConvNeXtV2':
                yield family, preset, dict(skip_dropped_images=True), 0.5, 'fp64'
    for family, preset, keys in OPTIONS:
        yield family, preset, keys, 0.0, 'fp64'


def name_of(family, preset, keys, rate, precision):
    """Of a case, in the file and in pytest's list."""
    words = [family, preset, *(f'{key}={value}' for key, value in keys.items()), precision]
    return ' '.join(words).replace('[', '(').replace(']', ')')


def build(family, preset, **keys):
    """A small backbone under a preset, in training mode, with weights by name."""
    rate = 0.5 if keys.get('skip_dropped_images') else 0.0
    model = FAMILIES[family](drop_path_rate=rate, sbp_cfg=dict(preset=preset, **keys)).double().train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = noise_of(name, p.shape)
            p.copy_(noise / p[0].numel() ** 0.5 if p.dim() > 1 else (noise + 3) / 5)
    return model


def noise_of(name, shape):
    """Numbers of about the standard deviation 1 that depend on a name and nothing else.

    They are uniform: the last bits of normal ones differ from CPU to CPU.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), 'little')
    whole = torch.randint(-(2**20), 2**20 + 1, shape, generator=torch.Generator().manual_seed(seed))
    return whole.double() * (1.75 / 2**20)


def step(family, preset, keys, rate, precision):
    """One training step of a case.

    Returns:
        tuple[int, dict[str, tuple[float, float]]]: The bytes that are stored for the backward pass, and by name of each
        output, of each parameter for its gradient, and of the image for its, the norm and the product with a noise.
    """
    torch.manual_seed(0)
    model = build(family, preset, **keys)
    x = noise_of('image', (3, 3, 72, 104))
    if precision == 'bf16':
        model, x = model.float(), x.float()
    x.requires_grad_(precision == 'fp64')  # in training an image has no gradient, which is less to store
    outs = []

    def forward():
        outs.extend(model(x))
        return outs

    with autocast('cpu', torch.bfloat16) if precision == 'bf16' else contextlib.nullcontext():
        nbytes = saved_bytes(forward, [x, *model.parameters()])
    tensors = {f'out {i}': out for i, out in enumerate(outs)}
    torch.autograd.backward(outs, [noise_of(name, out.shape).to(out) for name, out in tensors.items()])
    tensors |= {name: p.grad for name, p in model.named_parameters()}
    if precision == 'fp64':
        tensors['image'] = x.grad
    return nbytes, {name: _numbers(f'of {name}', t) for name, t in tensors.items()}


def _numbers(name, tensor):
    tensor = tensor.detach().double().flatten()
    return tensor.norm().item(), (tensor @ noise_of(name, tensor.shape)).item()


def main():
    """Writes the file."""
    found = {'torch': torch.__version__.split('+')[0], 'names': {}, 'cases': {}}
    for case in cases():
        nbytes, numbers = step(*case)
        full = case[-1] == 'fp64'
        names = found['names'].setdefault(f'{case[0]} {case[-1]}', [*numbers])
        if names != [*numbers]:
            raise ValueError(f'{name_of(*case)}: other names than before: {set(names) ^ set(numbers)}')
        row = dict(bytes=nbytes, norms=[float(f'{n:.4g}') for n, _ in numbers.values()])
        if full:
            row['products'] = [float(f'{p:.13g}') for _, p in numbers.values()]
        found['cases'][name_of(*case)] = row
    Path(sys.argv[1]).write_text(json.dumps(found, separators=(',', ':')).replace('},"', '},\n"') + '\n')


if __name__ == '__main__':
    main()
