"""All operations of the package in one namespace, for tests that run through them."""

# ruff: noqa: F401
from sbp_mmdet.ops.attention import AttentionSettings, AttentionTensors, attention
from sbp_mmdet.ops.channel_mlp import MLPSettings, MLPTensors, channel_mlp
from sbp_mmdet.ops.channel_mlp_grn import GRNSettings, GRNTensors, grn_mlp
from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.common.rerun_conv import Conv, ConvSettings, convolve
from sbp_mmdet.ops.common.stochastic_depth import run_on_images
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm
from sbp_mmdet.ops.deformable_attention import DeformableSettings, DeformableTensors, deformable_attention
from sbp_mmdet.ops.deformable_encoder_layer import EncoderSettings, EncoderTensors, deformable_encoder_layer
from sbp_mmdet.ops.downsample import NormLinearSettings, NormLinearTensors, norm_linear
from sbp_mmdet.ops.ffn import FFNSettings, FFNTensors, feed_forward
from sbp_mmdet.ops.layer_norm import NormSettings, NormTensors, layer_norm
from sbp_mmdet.ops.window_attention import WindowSettings, WindowTensors, window_attention
