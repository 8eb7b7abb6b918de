"""Nothing accumulates over many steps, and a step that fails leaves nothing behind."""

import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch
from cases import get_kept_masks
from helpers import needs_fp16
from oracles import build_backbone, compute_gradients, compute_loss, random_images

from sbp_mmdet.stochastic_backprop import masks

STATM = Path('/proc/self/statm')
SETTINGS = {
    'sbp': dict(preset='sbp'),
    'sampled': dict(preset='sampled'),
    'exact': dict(preset='exact'),
}


def count_live_bytes():
    """Return the bytes of all tensors that the garbage collector can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # others, such as fake tensors, have no storage
            with contextlib.suppress(NotImplementedError):  # an undefined tensor, of torch 2.1
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def read_resident_bytes():
    return int(STATM.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@pytest.mark.skipif(not STATM.exists(), reason='the resident size is read from /proc, which Linux has')
def test_300_steps_do_not_grow(iteration):
    """Presets take turns, with images of changing size."""
    backbones = [build_backbone(cfg, dtype=torch.float32) for cfg in SETTINGS.values()]
    optimizers = [torch.optim.AdamW(backbone.parameters(), lr=1e-4) for backbone in backbones]
    sizes = [(64, 64), (64, 96), (72, 40)]
    live, resident = {}, {}
    for step in range(297):
        iteration(step)
        which = step % len(backbones)
        compute_loss(backbones[which](random_images(1, *sizes[step // 3 % 3], dtype=torch.float32))).backward()
        optimizers[which].step()
        optimizers[which].zero_grad()
        if step in (98, 197, 296):  # the last passes of each, whose draws are kept, have the same sizes then
            masks._of_grid.cache_clear()  # the latest 16, whatever their sizes
            live[step], resident[step] = count_live_bytes(), read_resident_bytes()
    # A counter of the process that holds the test may be made in between.
    assert max(live.values()) - min(live.values()) < 64
    # 198 steps that each left their input behind would be 11 MB; the allocator's own unrest is of 2 MB.
    assert resident[296] - resident[98] < 4e6, resident


def get_parameters(backbone):
    return {name: p.detach().clone() for name, p in backbone.named_parameters()}


@needs_fp16
def test_overflow_steps_are_skipped_and_the_masks_go_on(iteration):
    """In fp16 with a much too large loss scale, the scale is halved until the gradients are finite."""
    settings = dict(preset='sbp', sampler='random')
    backbone = build_backbone(settings, dtype=torch.float32)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**20, growth_interval=1000)
    x = random_images(1, dtype=torch.float32)
    skipped, kept = [], []
    torch.manual_seed(5)
    for step in range(30):
        iteration(step)
        before, scale = get_parameters(backbone), scaler.get_scale()
        with torch.autocast('cpu', dtype=torch.float16):
            loss = compute_loss(backbone(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = get_parameters(backbone)
        skipped.append(all(torch.equal(before[name], after[name]) for name in before))
        assert skipped[-1] == (scaler.get_scale() < scale)
        assert all(p.isfinite().all() for p in after.values())
        kept.append(tuple(get_kept_masks(backbone, x)[1, 0].flatten().tolist()))
    assert skipped[0] and not all(skipped[-10:])
    assert len(set(kept)) == len(kept)

    # The same masks as in a run that skipped nothing.
    torch.manual_seed(5)
    other = build_backbone(settings, dtype=torch.float32)
    torch.manual_seed(5)
    for step in (0, 1, 29):
        iteration(step)
        other(x)
        assert tuple(get_kept_masks(other, x)[1, 0].flatten().tolist()) == kept[step]


@pytest.mark.parametrize('settings', SETTINGS)
def test_nan_in_the_loss_of_one_image_stays_in_its_step_and_image(settings, iteration):
    def build():
        backbone = build_backbone(SETTINGS[settings])
        torch.manual_seed(5)
        return backbone

    def nan_in_the_first(x):
        outs = backbone(x)
        return [torch.cat([out[:1] * float('nan'), out[1:]]) for out in outs]

    backbone, clean = build(), build()
    x = random_images(2)
    iteration(0)
    poisoned, expected = compute_gradients(backbone, x, nan_in_the_first)['image'], compute_gradients(clean, x)['image']
    assert poisoned[0].isnan().any() and torch.equal(poisoned[1], expected[1])
    for step in (1, 2):
        iteration(step)
        actual, expected = compute_gradients(backbone, x), compute_gradients(clean, x)
        assert all(torch.equal(actual[name], expected[name]) and actual[name].isfinite().all() for name in expected)
