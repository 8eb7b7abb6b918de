"""The settings that the tools compare: what users would use instead, the paper's method, and this package's."""

__all__ = ['MODES', 'backbone_options']

# name: (sbp_cfg, with_cp)
MODES = {
    'none': (None, False),
    'with_cp': (None, True),
    'reference': (dict(implementation='reference'), False),
    'fused': (dict(), False),
    'recompute': (dict(recompute=True), False),
    'block': (dict(recompute='block'), False),
    'exact': (dict(keep_ratio=1.0, recompute=True), False),
    'exact-block': (dict(keep_ratio=1.0, recompute='block'), False),
    'nearest': (dict(dropped='nearest', recompute=True), False),
    'int8': (dict(keep_ratio=1.0, recompute=True, storage='int8'), False),
    'int8-block': (dict(keep_ratio=1.0, recompute='block', storage='int8'), False),
    'nearest-int8': (dict(dropped='nearest', recompute=True, storage='int8'), False),
}


def backbone_options(mode: str, **sbp_options) -> dict:
    """Arguments of ``SBPConvNeXt`` for a mode.

    Args:
        mode (str): A key of ``MODES``.
        **sbp_options: Further keys of ``sbp_cfg``, where the mode has one; the mode's own keys win.

    Returns:
        dict: ``sbp_cfg`` and ``with_cp``.

    Raises:
        ValueError: For an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f'mode {mode!r} is unknown; choose from {list(MODES)}')
    sbp_cfg, with_cp = MODES[mode]
    return dict(sbp_cfg=None if sbp_cfg is None else {**sbp_options, **sbp_cfg}, with_cp=with_cp)
