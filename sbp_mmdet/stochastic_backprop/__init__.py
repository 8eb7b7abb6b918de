"""Stochastic Backpropagation (SBP), the method of "An In-depth Study of Stochastic Backpropagation" (NeurIPS 2022).

- :mod:`.algorithm1`: Algorithm 1 (section 3.4) for any position-wise operation.
- :mod:`.masks`: gradient keep masks, and keep ratios of masks (section 4).
- :mod:`.config`: settings: keep ratio r, sampler, thinned blocks, downsampling, attention mode.
- :mod:`.layers`: the thinned layers and their keep ratios, the paper's choice by default (section 4, appendix).
- :mod:`.step_draws`: the random choices of one training step.

The paper's layers are operations in :mod:`sbp_mmdet.ops`, which compute the same gradients in less memory. They take
the kept positions as their argument ``positions``: two PW-Convs in :mod:`sbp_mmdet.ops.channel_mlp` (section 3.3.1),
downsampling in :mod:`sbp_mmdet.ops.downsample` (section 3.2.2), MHSA in :mod:`sbp_mmdet.ops.attention` (section 4).
"""
