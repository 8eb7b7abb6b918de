"""What SBP leaves exact: at the last SBP layer, the gradient of every kept position (paper, section 3.2).

Nothing above that layer drops anything. So the gradient that its kept positions send back is the exact one, and only
the layers below it receive less.
"""

from typing import NamedTuple

import torch
from mmengine.config import Config
from torch import Tensor, nn

from .gradients import ExactPass, backbone_with, estimate

__all__ = ['KeptCheck', 'check_kept']


class KeptCheck(NamedTuple):
    """The gradient at the input of the last SBP layer, next to the exact one.

    Attributes:
        layer (str): Its name in the backbone.
        error (float): Largest difference at a kept position, relative to the largest exact gradient there.
        dropped (float): Largest gradient at a dropped position, relative to the same; 0 for the paper's method.
    """

    layer: str
    error: float
    dropped: float


def check_kept(config: Config, sbp_cfg: dict, weights: nn.Module, exact: ExactPass) -> KeptCheck | None:
    """Compares kept positions at the last SBP layer.

    Args:
        config (Config): Config of a detector with a ConvNeXt.
        sbp_cfg (dict): The setting.
        weights (nn.Module): The exact pass' backbone.
        exact (ExactPass): A batch.

    Returns:
        KeptCheck | None: None if the setting drops nothing, if the layer got no gradient (stochastic depth), or if the
        setting never holds this gradient where it can be seen: int8 storage runs the convolution past its module.
    """
    backbone = backbone_with(config, sbp_cfg, weights)
    layers = in_order(backbone.keep_ratios())
    if not layers:
        return None
    last, given = layers[-1], []
    backbone.get_submodule(_name(last)).register_forward_pre_hook(lambda module, args: given.append(args[1].keep.cpu()))
    found = _gradient_at(backbone, last, exact)
    expected = _gradient_at(backbone_with(config, None, weights), last, exact)
    if found is None or expected is None or not expected.any():
        return None
    keep = torch.zeros(found.shape[2] * found.shape[3], dtype=torch.bool)
    keep[_kept_inputs(given[0], last, *found.shape[2:])] = True
    found, expected = found.flatten(2), expected.flatten(2)
    largest = expected[..., keep].abs().max()
    if not largest:
        return None
    dropped = found[..., ~keep].abs().max() if not keep.all() else torch.zeros(())
    error = (found - expected)[..., keep].abs().max()
    return KeptCheck(_name(last), (error / largest).item(), (dropped / largest).item())


def in_order(layers: dict[tuple, float]) -> list[tuple]:
    """Keys of ``SBPConvNeXt.keep_ratios`` as the forward pass meets them."""
    return sorted(layers, key=lambda key: (key[0], -1 if key[1] == 'downsample' else key[1]))


def _name(layer):
    stage, block = layer
    return f'downsample_layers.{stage}' if block == 'downsample' else f'stages.{stage}.{block}'


def _kept_inputs(keep: Tensor, layer, height, width):
    """A kept output of a downsampling layer is a kept 2x2 patch of its input."""
    if layer[1] != 'downsample':
        return keep
    rows, columns = keep // (width // 2), keep % (width // 2)
    return torch.cat([(2 * rows + i) * width + 2 * columns + j for i in range(2) for j in range(2)])


def _gradient_at(backbone, layer, exact):
    """Of the channel MLP's input, or of the downsampling layer's; shape (N, C, H, W)."""
    module = backbone.get_submodule(_name(layer))
    found = []
    if layer[1] == 'downsample':
        module.register_full_backward_hook(lambda module, inputs, outputs: found.append(inputs[0]))
    else:
        module.depthwise_conv.register_full_backward_hook(lambda module, inputs, outputs: found.append(outputs[0]))
    estimate(backbone, exact)
    return found[0].detach().float().cpu() if found and found[0] is not None else None
