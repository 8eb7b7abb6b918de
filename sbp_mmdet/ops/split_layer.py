"""The middle of a Res2Net block as one layer of a chain: a convolution with norm and ReLU for each group of channels.

With the groups h_1, ..., h_S of the input's channels and the layers f_i = relu(norm(conv(.))),

    r_1 = f_1(h_1),   r_i = f_i(h_i + r_{i-1}),   r_S = h_S,

and the output r is the concatenation of all r_i. In the first block of a stage r_{i-1} is not added, and h_S may be
pooled. The inputs of all convolutions follow from h and r, so nothing else is saved, and no convolution is recomputed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .common.average_pool import AveragePool, average_pool, average_pool_backward
from .common.batch_and_group_norms import affine_of_norm
from .common.fixed_norms import FixedGradients
from .residual_layer import KeptLayer, Layer, layer_backward, run_layer

__all__ = ['SplitLayer', 'SplitSettings']

aten = torch.ops.aten


class SplitSettings(NamedTuple):
    """Settings of a :class:`SplitLayer`.

    Attributes:
        number (int): Number of its convolutions; there is one more group of channels.
        adds (bool): Whether the output of each group is added to the input of the next one.
        pool (AveragePool | None): Pooling of the last group. If ``None``, it is not pooled. Default: None.
    """

    number: int
    adds: bool
    pool: AveragePool | None = None

    def gather(self, values: Sequence) -> list:
        """Put the values of the split layer's convolutions into one list.

        Args:
            values (Sequence): Values of all convolutions of a block, of which the split layer's begin with the second.
        """
        return [values[0], values[1 : self.number + 1], *values[self.number + 1 :]]


class SplitLayer(NamedTuple):
    """Convolutions of a split layer in one forward or backward pass.

    Attributes:
        layers (Sequence[Layer]): The convolutions with norm.
        settings (SplitSettings): How they belong together.
    """

    layers: Sequence[Layer]
    settings: SplitSettings

    @property
    def s(self):
        """Settings of the first convolution, whose form and precision are those of all."""
        return self.layers[0].s

    def run(self, h: Tensor) -> tuple[Tensor, Tensor, tuple[KeptLayer | None, ...] | None]:
        """Run the layer.

        Args:
            h (Tensor): Input, shape (N, C, H, W).

        Returns:
            tuple[Tensor, Tensor, tuple[KeptLayer | None, ...] | None]: Outputs of the convolutions and of the last
            group, concatenated, with r where a norm has no statistics of the map; r; and what each convolution needs
            to run again, or ``None`` if no norm has such statistics.
        """
        *groups, last = self._split(h)
        last, convolved, outputs, saved = average_pool(self.settings.pool, last), [], [], []
        for i, (layer, group) in enumerate(zip(self.layers, groups, strict=True)):
            z, u, own = run_layer(layer, self._input(i, group, outputs))
            convolved.append(z)
            outputs.append(torch.relu_(u if u.dtype is z.dtype else u.to(z.dtype)))
            saved.append(own)
        r = torch.cat([*outputs, last], 1)
        if not any(saved):
            return r, r, None
        return torch.cat([*convolved, last], 1), r, tuple(saved)

    def affine(self, saved: tuple[KeptLayer | None, ...]) -> tuple[Tensor, Tensor]:
        """Return :func:`.affine_of_norm` of all channels of the first result of :meth:`run`: 1 and 0 where that is r.

        Args:
            saved (tuple[KeptLayer | None, ...]): Third result of :meth:`run`.
        """
        width, numbers = self.layers[0].t.weight.shape[0], []
        for layer, own in zip(self.layers, saved, strict=True):
            numbers.append(None if own is None else affine_of_norm(layer.s, layer.t, own.statistics, width))
        one = torch.ones_like(next(filter(None, numbers))[0])
        numbers = [own or (one, torch.zeros_like(one)) for own in (*numbers, None)]
        images = max(len(scale) for scale, _ in numbers)  # numbers of a group norm differ between images
        scales, shifts = zip(*numbers, strict=True)
        return tuple(
            torch.cat([x if len(x) == images else x.expand(images, -1, 1, 1) for x in of], 1) for of in (scales, shifts)
        )

    def backward(
        self,
        h: Tensor,
        z: Tensor | None,
        r: Tensor,
        saved: tuple[KeptLayer | None, ...] | None,
        grad: Tensor,
        needs: Sequence[Sequence[bool]],
    ) -> tuple[Tensor, list[FixedGradients | dict]]:
        """Compute the gradients.

        Args:
            h (Tensor): Input.
            z (Tensor | None): First result of :meth:`run`. Only needed if ``saved`` is not ``None``.
            r (Tensor): Output.
            saved (tuple[KeptLayer | None, ...] | None): Third result of :meth:`run`.
            grad (Tensor): Gradient of the output where it is positive, and zero elsewhere.
            needs (Sequence[Sequence[bool]]): For each convolution, which parameters need gradients.

        Returns:
            tuple[Tensor, list]: Gradient of the input, and what :func:`.layer_backward` finds for each convolution.
        """
        *groups, last = self._split(h)
        *outputs, _ = self._split(r)
        *grads, of_last = self._split(grad)
        convolved = [None] * len(groups) if saved is None else self._split(z)
        of_groups, found, after = [], [], None
        for i in reversed(range(len(groups))):
            own = grads[i] if after is None else aten.threshold_backward.default(after, outputs[i], 0).add_(grads[i])
            x, kept = self._input(i, groups[i], outputs), None if saved is None else saved[i]
            of_input, gradients = layer_backward(self.layers[i], x, convolved[i], kept, own, needs[i], True)
            of_groups, found = [of_input, *of_groups], [gradients, *found]
            after = of_input if self.settings.adds else None
        of_last = average_pool_backward(self.settings.pool, last.contiguous(), of_last.contiguous())
        return torch.cat([*of_groups, of_last], 1), found

    def _split(self, x):
        return torch.split(x, x.shape[1] // (len(self.layers) + 1), 1)

    def _input(self, i, group, outputs):
        """Return the input of a convolution."""
        return (group + outputs[i - 1] if i and self.settings.adds else group).contiguous()
