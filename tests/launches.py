"""Counts of the kernels that a GPU launches for a block, and of the bytes that they move, without a GPU.

    PYTHONPATH=. python tests/launches.py

counts blocks at the sizes of the recipe (two images of 800 x 1344) for every preset, and prints a table.

An operation that torch's dispatcher is asked for counts as one launch, a view or an allocation as none, and those of
``_SEVERAL`` as what CUDA's kernels of them are. So it is a count of calls, not a profile: a reduction that takes two
kernels, or a library that splits a product, is seen on a GPU only.

The bytes of a launch are those of the tensors that it reads and writes, each once; a tensor that is expanded counts as
what lies in memory. Caches are left out, so it is what the memory of a GPU has to carry where maps are large.
"""

import contextlib
import itertools
import math
from typing import NamedTuple
from unittest import mock

import torch
from fake_cuda import backward, count_kernels_of_lists, move_to_gpu, simulate_gpu, unset_fake_temporarily
from mmcv.cnn.bricks import DropPath
from mmcv.ops import multi_scale_deform_attn
from mmdet.models.backbones import ResNet
from mmdet.models.layers import CSPLayer
from mmdet.models.layers.transformer.deformable_detr_layers import (
    DeformableDetrTransformerDecoderLayer,
    DeformableDetrTransformerEncoderLayer,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sbp_mmdet import SBPConvNeXt, SBPSwinTransformer, SBPViT, apply_lean
from sbp_mmdet.ops.common import flash as flash
from sbp_mmdet.ops.common.shared_maps import Scope

__all__ = ['AMP', 'BLOCKS', 'Launches', 'count_block_launches', 'count_all_blocks', 'format_table']

IMAGES = (2, 3, 800, 1344)
AMP = {'fp32': None, 'fp16': torch.float16, 'bf16': torch.bfloat16}
_FREE = (
    'empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh set_ _local_scalar_dense '
    'resize_ _unsafe_view promote_types'
).split()
# Number of kernels of operations that launch more than one.
_SEVERAL = dict(
    convolution_backward=lambda out, args: sum(x is not None for x in out),
    native_layer_norm=lambda out, args: 1 + _count_copies(*args[:1]),
    native_layer_norm_backward=lambda out, args: 1 + any(x is not None for x in out[1:]) + _count_copies(*args[:2]),
    _scaled_dot_product_flash_attention_backward=lambda out, args: 3,
    _scaled_dot_product_efficient_attention_backward=lambda out, args: 3,
)


def _channels(x, number):
    """Return random values for each channel of a map."""
    return tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(number))


# Results of SyncBN's kernels, whose shapes torch cannot infer.
_WITHOUT_SHAPES = dict(
    batch_norm_stats=lambda x, *_: _channels(x, 2),
    batch_norm_gather_stats_with_counts=lambda x, *_: _channels(x, 2),
    batch_norm_elemt=lambda x, *_: torch.empty_like(x),
    batch_norm_backward_reduce=lambda grad, *_: _channels(grad, 4),
    batch_norm_backward_elemt=lambda grad, *_: torch.empty_like(grad),
    index=lambda x, where: torch.empty_like(x),  # of the statistics of processes that have images: of all
)
_PRODUCTS = ('mm', 'addmm', 'addmm_', 'bmm', 'baddbmm')


def _count_bytes(tensors) -> int:
    """Return the bytes that tensors occupy in the memory of a GPU."""
    on_gpu = [x for x in tensors if isinstance(x, Tensor) and x.is_cuda]
    sizes = [[n for n, stride in zip(x.shape, x.stride(), strict=True) if stride] for x in on_gpu]
    return sum(math.prod(size) * x.element_size() for size, x in zip(sizes, on_gpu, strict=True))


def _count_moved_bytes(name: str, args, kwargs, out) -> int:
    """Return the bytes that an operation reads and writes."""
    if name in ('convolution_backward', 'convolution_backward_overrideable'):
        grad, x, weight = args[:3]
        dx, dweight, dbias = out
        return sum(
            _count_bytes((grad, *tensors))
            for gradient, tensors in ((dx, (weight, dx)), (dweight, (x, dweight)), (dbias, (dbias,)))
            if gradient is not None
        )
    read = args, {key: value for key, value in (kwargs or {}).items() if key != 'grad_input'}  # which is written
    return _count_bytes(tree_flatten(read)[0]) + _count_bytes(tree_flatten(out)[0])


