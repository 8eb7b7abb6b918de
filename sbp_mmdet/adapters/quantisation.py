"""Modules that torch prepares for quantisation, before or after they are changed."""

from torch import nn

from ..surgery import stock_class

__all__ = ['problem_of_preparation', 'refuse_late_preparation']


def problem_of_preparation(module: nn.Module) -> str | None:
    """Return a sentence if torch prepared a module for quantisation, which observes or replaces it, or ``None``.

    Args:
        module (nn.Module): The module.
    """
    return None if module.__dict__.get('qconfig') is None else 'it is prepared for quantisation (qconfig)'


def refuse_late_preparation(module: nn.Module) -> None:
    """Raise an error if a changed module was prepared for quantisation after its change.

    torch looks modules up by their exact class, so it left out this one without a word.

    Args:
        module (nn.Module): The changed module.

    Raises:
        ValueError: If torch quantises modules of its class.
    """
    if problem_of_preparation(module) is None:
        return
    from torch.ao.quantization import get_default_qat_module_mappings, get_default_static_quant_module_mappings

    kind = stock_class(type(module))
    if kind in get_default_qat_module_mappings() or kind in get_default_static_quant_module_mappings():
        raise ValueError(
            f'{kind.__name__} was changed by LeanHook or apply_lean and then prepared for quantisation, which did not '
            'recognise it and left it out. Prepare the model first and change it afterwards: remove_lean(model), '
            'prepare_qat(model), apply_lean(model)'
        )
