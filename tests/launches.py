"""How many kernels a GPU is asked to launch for a block, and how its matrix products are laid out, counted without one.

    PYTHONPATH=. python tests/launches.py

counts blocks at the sizes of the recipe (two images of 800 x 1344) for every preset, and prints a table.

An operation that torch's dispatcher is asked for counts as one launch, a view or an allocation as none, and those of
``_SEVERAL`` as what CUDA's kernels of them are. So it is a count of calls, not a profile: a reduction that takes two
kernels, or a library that splits a product, is seen on a GPU only.
"""

import contextlib
import itertools
from typing import NamedTuple
from unittest import mock

import torch
from fake_cuda import backward, gpu_that_is_not_there, put_on_gpu, unset_fake_temporarily
from mmcv.cnn.bricks import DropPath
from mmdet.models.backbones import ResNet
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sbp_mmdet import SBPConvNeXt, SBPSwinTransformer, SBPViT, apply_lean
from sbp_mmdet.ops.common import flash as flash
from sbp_mmdet.ops.common.handed_maps import Scope

__all__ = ['AMP', 'BLOCKS', 'Launches', 'block_launches', 'counted', 'table']

IMAGES = (2, 3, 800, 1344)
AMP = {'fp32': None, 'fp16': torch.float16, 'bf16': torch.bfloat16}
_FREE = (
    'empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh set_ _local_scalar_dense '
    'resize_ _unsafe_view promote_types'
).split()
# Kernels of operations that are more than one.
_SEVERAL = dict(
    convolution_backward=lambda out, args: sum(x is not None for x in out),
    native_layer_norm=lambda out, args: 1 + _copied(*args[:1]),
    native_layer_norm_backward=lambda out, args: 1 + any(x is not None for x in out[1:]) + _copied(*args[:2]),
    _scaled_dot_product_flash_attention_backward=lambda out, args: 3,
    _scaled_dot_product_efficient_attention_backward=lambda out, args: 3,
)
_PRODUCTS = ('mm', 'addmm', 'addmm_', 'bmm', 'baddbmm')


def _copied(*tensors):
    """How many of them a kernel copies first, which wants rows."""
    return sum(not x.is_contiguous() for x in tensors)


class Factor(NamedTuple):
    """A factor of a matrix product."""

    name: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    offset: int
    itemsize: int

    @property
    def aligned(self) -> bool:
        """Rows, or columns, lie one after another, and each begins at a multiple of 16 bytes, as the fast kernels of
        cuBLAS want it."""
        ends = [s for s, n in zip(self.strides, self.shape, strict=True) if n > 1]
        return 1 in ends and all(n * self.itemsize % 16 == 0 for n in (*ends, self.offset) if n != 1)


class Launches(TorchDispatchMode):
    """Counts launches and notes matrix products while it is entered.

    Attributes:
        number (dict[str, int]): Launches by operation.
        products (list[Factor]): The factors of all matrix products.
    """

    def __init__(self):
        super().__init__()
        self.number, self.products = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split('::')
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in tree_flatten((args, out))[0])
        if on_gpu and space != 'prim' and not func.is_view and name not in _FREE:
            number = _SEVERAL[name](out, args) if name in _SEVERAL else 1
            self.number[name] = self.number.get(name, 0) + number
        if name in _PRODUCTS:
            tensors = [x for x in args if isinstance(x, Tensor)][-2:]
            self.products += [
                Factor(name, x.shape[-2:], x.stride()[-2:], x.storage_offset(), x.element_size()) for x in tensors
            ]
        return out

    @property
    def total(self) -> int:
        return sum(self.number.values())


def _of_stage(stage):
    """Images, height and width of the map of a stage."""
    return IMAGES[0], IMAGES[2] // 4 >> stage, IMAGES[3] // 4 >> stage


def _convnext(stage):
    def build(keys):
        model = SBPConvNeXt(dict(depths=[1] * 4, channels=[128, 256, 512, 1024]), sbp_cfg=keys)
        block = model.stages[stage][0]
        block.drop_path = DropPath(0.2)
        n, h, w = _of_stage(stage)
        return model, block, (n, 128 << stage, h, w), ()

    return build


