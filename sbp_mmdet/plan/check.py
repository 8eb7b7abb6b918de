"""``sbp-mmdet check``: whether the environment can train, with a line for each thing that a training needs."""

import importlib
import platform
from importlib.metadata import packages_distributions, version

import torch
from mmdet.registry import HOOKS, MODELS

import sbp_mmdet

from ..verify.checks import verify_modules

__all__ = ['check']


def check() -> bool:
    """Check the environment and print a line for each check.

    Returns:
        bool: Whether all checks passed.
    """
    return all([_run_check(name, look) for name, look in _LOOKS.items()])  # a list: all lines are printed


def _run_check(name, probe):
    try:
        print(f'ok      {name}: {probe()}')
    except Exception as error:  # noqa: BLE001  whatever is wrong with an environment
        print(f'FAILED  {name}: {type(error).__name__}: {error}')
        return False
    return True


def _describe_torch():
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f'{torch.__version__}, Python {platform.python_version()}, GPU: {", ".join(gpus) or "none, runs on the CPU"}'


def _describe_stack():
    names, lines = packages_distributions(), []
    for module in ('mmengine', 'mmcv', 'mmdet'):
        distributions = sorted(set(names.get(module, ())))
        if len(distributions) > 1:
            raise ImportError(f'{" and ".join(distributions)} both install {module}; uninstall both, and install one')
        lines.append(f'{distributions[0]} {version(distributions[0])}' if distributions else f'{module} (from a path)')
    return ', '.join(lines)


def _check_operators():
    ops = importlib.import_module('mmcv.ops')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 3.9]], device=device)
    kept = len(ops.nms(boxes, torch.tensor([0.9, 0.8], device=device), 0.5)[0])
    return f'nms on {device} keeps {kept} of 2 boxes'


def _check_registries():
    names = [(HOOKS, 'LeanHook'), (MODELS, 'SBPConvNeXt'), (MODELS, 'SBPSwinTransformer'), (MODELS, 'SBPViT')]
    if missing := [name for registry, name in names if registry.get(name) is None]:
        raise LookupError(f"mmdet's registries lack {', '.join(missing)}; reinstall sbp_mmdet")
    return f'{sbp_mmdet.__version__}, mmdet knows {", ".join(name for _, name in names)}'


def _check_step():
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    torch.manual_seed(0)
    model = sbp_mmdet.SBPConvNeXt('atto', layer_scale_init_value=1.0, gap_before_final_norm=False).to(device).train()
    report = sbp_mmdet.apply_lean(model, 'exact', verify=False)
    x = torch.randn(2, 3, 64, 64, device=device)
    findings = verify_modules(model, report.changed, lambda dry: dry(x))
    if findings.failed or findings.skipped:
        raise ArithmeticError(f'on {device}: {findings.skipped or findings.failed}')
    stored = findings.stored
    return f'on {device}: {findings}, {stored["now"] / 1e6:.1f} MB stored instead of {stored["before"] / 1e6:.1f} MB'


_LOOKS = dict(
    torch=_describe_torch,
    stack=_describe_stack,
    operators=_check_operators,
    sbp_mmdet=_check_registries,
    verify=_check_step,
)
