"""RepVGG blocks of mmyolo: a 3x3 and a 1x1 convolution with norms side by side, and a norm, whose outputs are added."""

import dataclasses

from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.conv_norm_act import conv_norm
from ..presets import Settings
from .base import LeanModule, adapter
from .bindings import Bypassed
from .conv_module import ConvNormActBinding

__all__ = ['ConvNormBranchBinding', 'LeanRepVGGBlock']


@dataclasses.dataclass(frozen=True, eq=False)
class ConvNormBranchBinding(ConvNormActBinding):
    """``norm(conv(x))``, a branch whose convolution the backward pass recomputes.

    Attributes:
        holder (nn.Module | None): ``ConvModule`` that holds both.
        always (bool): Whether to recompute with every preset, and not only with ``exact_min``.
    """

    holder: nn.Module | None = None
    always: bool = False

    def __call__(self, form: Form, x: Tensor):
        """Run the branch on (N, C, H, W)."""
        recomputes = (self.always or form.minimal) and 'norm' in self.fused and x.numel()
        if not recomputes:
            return super().__call__(form, x)
        settings, tensors = self._layer.inputs(form, x, autocast_dtype(x) or x.dtype)
        return conv_norm(dataclasses.replace(settings, recompute=True), tensors)

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        yield self.holder, 'convolution and norm'
        yield from super().bypasses(form)

    def usable(self, form: Form, root: nn.Module, bypassed: Bypassed):
        """See :meth:`.Binding.usable`. The branch runs its own code if anything of it is unknown."""
        problems = self.problems(root, bypassed)
        return (None, problems) if problems else (self, [])


@adapter('mmyolo.models.layers.yolo_bricks.RepVGGBlock')
class LeanRepVGGBlock(LeanModule):
    """RepVGG block, which saves the output of the 3x3 convolution and its own; ``exact_min`` saves its own alone.

    The 1x1 convolution takes a ninth of the work of the 3x3 convolution, so it is always recomputed.
    """

    dims = 4
    checkpointed = True
    samples = has_reference = False
    separable = shares_maps = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        dense, point = self.rbr_dense, self.rbr_1x1
        return dict(
            dense=ConvNormBranchBinding(dense.conv, dense.norm, holder=dense),
            point=ConvNormBranchBinding(point.conv, point.norm, holder=point, always=True),
        )

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""
        same = 0 if self.rbr_identity is None else self.rbr_identity(x)
        dense, point = self.binding('dense'), self.binding('point')
        wide = self.rbr_dense(x) if dense is None else dense(self.form, x)
        small = self.rbr_1x1(x) if point is None else point(self.form, x)
        return self.nonlinearity(self.se(wide + (self.alpha * small if self.alpha else small) + same))

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        if 'rbr_reparam' in module._modules:
            return 'its branches are one convolution already'
        held = module.rbr_dense.with_norm and module.rbr_1x1.with_norm
        return None if held else 'a branch has no norm'
