"""Checkpoints around changed modules: refused where layers draw positions or images, exact where they do not."""

import functools

import pytest
import torch
import torch.utils.checkpoint as cp
from cases import build, get_kept_masks
from oracles import assert_near, compute_loss, random_images

from sbp_mmdet import apply_lean
from sbp_mmdet.checkpointing import Checkpointed, checkpoint_modules


def around_the_backbone(model, reentrant):
    forward = model.forward
    model.forward = lambda x: cp.checkpoint(lambda x: tuple(forward(x)), x, use_reentrant=reentrant)


def around_the_call(model, reentrant):
    """Checkpoint a call of the module, so that its hooks run again, too."""
    return lambda x: cp.checkpoint(lambda x: tuple(model(x)), x, use_reentrant=reentrant)


def around_a_block(model, reentrant):
    block = model.stages[2].blocks[0]
    block.forward = functools.partial(cp.checkpoint, block.forward, use_reentrant=reentrant)


def by_the_hook(model, reentrant):
    checkpoint_modules(model, ['stages'])


FOREIGN = [around_the_backbone, around_the_call, around_a_block, by_the_hook]
DRAWING = pytest.mark.parametrize(
    ('cfg', 'options'),
    [(dict(preset='sbp'), {}), (dict(preset='reference'), {}), (dict(preset='exact'), dict(drop_path_rate=0.9))],
    ids=str,
)


@pytest.mark.parametrize('order', [1, -1])
@DRAWING
def test_a_checkpoint_of_our_own_around_a_thinned_part_is_refused_at_once(order, cfg, options):
    """The second of the two calls is refused; the effects of the first remain."""
    model = build('stock Swin', **options)
    first, second = [lambda: apply_lean(model, **cfg), lambda: checkpoint_modules(model, ['stages'])][::order]
    first()
    kinds = [*map(type, model.modules())]
    with pytest.raises(ValueError, match=r'stages.\d is checkpointed, but stages.\d.*CheckpointModulesHook.*modules='):
        second()
    assert [*map(type, model.modules())] == kinds


@pytest.mark.parametrize('foreign', FOREIGN[:-1])
@pytest.mark.parametrize('reentrant', [True, False])
@DRAWING
def test_a_foreign_checkpoint_around_a_thinned_part_is_refused(foreign, reentrant, cfg, options):
    model = build('stock Swin', cfg, **options)
    run = foreign(model, reentrant) or model
    message = (
        rf"layer \(.*\) of a backbone with preset='{cfg['preset']}' is recomputed by a checkpoint.*modules=\[...\]"
    )
    with pytest.raises(ValueError, match=message):
        compute_loss(run(random_images(2, 64, 64).requires_grad_())).backward()


@pytest.mark.parametrize('foreign', FOREIGN)
@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('options', [{}, dict(drop_path_rate=0.9)], ids=str)
def test_exact_layers_may_run_again(foreign, reentrant, options):
    """A checkpoint may recompute layers that drop no positions or images, here in two passes."""
    found = []
    for change in (None, foreign):
        model = build('stock Swin', dict(preset='exact', skip_dropped_images=False), **options)
        run = change(model, reentrant) if change else None
        torch.manual_seed(0)
        losses = [compute_loss((run or model)(random_images(2, 64, 64, seed=seed).requires_grad_())) for seed in (0, 1)]
        sum(losses).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_near(found[1], found[0], 1e-12)


@pytest.mark.parametrize('order', [1, -1])
def test_a_checkpoint_stays_in_front(order):
    """In whichever order the hooks come, lean modules are recomputed inside of the checkpoint."""
    model = build('stock Swin')
    changes = [lambda: apply_lean(model), lambda: checkpoint_modules(model, ['stages.3.blocks.0'])]
    for change in changes[::order]:
        change()
    assert type(model.stages[3].blocks[0]).__mro__[1] is Checkpointed


def test_a_confined_plugin_leaves_checkpoints_alone():
    """Lean modules beside a checkpointed stage train, which is the remedy that the error message suggests."""
    model, x = build('stock Swin'), random_images(2, 64, 64)
    apply_lean(model, 'sbp', modules=['stages.1', 'stages.2', 'stages.3'])
    checkpoint_modules(model, ['stages.0'])
    compute_loss(model(x)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert {key[0] for key in get_kept_masks(model, x)} == {1, 2}