def _swin(stage):
    def build(keys):
        sizes = dict(embed_dims=128, num_heads=(4, 8, 16, 32), depths=(2, 2, 2, 2))
        model = SBPSwinTransformer(**sizes, sbp_cfg=keys, drop_path_rate=0.2)
        n, h, w = _of_stage(stage)
        return model, model.stages[stage].blocks[1], (n, h * w, 128 << stage), ((h, w),)

    return build


def _vit(keys):
    arch = dict(num_layers=2, embed_dims=768, num_heads=12)
    model = SBPViT(arch, sbp_cfg=keys, img_size=224, drop_path_rate=0.2)
    n, h, w = _of_stage(2)
    return model, model.blocks[1], (n, h * w + 1, 768), ()


def _resnet(stage):
    def build(keys):
        model = ResNet(50, norm_cfg=dict(type='BN', requires_grad=True), norm_eval=True, frozen_stages=0)
        if keys['preset'] != 'none':
            apply_lean(model, **keys)
        n, h, w = _of_stage(stage)
        return model, getattr(model, f'layer{stage + 1}')[1], (n, 256 << stage, h, w), ()

    return build


BLOCKS = {
    'ConvNeXt-B, stage 1': _convnext(0),
    'ConvNeXt-B, stage 3': _convnext(2),
    'Swin-B, stage 1, shifted': _swin(0),
    'Swin-B, stage 3, shifted': _swin(2),
    'ViT-B': _vit,
    'ResNet-50, stage 2': _resnet(1),
    'ResNet-50, stage 4': _resnet(3),
}


def block_launches(mode, name: str, preset: str, dtype: torch.dtype | None) -> tuple[Launches, Launches]:
    """Launches of a block's forward and backward pass.

    Args:
        mode: Of :func:`fake_cuda.gpu_that_is_not_there`, which is entered.
        name (str): Of ``BLOCKS``.
        preset (str): 'none' or another.
        dtype (torch.dtype | None): Of autocast; None: it is off.
    """
    with unset_fake_temporarily():
        keys = dict(preset=preset)
        if preset != 'none' and name.startswith(('ConvNeXt', 'Swin', 'ViT')):
            keys['skip_dropped_images'] = False  # so that all images run, whatever is drawn
        model, block, shape, rest = BLOCKS[name](keys)
        model.train()
    put_on_gpu(mode, model)
    images = torch.empty(IMAGES, device='cuda')
    for _ in range(2):  # what is made once for a size is there at the second time
        x = torch.empty(shape, device='cuda', requires_grad=True) * 1  # no leaf, as within a network
        there, back = Launches(), Launches()
        with mock.patch.object(flash, '_ampere', lambda index: True), contextlib.ExitStack() as passes:
            passes.enter_context(Scope())  # as within the network
            for draws in getattr(model, 'step_draws', []):
                passes.enter_context(draws.forward_pass(images))
            with torch.autocast('cuda', dtype, enabled=dtype is not None), there:
                out = block(x, *rest)
            with back:
                backward([out])
    return there, back


def counted(mode) -> list[dict]:
    """A row for each block, precision and preset."""
    rows = []
    for name, amp in itertools.product(BLOCKS, ('bf16', 'fp16')):
        for preset in ('none', 'exact', 'int8', 'sampled', 'sbp'):
            try:
                there, back = block_launches(mode, name, preset, AMP[amp])
            except ValueError:  # nothing to drop in a ResNet
                continue
            rows.append(dict(block=name, amp=amp, preset=preset, forward=there.total, backward=back.total))
            if preset == 'none':  # checkpointing runs the plain forward pass once more
                rows.append(dict(rows[-1], preset='with_cp', backward=there.total + back.total))
    return rows


def table(rows: list[dict]) -> str:
    """Launches of both passes, a row for each block and precision."""
    presets = list(dict.fromkeys(row['preset'] for row in rows))
    number = {(r['block'], r['amp'], r['preset']): r['forward'] + r['backward'] for r in rows}
    lines = ['| block | ' + ' | '.join(presets) + ' |', '|---|' + '---|' * len(presets)]
    for block, amp in dict.fromkeys((row['block'], row['amp']) for row in rows):
        cells = (str(number.get((block, amp, preset), '')) for preset in presets)
        lines.append(f'| {block}, {amp} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


if __name__ == '__main__':
    with gpu_that_is_not_there() as mode:
        print(table(counted(mode)))
