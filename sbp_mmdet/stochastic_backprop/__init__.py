"""Stochastic Backpropagation (SBP), the method of "An In-depth Study of Stochastic Backpropagation" (NeurIPS 2022).

- :mod:`.algorithm1`: Algorithm 1 for any position-wise operation.
- :mod:`.masks`: which positions are kept.
- :mod:`.layers`: which layers are thinned.
- :mod:`.config`: the settings.
- :mod:`.step_draws`: the random choices of one training step.

The operations in :mod:`sbp_mmdet.ops` compute the same gradients in less memory. They take the kept positions as their
argument ``positions``.
"""