def _count_copies(*tensors):
    """Return the number of tensors that are not contiguous, which a kernel has to copy first."""
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
        """Whether each row (or column) is contiguous and starts at a multiple of 16 bytes, as cuBLAS's fast kernels
        require."""
        ends = [s for s, n in zip(self.strides, self.shape, strict=True) if n > 1]
        return 1 in ends and all(n * self.itemsize % 16 == 0 for n in (*ends, self.offset) if n != 1)


class Launches(TorchDispatchMode):
    """Context manager that counts kernel launches and records matrix products.

    Attributes:
        number (dict[str, int]): Launches by operation.
        bytes (int): Bytes that they read and write.
        products (list[Factor]): The factors of all matrix products.
    """

    def __init__(self):
        super().__init__()
        self.number, self.products, self.bytes = {}, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fake = hasattr(args[0] if args else None, 'fake_mode')
        if func is torch.ops.aten._local_scalar_dense.default and fake:
            return True  # what mmcv's attention asks of the sizes of its levels, which have no numbers here
        space, name = func._schema.name.split('::')
        knows_shape = not fake or name not in _WITHOUT_SHAPES or (name == 'index' and args[1][0].dtype != torch.bool)
        out = func(*args, **(kwargs or {})) if knows_shape else _WITHOUT_SHAPES[name](*args)
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in tree_flatten((args, out))[0])
        if on_gpu and space != 'prim' and not func.is_view and name not in _FREE:
            number = _SEVERAL[name](out, args) if name in _SEVERAL else count_kernels_of_lists(name, args)
            self.number[name] = self.number.get(name, 0) + number
            self.bytes += _count_moved_bytes(name, args, kwargs, out)
        if name in _PRODUCTS:
            tensors = [x for x in args if isinstance(x, Tensor)][-2:]
            self.products += [
                Factor(name, x.shape[-2:], x.stride()[-2:], x.storage_offset(), x.element_size()) for x in tensors
            ]
        return out

    @property
    def total(self) -> int:
        return sum(self.number.values())


def _size_of_stage(stage):
    """Return number, height and width of the maps of a stage."""
    return IMAGES[0], IMAGES[2] // 4 >> stage, IMAGES[3] // 4 >> stage


def _build_convnext(stage, **settings):
    def build(keys):
        model = SBPConvNeXt(dict(depths=[1] * 4, channels=[128, 256, 512, 1024]), sbp_cfg=keys, **settings)
        block = model.stages[stage][0]
        block.drop_path = DropPath(0.2)
        n, h, w = _size_of_stage(stage)
        return model, block, (n, 128 << stage, h, w), ()

    return build


def _build_swin(stage):
    def build(keys):
        sizes = dict(embed_dims=128, num_heads=(4, 8, 16, 32), depths=(2, 2, 2, 2))
        model = SBPSwinTransformer(**sizes, sbp_cfg=keys, drop_path_rate=0.2)
        n, h, w = _size_of_stage(stage)
        return model, model.stages[stage].blocks[1], (n, h * w, 128 << stage), ((h, w),)

    return build


def _build_vit(keys):
    arch = dict(num_layers=2, embed_dims=768, num_heads=12)
    model = SBPViT(arch, sbp_cfg=keys, img_size=224, drop_path_rate=0.2)
    n, h, w = _size_of_stage(2)
    return model, model.blocks[1], (n, h * w + 1, 768), ()


def _build_resnet(stage, whole=False):
    def build(keys):
        model = ResNet(50, norm_cfg=dict(type='BN', requires_grad=True), norm_eval=True, frozen_stages=0)
        _change(model, keys)
        n, h, w = _size_of_stage(stage)
        blocks = getattr(model, f'layer{stage + 1}')
        if whole:  # a chain; the first block halves the map
            return model, blocks, (n, 128 << stage, 2 * h, 2 * w), ()
        return model, blocks[1], (n, 256 << stage, h, w), ()

    return build


