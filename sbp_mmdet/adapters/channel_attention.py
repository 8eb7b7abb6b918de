"""Channel attention, and activations that stand by themselves; the next layer recomputes their output."""

from mmdet.models.layers.se_layer import ChannelAttention, SELayer
from torch import Tensor, nn

from ..ops.activation import ActivationSettings, ActivationTensors, activate
from ..ops.channel_gate import GateSettings, GateTensors, gate_channels
from .base import LeanModule, adapter
from .conv_module import activation_of
from .roles import ROLES

__all__ = ['LeanActivation', 'LeanChannelAttention']

_EFFECTIVE = 'mmyolo.models.layers.yolo_bricks.EffectiveSELayer'


@adapter(SELayer, ChannelAttention, _EFFECTIVE)
class LeanChannelAttention(LeanModule):
    """Channel attention. The small layers that compute the gate from the map's mean run their own code."""

    dims = 4
    samples = has_reference = False
    shares_maps = True

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the layer on (N, C, H, W)."""
        own = self._modules
        mean = self.global_avgpool(x) if 'global_avgpool' in own else x.mean((2, 3), keepdim=True)
        layers = ('conv1', 'conv2') if 'conv1' in own else ('fc', 'activate' if 'activate' in own else 'act')
        gate = own[layers[1]](own[layers[0]](mean))
        if gate.shape != (*x.shape[:2], 1, 1):  # of convolutions that the user has changed
            return x * gate
        return gate_channels(GateSettings(self.form), GateTensors(x, gate))


@adapter(*(kind for kind in ROLES['activation'] if kind is not nn.ReLU))
class LeanActivation(LeanModule):
    """Activation of a map. ReLU has no adapter: it saves its output, which the next layer saves anyway."""

    dims = 4
    samples = has_reference = False
    shares_maps = True

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        yield self, 'activation'

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the activation on (N, C, H, W)."""
        inplace = getattr(self, 'inplace', False)
        if not x.numel() or (inplace and x._is_view()):
            return super(LeanModule, self).forward(x)
        return activate(ActivationSettings(self.form, activation_of(self), inplace), ActivationTensors(x))
