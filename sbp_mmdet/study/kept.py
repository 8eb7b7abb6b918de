"""What SBP leaves exact: at the last SBP layer, the gradient of every kept position (paper, section 3.2).

Nothing above that layer drops anything. So the gradient that its kept positions send back is the exact one, and only
the layers below it receive less.
"""

from typing import NamedTuple

import torch
from mmengine.config import Config
from torch import Tensor, nn

from ..families import Tap, require
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
        config (Config): Config of a detector whose backbone SBP applies to.
        sbp_cfg (dict): The setting.
        weights (nn.Module): The exact pass' backbone.
        exact (ExactPass): A batch.

    Returns:
        KeptCheck | None: None if the setting drops nothing, if kept positions share gradients with dropped ones
        ('pool'), if the layer got no gradient (stochastic depth), if the record of the family has no ``tap``, or if the
        setting never holds this gradient where it can be seen: int8 storage runs the convolution past its module.
    """
    tap = require(config.model.get('backbone')).tap
    backbone = backbone_with(config, sbp_cfg, weights)
    layers = in_order(backbone.keep_ratios())
    if not layers or tap is None or backbone.sbp.dropped == 'pool':
        return None
    last = layers[-1]
    seen = tap(backbone, last)
    found = _gradient_at(backbone, seen, exact)
    kept = backbone.draw(exact.images, again=True).positions[last].keep.cpu()
    plain = backbone_with(config, None, weights)
    expected = _gradient_at(plain, tap(plain, last), exact)
    if found is None or expected is None or not expected.any():
        return None
    images, _, height, width = found.shape
    kept = _kept_inputs(kept, seen.patch, height, width).expand(images, -1)  # the same in all images, or each its own
    keep = torch.zeros(images, height * width, dtype=torch.bool).scatter_(1, kept, True)
    found, expected = (g.flatten(2).transpose(1, 2) for g in (found, expected))
    largest = expected[keep].abs().max()
    if not largest:
        return None
    dropped = found[~keep].abs().max() if not keep.all() else torch.zeros(())
    error = (found - expected)[keep].abs().max()
    return KeptCheck(seen.name, (error / largest).item(), (dropped / largest).item())


def in_order(layers: dict[tuple, float]) -> list[tuple]:
    """Keys of a backbone's ``keep_ratios()`` as the forward pass meets them."""
    return sorted(layers, key=lambda key: (key[0], -1 if key[1] == 'downsample' else key[1]))


def _kept_inputs(keep: Tensor, patch, height, width):
    """A kept output of a layer that reads patches is a kept patch of its input."""
    rows, columns = keep // (width // patch), keep % (width // patch)
    return torch.cat([(patch * rows + i) * width + patch * columns + j for i in range(patch) for j in range(patch)], -1)


def _gradient_at(backbone, tap: Tap, exact):
    """The gradient that the tap shows, (N, C, H, W)."""
    found = []
    tap.module.register_full_backward_hook(
        lambda module, inputs, outputs: found.append((outputs if tap.at_output else inputs)[0])
    )
    estimate(backbone, exact)
    return found[0].detach().float().cpu() if found and found[0] is not None else None