def _build_cspnext(norm):
    def build(keys):
        model = CSPLayer(128, 128, num_blocks=1, use_cspnext_block=True, norm_cfg=norm, act_cfg=dict(type='SiLU'))
        _change(model, keys)
        n, h, w = _size_of_stage(1)
        return model, model, (n, 128, h, w), ()

    return build


def _change(model, keys):
    if keys['preset'] != 'none':
        apply_lean(model, verify=False, **keys)


def _build_dino_layer(decodes):
    """Return a layer of DINO with the four levels of an image and 900 queries of the decoder."""

    def build(keys):
        attention = dict(embed_dims=256, num_levels=4, dropout=0.0)
        ffn = dict(embed_dims=256, feedforward_channels=2048, ffn_drop=0.0)
        if decodes:
            own = dict(embed_dims=256, num_heads=8, dropout=0.0)
            layer = DeformableDetrTransformerDecoderLayer(own, attention, ffn_cfg=ffn)
        else:
            layer = DeformableDetrTransformerEncoderLayer(attention, ffn_cfg=ffn)
        model = Holder(layer)
        _change(model, keys)
        n = IMAGES[0]
        sizes = [(-(-IMAGES[2] // stride), -(-IMAGES[3] // stride)) for stride in (8, 16, 32, 64)]
        tokens = sum(h * w for h, w in sizes)
        number = 900 if decodes else tokens

        def run(x):
            def empty(*shape, dtype=torch.float32):
                return torch.empty(shape, dtype=dtype, device='cuda')

            given = dict(
                query_pos=empty(n, number, 256),
                key_padding_mask=empty(n, tokens, dtype=torch.bool),
                reference_points=empty(n, number, 4, 4 if decodes else 2),
                spatial_shapes=empty(4, 2, dtype=torch.int64),
                level_start_index=empty(4, dtype=torch.int64),
            )
            if decodes:
                given['value'] = empty(n, tokens, 256).requires_grad_() * 1
            return layer(x, **given)

        return model, run, (n, number, 256), ()

    return build


class _Kernel:
    """Replacement of the kernel of deformable attention: one launch that reads and writes as much as CUDA's."""

    @staticmethod
    def ms_deform_attn_forward(value, shapes, starts, places, weights, im2col_step):
        return _count_as_one_launch(
            value.new_empty(*places.shape[:2], value.shape[2] * value.shape[3]), places, weights
        )

    @staticmethod
    def ms_deform_attn_backward(value, shapes, starts, places, weights, grad, *grads, im2col_step):
        _count_as_one_launch(*grads)


def _count_as_one_launch(*tensors):
    torch._foreach_zero_(tensors)
    return tensors[0]


class Holder(nn.Module):
    """Module with one layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer


class _Group:
    """Stands for the process group of two GPUs."""

    @staticmethod
    def _get_backend_name():
        return 'gloo'  # with lists, whatever the version of torch


@contextlib.contextmanager
def _simulate_two_processes():
    """Simulate a group of two processes, in which each collective operation is one launch."""

    def gather(outputs, own, *args, **kwargs):
        torch._foreach_zero_(outputs)

    def reduce(tensor, *args, **kwargs):
        tensor.zero_()

    stand_ins = dict(is_initialized=lambda: True, get_world_size=lambda group=None: 2, get_rank=lambda group=None: 0)
    stand_ins |= dict.fromkeys(('all_gather', 'all_gather_into_tensor', '_all_gather_base'), gather) | dict(
        all_reduce=reduce
    )
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.distributed, name, stand_in))
        stack.enter_context(mock.patch.object(type(torch.distributed.group), 'WORLD', _Group()))
        yield


BLOCKS = {
    'ConvNeXt-B, stage 1': _build_convnext(0),
    'ConvNeXt-B, stage 3': _build_convnext(2),
    'ConvNeXt V2-B, stage 3': _build_convnext(2, use_grn=True, layer_scale_init_value=0.0),
    'Swin-B, stage 1, shifted': _build_swin(0),
    'Swin-B, stage 3, shifted': _build_swin(2),
    'ViT-B': _build_vit,
    'ResNet-50, stage 2': _build_resnet(1),
    'ResNet-50, stage 4': _build_resnet(3),
    'ResNet-50, stage 2, whole': _build_resnet(1, whole=True),
    'CSPNeXt, BN': _build_cspnext(dict(type='BN')),
    'CSPNeXt, SyncBN': _build_cspnext(dict(type='SyncBN')),
    'DINO, encoder layer': _build_dino_layer(False),
    'DINO, decoder layer': _build_dino_layer(True),
}


def count_block_launches(mode, name: str, preset: str, dtype: torch.dtype | None) -> tuple[Launches, Launches]:
    """Count the launches of a block's forward and backward pass.

    Args:
        mode (FakeTensorMode): Result of :func:`fake_cuda.simulate_gpu`, entered.
        name (str): Key of ``BLOCKS``.
        preset (str): 'none' or another preset.
        dtype (torch.dtype | None): Data type of autocast. If ``None``, autocast is off.
    """
    with unset_fake_temporarily():
        keys = dict(preset=preset)
        if preset != 'none' and name.startswith(('ConvNeXt', 'Swin', 'ViT')):
            keys.update(skip_dropped_images=False, verify=False)  # all images have to run, whatever is drawn
        model, block, shape, rest = BLOCKS[name](keys)
        model.train()
    move_to_gpu(mode, model)
    images = torch.empty(IMAGES, device='cuda')
    for _ in range(2):  # the first pass fills the caches of this size
        x = torch.empty(shape, device='cuda', requires_grad=True) * 1  # not a leaf, as within a network
        there, back = Launches(), Launches()
        with (
            mock.patch.object(flash, '_ampere', lambda index: True),
            mock.patch.object(multi_scale_deform_attn, 'ext_module', _Kernel),
            mock.patch.object(multi_scale_deform_attn, 'IS_CUDA_AVAILABLE', True),
            contextlib.ExitStack() as passes,
        ):
            passes.enter_context(Scope())  # as within the network
            if 'SyncBN' in name:
                passes.enter_context(_simulate_two_processes())
            for draws in getattr(model, 'step_draws', []):
                passes.enter_context(draws.forward_pass(images))
            with torch.autocast('cuda', dtype, enabled=dtype is not None), there:
                out = block(x, *rest)
            with back:
                backward([out])
    return there, back


def count_all_blocks(mode) -> list[dict]:
    """Return a row for each block, precision and preset."""
    rows = []
    for name, amp in itertools.product(BLOCKS, ('bf16', 'fp16')):
        for preset in ('none', 'exact', 'exact_min', 'int8', 'sampled', 'sbp'):
            if preset in ('sampled', 'sbp') and name.startswith(('ResNet', 'CSPNeXt', 'DINO')):
                continue  # nothing to drop in convolutions; DINO's layer asks for the sizes of its maps
            if preset == 'exact_min' and name.startswith('DINO'):
                continue  # checkpointing asks the GPU for the state of its generator
            if amp == 'bf16' and name.startswith('DINO'):
                continue  # mmcv's kernel has no bf16
            there, back = count_block_launches(mode, name, preset, AMP[amp])
            passes = {preset: (there, back)}
            if preset == 'none':  # checkpointing runs the plain forward pass once more
                plain = there.bytes + back.bytes
                passes['with_cp'] = (there, there, back)
            for preset, parts in passes.items():
                launches = sum(part.total for part in parts)
                relative = sum(part.bytes for part in parts) / plain
                rows.append(dict(block=name, amp=amp, preset=preset, launches=launches, relative=relative))
    return rows


def format_table(rows: list[dict]) -> str:
    """Return launches of both passes and bytes relative to plain, with a row for each block and precision."""
    presets = list(dict.fromkeys(row['preset'] for row in rows))
    cells = {(r['block'], r['amp'], r['preset']): f'{r["launches"]} ({r["relative"]:.2f})' for r in rows}
    lines = ['| block | ' + ' | '.join(presets) + ' |', '|---|' + '---|' * len(presets)]
    for block, amp in dict.fromkeys((row['block'], row['amp']) for row in rows):
        own = (cells.get((block, amp, preset), '') for preset in presets)
        lines.append(f'| {block}, {amp} | ' + ' | '.join(own) + ' |')
    return '\n'.join(lines)


if __name__ == '__main__':
    with simulate_gpu() as mode:
        print(format_table(count_all_blocks(mode)))
