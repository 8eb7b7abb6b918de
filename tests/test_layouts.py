"""Channels last stays channels last: no map of the backward pass comes in the other layout, and none is copied."""

import pytest
import torch
from oracles import image, loss_of, small_backbone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet.masks import positions
from sbp_mmdet.models.heads import sbp_map
from sbp_mmdet.ops import memory_format
from sbp_mmdet.settings import PRESETS

# Not 'reference', which is plain autograd.
FUSED = [name for name, p in PRESETS.items() if p.sbp_cfg is not None and name != 'reference']
LAYOUTS = {'nchw': torch.contiguous_format, 'nhwc': torch.channels_last}
copy = torch.ops.aten.copy_.default
clone = torch.ops.aten.clone.default


class CopiesOfMaps(TorchDispatchMode):
    """Counts copies of a map (N, C, H, W) into the other layout."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (copy, clone):
            source = args[1] if func is copy else args[0]
            maps = [source, out]
            if all(isinstance(x, Tensor) and x.dim() == 4 and min(x.shape) > 1 for x in maps):
                if memory_format(source) != memory_format(out):
                    self.found.append(tuple(source.shape))
        return out


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('preset', FUSED)
def test_gradients_have_the_layout_of_the_activations(preset, layout):
    backbone = small_backbone(PRESETS[preset].sbp_cfg, dtype=torch.float32).to(memory_format=LAYOUTS[layout])
    x = image(height=72, width=104, dtype=torch.float32).contiguous(memory_format=LAYOUTS[layout])
    seen = {}

    def watch(name):
        def hook(module, args, out):
            assert memory_format(out) == LAYOUTS[layout], name
            out.register_hook(lambda grad: seen.update({name: memory_format(grad)}))

        return hook

    for name, module in backbone.named_modules():
        if name.count('.') == 2 and name.startswith('stages') or name in ('downsample_layers.1', 'downsample_layers.2'):
            module.register_forward_hook(watch(name))
    loss = loss_of(backbone(x))
    with CopiesOfMaps() as copies:
        loss.backward()
    if layout == 'nchw':
        seen.pop('stages.3.0')  # it comes from a plain norm of torch, which works on (N, H, W, C)
    assert len(seen) >= 5 and set(seen.values()) == {LAYOUTS[layout]}, seen
    if layout == 'nhwc':
        assert not copies.found


def test_heads_get_maps_that_are_channels_last():
    """By strides that convolutions know: a map of one column has others."""
    conv, strides = torch.nn.Conv2d(6, 4, 1), []
    transposed = torch.nn.ConvTranspose2d(6, 4, 2, 2)
    x = torch.randn(2, 6, 5, 7)
    keep = positions(torch.arange(35).view(5, 7) % 2 == 0)
    for layout in LAYOUTS.values():
        for f, upsampling in ((conv, 1), (transposed, 2)):

            def run(x, f=f):
                strides.append((x.shape, x.stride()))
                return f(x)

            out = sbp_map(run, x.contiguous(memory_format=layout), keep, upsampling)
            torch.testing.assert_close(out, f(x))
            assert out.is_contiguous(memory_format=layout)
    assert all(stride == (c * w, 1, c * w, c) for (_, c, _, w), stride in strides)
