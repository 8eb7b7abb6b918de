"""The memory of bitsandbytes' 8-bit AdamW, without bitsandbytes."""

import torch

__all__ = ['AdamW8bitStates']

# bitsandbytes: smaller parameters keep fp32 states; others have one byte an entry and one fp32 number a block (of 256
# entries, of 2048 in releases before 0.45), twice. What the bytes stand for is in two tables that all share.
_SMALLEST, _BLOCK, _CODES = 4096, 256, 256


class AdamW8bitStates(torch.optim.Optimizer):
    """Makes the states that ``bitsandbytes.optim.AdamW8bit`` makes, and updates nothing.

    Args:
        params (Iterable): Parameters or groups of them.
        lr (float): Not used. Default: 1e-3.
        **options: Not used.
    """

    def __init__(self, params, lr: float = 1e-3, **options):
        super().__init__(params, dict(lr=lr))
        self._tables = {}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Make the states of all parameters with gradients that have none yet."""
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None or self.state[p]:
                    continue
                if p.numel() < _SMALLEST:
                    made = dict(state1=torch.zeros_like(p), state2=torch.zeros_like(p))
                else:
                    blocks = -(-p.numel() // _BLOCK)
                    made = {f'state{i}': torch.zeros_like(p, dtype=torch.uint8) for i in (1, 2)}
                    made |= {f'absmax{i}': torch.zeros(blocks, device=p.device) for i in (1, 2)}
                    made |= self._tables or {f'qmap{i}': torch.zeros(_CODES, device=p.device) for i in (1, 2)}
                    self._tables = {key: made[key] for key in ('qmap1', 'qmap2')}
                self.state[p].update(made)
