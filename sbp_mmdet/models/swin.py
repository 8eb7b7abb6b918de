"""``SBPSwinTransformer``: mmdet's Swin Transformer with SBP and exact lean attention."""

import contextlib

import torch
from mmdet.models.backbones import SwinTransformer
from mmdet.registry import MODELS
from torch import Tensor

from ..draws import Drawn, warn_where_frozen
from ..settings import SBPSettings
from .swin_layers import ThinSwinBlock
from .thin import thin_out

__all__ = ['SBPSwinTransformer']


@MODELS.register_module()
class SBPSwinTransformer(SwinTransformer):
    """Swin Transformer for memory-efficient training by Stochastic Backpropagation (SBP).

    The forward pass, the arguments and the names of the parameters are those of mmdet's ``SwinTransformer``. In
    training, the channel MLPs and the patch merging of the leading stages send gradients from a kept subset of the
    positions (section 3.2). The attention stays exact. Unless ``implementation='reference'``, it stores its normalised
    input only and runs its windows again in the backward pass, some at a time. Outside of training and without
    gradients nothing is drawn.

    Args:
        *args, **kwargs: Of mmdet's ``SwinTransformer``.
        sbp_cfg (dict | None): See :class:`sbp_mmdet.settings.SBPSettings`; None is mmdet's backbone. ``recompute``
            means the hidden layer of the MLP and the patch embedding; the attention runs again in any case.
            Default: None.

    Raises:
        ValueError: For a value that cannot be honoured, naming it and the remedy.
    """

    def __init__(self, *args, sbp_cfg: dict | None = None, **kwargs):
        # mmdet's class reads rates out of a tensor, and on 'meta', where checks build models, there is nothing to read.
        on_meta = torch.empty(()).is_meta
        with torch.device('cpu') if on_meta else contextlib.nullcontext():
            super().__init__(*args, **kwargs)
        if on_meta:
            self.to('meta')
        self.depths = tuple(len(stage.blocks) for stage in self.stages)
        self.sbp = None if sbp_cfg is None else SBPSettings.parse(sbp_cfg, self.depths, absent=('attention',))
        if self.sbp is None:
            return
        if self.sbp.recompute == 'block':
            raise ValueError(
                "sbp_cfg: recompute='block' is not there for Swin, whose attention runs again already: use True, and "
                'with_cp=True to store the inputs of blocks only'
            )
        blocks = {(i, j): block for i, stage in enumerate(self.stages) for j, block in enumerate(stage.blocks)}
        for (i, j), block in blocks.items():
            if reason := ThinSwinBlock.refusal(block, self.sbp):
                raise ValueError(f'sbp_cfg cannot be used with block {j} of stage {i}: {reason}')
        layers = {key: (block, ThinSwinBlock) for key, block in blocks.items()}
        layers |= ThinSwinBlock.others(self, self.sbp)
        self._draws = thin_out(self, self.sbp, layers, self.patch_embed.projection.stride[0], rounds_up=True)

    def keep_ratios(self) -> dict[tuple, float]:
        """The layers that SBP thins out, see :meth:`.settings.SBPSettings.layer_ratios`; frozen ones do not appear."""
        return {} if self.sbp is None else self._draws.model.keep_ratios()

    def stage_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """(height, width) of each stage's feature map for an image of the given size in pixels."""
        patch = self.patch_embed.projection.stride[0]
        sizes = [(-(-height // patch), -(-width // patch))]
        for _ in self.depths[1:]:
            sizes.append(tuple(-(-n // 2) for n in sizes[-1]))
        return sizes

    def draw(self, x: Tensor, again: bool = False) -> Drawn:
        """What is random in one training step, see :meth:`.convnext.SBPConvNeXt.draw`."""
        if self.sbp is None:
            return Drawn({}, {})
        if not again:
            self._draws.begin(self, (x,))
        elif self._draws.now is None:
            raise ValueError('again=True: no pass has drawn anything; run one in training mode first')
        return self._draws.latest()

    def train(self, mode: bool = True) -> 'SBPSwinTransformer':
        """As ``nn.Module.train``; frozen stages stay in evaluation mode."""
        super().train(mode)
        if mode:
            warn_where_frozen(self)
        return self
