"""The key ``sbp_cfg`` of the package's backbones, with which they apply adapters to themselves."""

import logging

from mmengine.logging import print_log
from torch import nn

from ..apply import apply_settings, draws_of, keep_ratios
from ..presets import Settings
from ..report import FROZEN, NO_BLOCK, UNKNOWN, thinned_line
from ..verify.first_pass import verify_at_first_pass

__all__ = ['TRUNCATED_NORMAL', 'LeanBackbone']

# Initialisation of the package's own networks, for mmengine's ``init_cfg``.
TRUNCATED_NORMAL = (
    dict(type='TruncNormal', layer=['Conv2d', 'Linear'], std=0.02, bias=0.0),
    dict(type='Constant', layer=['LayerNorm'], val=1.0, bias=0.0),
)


class LeanBackbone(nn.Module):
    """Base class of backbones with ``sbp_cfg``.

    Attributes:
        sbp (Settings | None): The checked ``sbp_cfg``. If ``None``, the backbone is plain.
    """

    sbp = None
    _report = None  # logged once, when training begins

    def train_lean(self, sbp_cfg: dict | None) -> None:
        """Change the network for lean training. Subclasses call this at the end of ``__init__``.

        Args:
            sbp_cfg (dict | None): ``preset`` and keys of :class:`.presets.Settings`. If ``None``, nothing is changed.

        Raises:
            ValueError: If a value cannot be honoured. The message has the value and the remedy.
        """
        if sbp_cfg is None:
            return
        settings = Settings.parse(sbp_cfg)
        report = apply_settings(self, settings)
        if settings.preset.name != 'none' and report.left:
            refused = {}
            for name, reason in report.left.items():
                if reason not in (FROZEN, UNKNOWN, NO_BLOCK):
                    refused.setdefault(reason, name)
            if refused:
                reasons = '; '.join(f'{name}: {reason}' for reason, name in refused.items())
                raise ValueError(
                    f'sbp_cfg={sbp_cfg!r} cannot be honoured in all of {type(self).__name__}: {reasons}; change these '
                    'settings, or write sbp_cfg=None and use LeanHook, which leaves such modules unchanged'
                )
        self.sbp, self._report = settings, report
        verify_at_first_pass(self, settings, report)

    def keep_ratios(self) -> dict[tuple, float]:
        """Return the keep ratios of the thinned layers, see :func:`sbp_mmdet.apply.keep_ratios`."""
        return keep_ratios(self)

    def train(self, mode: bool = True) -> 'LeanBackbone':
        """Set training or evaluation mode. The first time in training, log what ``sbp_cfg`` changed."""
        super().train(mode)
        if mode and self._report is not None:
            report, self._report = self._report, None
            message = f"{type(self).__name__}: preset='{self.sbp.preset.name}': {report}"
            print_log('\n'.join(filter(None, (message, thinned_line(self)))), logger='current')
            if any(draws.stages.ratios for draws in draws_of(self)) and not keep_ratios(self):
                text = f'{type(self).__name__}: all layers that sbp_cfg thins are frozen, so no positions are dropped'
                print_log(text, logger='current', level=logging.WARNING)
        return self
