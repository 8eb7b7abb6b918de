"""SBP outside of the backbone: in the pointwise layers of neck and heads (paper, last paragraph of section 5.2).

custom_hooks = [
    dict(type='SBPModulesHook', modules=['neck.lateral_convs', 'rpn_head', 'roi_head.mask_head'], keep_ratio=0.5),
]

What a pointwise layer stores is its input, and thinning that out gains nothing where the operation before it has stored
the same tensor as its output: a ReLU, for instance. So heads are thinned out from the last 3x3 convolution on, as one
operation: ReLU and both predictions of an RPN; upsampling, ReLU and prediction of a mask head.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import RPNHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.registry import HOOKS
from torch import Tensor, nn

from ..functional import pooled, sbp
from ..masks import SAMPLERS, Positions, parse_keep_ratio
from ..ops import memory_format
from ..shared_draws import MapDraws
from ..surgery import Mixin, ModelHook, detectors, members, mix_in

__all__ = ['SBPModulesHook', 'sbp_map', 'sbp_modules']


def sbp_map(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions, upsampling: int = 1) -> Tensor:
    """:func:`sbp_mmdet.sbp` for feature maps.

    Args:
        f (Callable): Maps (N, C, H, W) to (N, C', u * H, u * W), u = ``upsampling``, each position of the input
            independently of the others.
        x (Tensor): Shape (N, C, H, W).
        positions (Positions): Kept and dropped positions of ``x``. Where one of both is empty, all are kept. With
            ``nearest`` gradients are pooled (:func:`.functional.pooled`).
        upsampling (int): Output positions for each input position, in each direction. Default: 1.

    Returns:
        Tensor: Shape (N, C', u * H, u * W), laid out like ``x``.
    """
    if not positions.keep.shape[-1] or not positions.drop.shape[-1]:
        return f(x)

    def on_tokens(tokens):  # (N, K, C) -> a map of one row -> (N, K, C', u, u)
        # Its strides are those of channels last: convolutions take it as it is, where one of a single column is copied.
        out = f(tokens.unsqueeze(1).permute(0, 3, 1, 2))
        return out.unflatten(3, (tokens.shape[1], upsampling)).permute(0, 3, 1, 2, 4)

    thin = sbp if positions.nearest is None else pooled
    out = thin(on_tokens, x.flatten(2).transpose(1, 2), positions).unflatten(1, x.shape[2:])  # (N, H, W, C', u, u)
    if memory_format(x) == torch.channels_last:
        return out.permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)
    return out.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3).contiguous()


class _ThinConv(Mixin):
    """Mixed into the class of a 1x1 convolution."""

    def forward(self, x):
        forward = super().forward
        return sbp_map(forward, x, self._sbp_draws.of(x, as_backbone=True)) if _trains(self) else forward(x)


class _ThinRPN(Mixin):
    """Mixed into the class of an RPN: ReLU and both 1x1 convolutions are one operation."""

    def forward_single(self, x):
        if not _trains(self):
            return super().forward_single(x)
        x = self.rpn_conv(x)

        def predict(x):
            x = F.relu(x)
            return torch.cat([self.rpn_cls(x), self.rpn_reg(x)], 1)

        out = sbp_map(predict, x, self._sbp_draws.of(x))
        return out.split([self.rpn_cls.out_channels, self.rpn_reg.out_channels], 1)


class _ThinMaskHead(Mixin):
    """Mixed into the class of a mask head: all that follows its 3x3 convolutions is one operation.

    It stores its input and runs again for the kept positions: what it makes of a position is 16 times as large.
    """

    def forward(self, x):
        if not _trains(self):
            return super().forward(x)
        for conv in self.convs:
            x = conv(x)

        def predict(x):
            if self.upsample is not None:
                x = self.relu(self.upsample(x))
            return self.conv_logits(x)

        def predict_again(x):
            return cp.checkpoint(predict, x, use_reentrant=False, preserve_rng_state=False)

        return sbp_map(predict_again, x, self._sbp_draws.of(x), 1 if self.upsample is None else self.scale_factor)


def _trains(module):
    return module.training and torch.is_grad_enabled()


def sbp_modules(model: nn.Module, modules: Sequence[str], keep_ratio: float = 0.5, sampler: str = 'grid') -> list[str]:
    """Lets pointwise layers of submodules send gradients from a kept subset of the positions (section 3.2).

    In training only, and drawn anew in each step; 1x1 convolutions use the backbone's masks where sizes, ratio and
    sampler agree. Maps of so few positions that none would be kept stay exact. Names and shapes of parameters do not
    change.

    Args:
        model (nn.Module): The model; changed in place.
        modules (Sequence[str]): Names of submodules: 1x1 convolutions, ConvModules of one, RPN heads, FCN mask heads. A
            list of modules means each of its members.
        keep_ratio (float): r in (0, 1]. Default: 0.5.
        sampler (str): 'grid' or 'random'. Default: 'grid'.

    Returns:
        list[str]: Names of the modules that are thinned out now.

    Raises:
        ValueError: If the model has no such submodule, or one whose positions are not independent, or for a ratio or
            sampler that cannot be honoured; nothing is changed then.
    """
    parse_keep_ratio(keep_ratio)
    if sampler not in SAMPLERS:
        raise ValueError(f'sampler={sampler!r} is unknown; choose one of {SAMPLERS}')
    found = [(name, *_thinned(name, module)) for name, module in members(model, modules)]
    by_backbone = {}
    for name, module, mixin in found:
        by_backbone.setdefault(_backbone(model, name), []).append((module, mixin))
    for backbone, changes in by_backbone.items():
        draws = MapDraws(backbone, keep_ratio, sampler, [module for module, _ in changes])
        for module, mixin in changes:
            if not isinstance(module, mixin):
                mix_in(module, mixin)
            module._sbp_draws = draws
        backbone.register_forward_pre_hook(draws.begin, with_kwargs=True)
    return [name for name, _, _ in found]


def _backbone(model, name):
    """What begins the passes of a submodule: the backbone beside it, the student's or the teacher's for instance."""
    for prefix, detector in detectors(model).items():
        if not prefix or name.startswith(f'{prefix}.'):
            return detector.backbone
    return model


def _thinned(name, module):
    """The module to change for the one that was named, and what to mix into its class."""
    if isinstance(module, ConvModule):
        module = module.conv
    if isinstance(module, nn.Conv2d):
        for key, value in dict(kernel_size=(1, 1), stride=(1, 1), padding=(0, 0)).items():
            if getattr(module, key) != value:
                raise ValueError(f'{name} is a convolution with {key}={getattr(module, key)}; {_APPLIES}')
        return module, _ThinConv
    if isinstance(module, RPNHead) and _is_as_in(module, RPNHead, 'forward_single'):
        return module, _ThinRPN
    if isinstance(module, FCNMaskHead) and _is_as_in(module, FCNMaskHead, 'forward'):
        if module.upsample_method not in (None, 'deconv'):
            raise ValueError(f'{name} upsamples by {module.upsample_method!r}; {_APPLIES}')
        return module, _ThinMaskHead
    raise ValueError(f'{name} is a {type(module).__name__}; {_APPLIES}')


_APPLIES = (
    'SBP needs operations on each position for itself: 1x1 convolutions (stride 1, no padding), '
    "RPNHead, and FCNMaskHead with upsampling by 'deconv'"
)


def _is_as_in(module, kind, method):
    """Whether a class of somebody else's left the method as it is."""
    owners = (c for c in type(module).__mro__ if method in vars(c) and not issubclass(c, Mixin))
    return next(owners) is kind


@HOOKS.register_module()
class SBPModulesHook(ModelHook):
    """SBP in pointwise layers of neck and heads, see :func:`sbp_modules`. Gradients are not exact.

    Args:
        modules (Sequence[str]): Names of submodules, such as 'neck.lateral_convs', 'rpn_head', 'roi_head.mask_head'. A
            list of modules means each of its members.
        keep_ratio (float): r in (0, 1]. Default: 0.5.
        sampler (str): 'grid' or 'random'. Default: 'grid'.
    """

    def __init__(self, modules: Sequence[str], keep_ratio: float = 0.5, sampler: str = 'grid'):
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        self.options = dict(keep_ratio=keep_ratio, sampler=sampler)

    def apply(self, model: nn.Module) -> str:
        """See :meth:`.surgery.ModelHook.apply`."""
        return f'{", ".join(sbp_modules(model, self.modules, **self.options))} with {self.options}'
