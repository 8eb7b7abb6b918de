"""The optimizer states of bitsandbytes' 8-bit AdamW, without bitsandbytes, for counts of memory."""

import torch

__all__ = ['AdamW8bitStates']

# In bitsandbytes, parameters with fewer than 4096 entries have fp32 states. Others have two states of one byte for each
# entry and one fp32 number for each block of 256 entries (2048 before release 0.45). Two tables of 256 values, which
# say what the bytes mean, are shared by all parameters.
_SMALLEST, _BLOCK, _CODES = 4096, 256, 256


class AdamW8bitStates(torch.optim.Optimizer):
    """Optimizer that makes the states of ``bitsandbytes.optim.AdamW8bit`` and updates no parameters.

    Args:
        params (Iterable): Parameters or groups of parameters.
        lr (float): Ignored. Default: 1e-3.
        **options: Ignored.
    """

    def __init__(self, params, lr: float = 1e-3, **options):
        super().__init__(params, dict(lr=lr))
        self._tables = {}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Make the states of all parameters that have gradients and no states."""
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None or self.state[p]:
                    continue
                if p.numel() < _SMALLEST:
                    states = dict(state1=torch.zeros_like(p), state2=torch.zeros_like(p))
                else:
                    blocks = -(-p.numel() // _BLOCK)
                    states = {f'state{i}': torch.zeros_like(p, dtype=torch.uint8) for i in (1, 2)}
                    states |= {f'absmax{i}': torch.zeros(blocks, device=p.device) for i in (1, 2)}
                    states |= self._tables or {f'qmap{i}': torch.zeros(_CODES, device=p.device) for i in (1, 2)}
                    self._tables = {key: states[key] for key in ('qmap1', 'qmap2')}
                self.state[p].update(states)
