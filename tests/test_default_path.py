"""README's first example leads a reader through few files: those that docs/design.md lists, in the order of a step."""

import re
import sys
from pathlib import Path

import torch
from helpers import ROOT

import sbp_mmdet
from sbp_mmdet import SBPConvNeXt

PACKAGE = Path(sbp_mmdet.__file__).parent


def files_of(run) -> list[str]:
    """The package's files that a call executes, in the order in which it enters them."""
    found = {}

    def enter(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == 'call' and path.is_relative_to(PACKAGE):
            found.setdefault(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(enter)  # the engine runs the backward pass of a CPU in this thread
    try:
        run()
    finally:
        sys.setprofile(None)
    return [*found]


def listed() -> list[str]:
    text = (ROOT / 'docs/design.md').read_text().split('## The default path\n', 1)[1].split('\n## ', 1)[0]
    names = re.findall(r'^\d+\. .*?`(?:sbp_mmdet/)?([\w/]+\.py)`', text, re.MULTILINE)
    return [name for name in names if (PACKAGE / name).exists()]


def test_an_mlp_block_from_config_to_gradient():
    torch.manual_seed(0)
    arch = dict(depths=[1, 1], channels=[8, 16])
    backbone = SBPConvNeXt(arch, layer_scale_init_value=1.0, sbp_cfg=dict(preset='exact')).train()
    backbone(torch.randn(2, 3, 32, 32))  # a pass has begun, and what is read once is there
    block, x = backbone.stages[0][0], torch.randn(2, 8, 8, 8, requires_grad=True)
    found = files_of(lambda: block(x).sum().backward())
    assert block.pointwise_conv1.weight.grad is not None
    assert found == listed() and len(found) <= 9
