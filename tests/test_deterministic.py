"""On CUDA no operation without a fixed order is called that plain does not call; on a CPU two runs are the same."""

import helpers  # noqa: F401  (it puts research/ on the path)
import pytest
import torch
from mmengine.registry import init_default_scope
from oracles import OperationNames
from torch import Tensor

import issue_time  # isort: skip

from sbp_mmdet import apply_lean

# What torch.use_deterministic_algorithms names for CUDA. Not among them: copies to places that are all different.
NONDETERMINISTIC = {
    *('index_add', 'index_add_', 'scatter_add', 'scatter_add_', 'scatter_reduce', 'scatter_reduce_', 'put', 'put_'),
    *('bincount', 'histc', 'kthvalue', 'median', 'cumsum', 'embedding_dense_backward', '_embedding_bag_backward'),
    *(
        '_adaptive_avg_pool2d_backward',
        'adaptive_max_pool2d_backward',
        'grid_sampler_2d_backward',
        'nll_loss2d_forward',
    ),
    *('upsample_linear1d_backward', 'upsample_bilinear2d_backward', 'upsample_bicubic2d_backward'),
    *('reflection_pad2d_backward', 'replication_pad2d_backward', '_segment_reduce_backward'),
}


def is_cumsum_of_integers(name, args):
    return name == 'cumsum' and not any(isinstance(x, Tensor) and x.is_floating_point() for x in args)


def get_calls(name, preset):
    model, (_, run) = issue_time.build(name, preset), issue_time.models()[name]
    with OperationNames(ignores=is_cumsum_of_integers) as called:
        run(model).backward()
    return called.names


@pytest.mark.parametrize('name', issue_time.models())
def test_nothing_is_called_whose_order_differs_from_run_to_run(name):
    init_default_scope('mmdet')
    plain = get_calls(name, 'none')
    presets = ['exact', 'exact_min', 'int8']
    presets += ['sampled', 'sbp'] if name in ('Swin', 'ConvNeXt', "DINO's encoder") else []
    for preset in presets:
        new = get_calls(name, preset) - plain
        assert not new & NONDETERMINISTIC, preset


@pytest.mark.parametrize('preset', ['exact', 'int8', 'sampled', 'sbp'])
def test_two_runs_give_the_same_gradients(preset):
    """The gradients of two runs on a CPU are bitwise equal."""
    init_default_scope('mmdet')

    def gradients():
        build, _ = issue_time.models()['Swin']
        torch.manual_seed(0)
        model, images = build(), torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
        model.train()
        apply_lean(model, preset, verify=False)
        for _ in range(2):
            sum(out.square().sum() for out in model(images)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    first, second = gradients(), gradients()
    assert len(first) > 100 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
