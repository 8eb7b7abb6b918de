"""Masks that know where the objects are: by their definition, from the boxes to the gradients."""

import copy
import types

import pytest
import torch
import torch.utils.checkpoint as cp
from helpers import CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from mmdet.models.backbones import SwinTransformer
from mmdet.models.detectors import BaseDetector
from mmdet.registry import HOOKS
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import HorizontalBoxes
from mmengine.structures import InstanceData
from oracles import assert_near, gradients, image, loss_of, mask_of, oracle_convnext, record_keep, small_backbone
from torch import nn

from sbp_mmdet import ObjectMasksHook, object_boxes, objects
from sbp_mmdet.analysis.detector import measure_detector
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.apply import apply_sbp
from sbp_mmdet.draws import Drawn
from sbp_mmdet.masks import mask_generator, object_mask, positions
from sbp_mmdet.shared_draws import LayerDraws
from sbp_mmdet.surgery import ModelHook

OBJECTS = dict(sampler='objects')
LEFT, RIGHT = torch.tensor([[2.0, 4, 14, 40]]), torch.tensor([[50.0, 30, 63, 60], [40, 0, 44, 4]])
NONE = torch.zeros(0, 4)
RATIOS = st.sampled_from([0.1, 0.25, 0.5, 0.75])


def draw(boxes, height=12, width=10, stride=4, ratio=0.5, share=0.7, step=0):
    return object_mask(boxes, height, width, (stride, stride), ratio, share, mask_generator(0, 0, step))


def distances(boxes, height, width, stride):
    """Position by position, box by box."""
    found = torch.full((height, width), float('inf'))
    for i in range(height):
        for j in range(width):
            y, x = (i + 0.5) * stride, (j + 0.5) * stride
            for x1, y1, x2, y2 in boxes.tolist():
                d = (max(x1 - x, x - x2, 0) ** 2 + max(y1 - y, y - y2, 0) ** 2) ** 0.5
                found[i, j] = min(found[i, j], d)
    return found


def boxes_of(seed, number, size=60):
    """Some of them reach over the edge or lie outside, some are smaller than a position."""
    corners = torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) * 1.6 * size - 0.3 * size
    extent = torch.rand(number, 2, generator=torch.Generator().manual_seed(seed + 1)).square() * size / 2
    return torch.cat([corners, corners + extent], 1)


@given(
    height=st.integers(1, 14),
    width=st.integers(1, 14),
    number=st.integers(1, 6),
    ratio=RATIOS,
    share=st.sampled_from([0, 0.3, 0.7, 1]),
    step=st.integers(0, 9),
)
def test_a_share_is_next_to_boxes(height, width, number, ratio, share, step):
    boxes = boxes_of(step, number)
    mask = draw(boxes, height, width, 4, ratio, share, step)
    kept = max(round(ratio * height * width), 1)
    assert mask.dtype == torch.bool and mask.shape == (height, width) and mask.sum() == kept
    found, near = distances(boxes, height, width, 4), round(share * kept)
    if near:
        limit = found.flatten().sort().values[near - 1]
        assert mask[found < limit - 0.01].all()
        assert mask[found < limit + 0.01].sum() >= near


def test_what_is_not_next_to_boxes_lies_evenly():
    """Also all of an image without boxes: in each window as much as elsewhere, but for a few."""
    for boxes, share in ((NONE, 0.7), (torch.tensor([[0.0, 0, 8, 8]]), 0)):
        for ratio in (0.1, 0.25, 0.5):
            mask = draw(boxes, 48, 64, ratio=ratio, share=share)
            windows = mask.float().unfold(0, 8, 8).unfold(1, 8, 8).sum((2, 3))
            assert (windows - ratio * 64).abs().max() <= 4  # drawn by chance, half of them would differ by more than 5
            assert mask.sum() == round(ratio * 48 * 64)


def test_chance_decides_inside_of_boxes():
    """Every position of a box that holds more than the share is kept at times, and as often as the others."""
    frequency = torch.stack([draw(torch.tensor([[0.0, 0, 40, 48]]), step=step) for step in range(400)]).double().mean(0)
    assert (frequency - 0.5).abs().max() < 0.14  # more than five standard deviations


def test_a_mask_depends_on_its_arguments_only():
    before = torch.get_rng_state()
    first = draw(LEFT, step=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(draw(LEFT, step=3), first) and torch.equal(draw(LEFT.double(), step=3), first)
    assert not torch.equal(draw(LEFT, step=4), first) and not torch.equal(draw(RIGHT, step=3), first)


@pytest.mark.parametrize('nearest', [False, True])
def test_positions_of_each_image(nearest):
    masks = torch.stack([draw(boxes, 7, 9, ratio=0.25) for boxes in (LEFT, RIGHT, NONE)])
    found = positions(masks, nearest=nearest)
    for i, mask in enumerate(masks):
        own = positions(mask, nearest=nearest)
        assert torch.equal(found.keep[i], own.keep) and torch.equal(found.drop[i], own.drop)
        if nearest:
            assert all(torch.equal(each[i], one) for each, one in zip(found.nearest, own.nearest, strict=True))
    some = found.of_images(torch.tensor([True, False, True]))
    expected = positions(masks[[0, 2]], nearest=nearest)
    assert torch.equal(some.keep, expected.keep) and torch.equal(some.drop, expected.drop)
    if nearest:
        assert all(map(torch.equal, some.nearest, expected.nearest))


def test_images_keep_as_many_each():
    with pytest.raises(ValueError, match=r'as many positions each, not \[1, 2\]'):
        positions(torch.tensor([[[True, False]], [[True, True]]]))


def masks_of(drawn, height=64, width=64):
    """Of each layer (N, 1, h, w), to stand beside (N, C, h, w)."""
    return {
        key: torch.stack([mask_of(keep, height // 4 // 2 ** key[0], width // 4 // 2 ** key[0]) for keep in found.keep])[
            :, None
        ]
        for key, found in drawn.items()
    }


def oracle(backbone, masks, **kwargs):
    return lambda x: oracle_convnext(dict(backbone.named_parameters()), x, backbone.depths, masks, **kwargs)


def test_each_image_and_each_stage_has_a_mask_of_its_own(iteration):
    iteration(3)
    ratios = [0.25, 0.5, 0.5, 0.75, 0.5]
    backbone, x = small_backbone(dict(OBJECTS, keep_ratio=ratios, object_share=1.0)), image(3)
    with objects([LEFT, RIGHT, NONE]):
        drawn = backbone.draw(x)
    again = backbone.draw(x, again=True)
    for key, mask in masks_of(drawn.positions).items():
        stride = 4 * 2 ** key[0]
        assert (mask.sum((1, 2, 3)) == round(backbone.keep_ratios()[key] * mask[0].numel())).all()
        for i, boxes in enumerate((LEFT, RIGHT)):
            found = distances(boxes, *mask.shape[2:], stride)
            assert found[mask[i, 0]].max() <= found[~mask[i, 0]].min() + 0.01
        assert torch.equal(again.positions[key].keep, drawn.positions[key].keep)
        assert drawn.positions[key].nearest is None
    assert torch.equal(drawn.positions[1, 'downsample'].keep, drawn.positions[1, 0].keep)
    layers = LayerDraws(backbone)
    with objects([LEFT, RIGHT, NONE]):
        layers.begin(backbone, (x,))
    assert torch.equal(layers.of((1, 0)).keep, small_draw(ratios, x).positions[1, 0].keep)


def small_draw(ratios, x):
    """Of the same step, by another backbone."""
    with objects([LEFT, RIGHT, NONE]):
        return small_backbone(dict(OBJECTS, keep_ratio=ratios, object_share=1.0)).draw(x)


@pytest.mark.parametrize('size', [(75, 53), (64, 97)], ids=str)
def test_positions_lie_where_the_backbone_sees_them(size):
    """Odd sizes: an object in a corner is kept in its corner in every stage."""
    height, width = size
    backbone = small_backbone(dict(OBJECTS, keep_ratio=0.25, object_share=1.0))
    corner = (width // 32 * 32, height // 32 * 32)  # of what the last stage sees
    with objects([torch.tensor([[corner[0] - 9.0, corner[1] - 9, *corner]])]):
        drawn = backbone.draw(image(1, *size)).positions
    for (stage, _), found in drawn.items():
        rows, columns = height // 4 // 2**stage, width // 4 // 2**stage
        place = [(n - 1) // (4 * 2**stage) for n in corner]
        assert mask_of(found.keep[0], rows, columns)[place[1], place[0]]


@pytest.mark.parametrize('implementation', ['fused', 'reference'])
def test_gradients_by_definition(implementation):
    backbone, x, boxes = small_backbone(dict(OBJECTS, implementation=implementation)), image(3), [LEFT, NONE, RIGHT]
    with objects(boxes):
        actual = gradients(backbone, x)
    masks = masks_of(backbone.draw(x, again=True).positions)
    assert_near(actual, gradients(backbone, x, oracle(backbone, masks)), 1e-10)


@pytest.mark.parametrize('dropped', ['zero', 'nearest'])
def test_images_do_not_mix(dropped):
    """The gradients of a batch are the sum of those of its images, each with its own positions."""
    backbone, x, boxes = small_backbone(dict(OBJECTS, dropped=dropped)), image(2), [LEFT, RIGHT]
    with objects(boxes):
        together = backbone.draw(x)
    separate = []
    for i in range(2):
        one = torch.arange(2) == i
        separate.append({key: p.of_images(one) for key, p in together.positions.items()})

    def forward(x, drawn):
        backbone.draw = lambda x: Drawn(drawn, {})
        return backbone(x)

    weights = [torch.randn_like(out) for out in forward(x, together.positions)]

    def differentiate(x, drawn, weights):
        outs = forward(x, drawn)
        loss = sum((out * w).sum() for out, w in zip(outs, weights, strict=True))
        return torch.autograd.grad(loss, list(backbone.parameters()))

    actual = differentiate(x, together.positions, weights)
    parts = [differentiate(x[i : i + 1], separate[i], [w[i : i + 1] for w in weights]) for i in range(2)]
    expected = [a + b for a, b in zip(*parts, strict=True)]
    assert_near(dict(enumerate(actual)), dict(enumerate(expected)), 1e-10)


def test_images_that_are_left_out():
    """Stochastic depth: each image that runs a block has its own positions there."""
    backbone = small_backbone(dict(OBJECTS, skip_dropped_images=True), drop_path_rate=0.6)
    x, boxes = image(3), [LEFT, RIGHT, NONE]
    seen = record_keep(backbone)
    with objects(boxes):
        actual = gradients(backbone, x)
    drawn = backbone.draw(x, again=True)
    assert any(images.any() and not images.all() for images in drawn.images.values())
    whole = small_backbone(OBJECTS)
    with objects(boxes):
        masks = masks_of(whole.draw(x).positions)
    for key, images in drawn.images.items():
        if seen[key] is not None and images.any():
            assert len(seen[key].keep) == images.sum()
    expected = oracle(backbone, masks, drop_path_rate=0.6, images=drawn.images)
    assert_near(actual, gradients(backbone, x, expected), 1e-10)


def test_replays_of_two_passes():
    """They come when the boxes are gone, the last pass first."""
    backbone, x, boxes = small_backbone(OBJECTS), [image(1, seed=1), image(1, seed=2)], [[LEFT], [RIGHT]]
    reference, drawn = small_backbone(OBJECTS), []
    for one, found in zip(x, boxes, strict=True):
        with objects(found):
            drawn.append(masks_of(reference.draw(one).positions))
    losses = []
    for one, found in zip(x, boxes, strict=True):
        with objects(found):
            out = cp.checkpoint(lambda x: tuple(backbone(x)), one.requires_grad_(), use_reentrant=False)
        losses.append(loss_of(out))
    actual = torch.autograd.grad(sum(losses), list(backbone.parameters()))
    expected = sum(loss_of(oracle(backbone, d)(one)) for d, one in zip(drawn, x, strict=True))
    expected = torch.autograd.grad(expected, list(backbone.parameters()))
    assert_near(dict(enumerate(actual)), dict(enumerate(expected)), 1e-10)


def test_boxes_that_never_arrive():
    backbone, x = small_backbone(OBJECTS), image(2)
    with pytest.raises(ValueError, match=r"none have arrived.*'ObjectMasksHook'.*objects\(boxes\)"):
        backbone(x)
    with objects([LEFT]), pytest.raises(ValueError, match='boxes of 1 images have arrived for a batch of 2'):
        backbone(x)
    with pytest.raises(ValueError, match=r'image 1 .* \(2, 5\)'), objects([LEFT, torch.zeros(2, 5)]):
        pass
    with torch.no_grad():
        backbone(x)
    backbone.eval()(x)


class Detector(BaseDetector):
    """Backbone and a loss; the boxes are not looked at."""

    def __init__(self, sbp_cfg):
        super().__init__()
        self.backbone = small_backbone(sbp_cfg)

    def loss(self, batch_inputs, batch_data_samples):
        return dict(loss=loss_of(self.backbone(batch_inputs)))

    def predict(self, batch_inputs, batch_data_samples):
        raise NotImplementedError

    def _forward(self, batch_inputs, batch_data_samples=None):
        raise NotImplementedError

    def extract_feat(self, batch_inputs):
        raise NotImplementedError


def sample(boxes, ignored=NONE):
    data = DetDataSample(gt_instances=InstanceData(), ignored_instances=InstanceData(bboxes=ignored))
    if boxes is not None:
        data.gt_instances.bboxes = boxes
    return data


def test_the_hook_hands_over_the_boxes(iteration):
    iteration(1)
    detector, x = Detector(OBJECTS), image(2)
    hook = HOOKS.build(dict(type='ObjectMasksHook'))
    assert isinstance(hook, ModelHook) and hook.exact
    assert 'Detector' in hook.apply(detector) and hook.apply(detector)
    assert [c.__name__ for c in type(detector).__mro__].count('_KnowsObjects') == 1
    average, seen = copy.deepcopy(detector), record_keep(detector.backbone)
    samples = [sample(LEFT, RIGHT), sample(HorizontalBoxes(RIGHT))]
    detector(x, samples, mode='loss')['loss'].backward()
    reference = small_backbone(OBJECTS)
    with objects([LEFT, RIGHT]):
        expected = reference.draw(x).positions
    assert all(torch.equal(seen[key].keep, found.keep) for key, found in expected.items())
    with pytest.raises(ValueError, match='none have arrived'):
        detector.backbone(x)  # the boxes are gone
    seen.clear()
    average(x, samples, mode='loss')
    assert not seen and average.backbone._draws._counter.latest == (1, 0)


@pytest.fixture(name='config', scope='module')
def fixture_config():
    """The quick start's detector with few layers."""
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    config.model.backbone.arch = dict(depths=[1, 1, 2, 1], channels=[8, 16, 32, 64])
    config.model.neck.in_channels = [8, 16, 32, 64]
    config.custom_hooks = [dict(type='ObjectMasksHook')]
    return config


def test_memory_is_counted_with_these_masks(config):
    """With and without arithmetic; and where the maps of a batch are as large as what is not computed then."""
    config.model.backbone.sbp_cfg = dict(OBJECTS, dropped='nearest', recompute=True)
    case = dict(batch=2, height=64, width=96, boxes=2)
    assert measure_detector(config, **case)['saved'] == measure_detector(config, **case, compute=True)['saved']
    case = dict(batch=2, height=1088, width=1024, boxes=2)
    own = measure_detector(config, **case)['saved']
    config.model.backbone.sbp_cfg.sampler = 'random'
    shared = measure_detector(config, **case)['saved']
    positions_of_an_image = 272 * 256 + 136 * 128 + 68 * 64
    more = 1.5 * positions_of_an_image * 8  # kept, dropped, and half as many pairs, of one image more
    assert sum(own.values()) - sum(shared.values()) == more


def test_the_hook_needs_a_detector():
    with pytest.raises(ValueError, match='Linear has no detector'):
        ObjectMasksHook().apply(nn.Linear(1, 1))


def test_a_hook_that_nothing_asks_for_says_so():
    """With the settings of a backbone and of blocks that were changed in place."""
    cases = [(OBJECTS, {}, False), (dict(keep_ratio=0.5), {}, True)]
    cases += [(None, dict(sampler='objects'), False), (None, dict(keep_ratio=0.5), True)]
    for own, in_place, told in cases:
        detector, hook, log = Detector(own), ObjectMasksHook(), []
        if own is None:
            detector.backbone = SwinTransformer(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4))
            apply_sbp(detector.backbone, in_place)
        hook.apply(detector)
        hook.before_train(types.SimpleNamespace(model=detector, logger=types.SimpleNamespace(warning=log.append)))
        assert bool(log) == told and all("sampler='objects'" in line for line in log)


def test_boxes_of_samples():
    with pytest.raises(ValueError, match='with_bbox=True'):
        object_boxes([sample(None)])
    with pytest.raises(ValueError, match='the ground truth has no boxes'):
        object_boxes([DetDataSample()])
    with pytest.raises(ValueError, match='boxes of 5 numbers.*boxtype2tensor=False'):
        object_boxes([sample(torch.zeros(3, 5))])
    assert object_boxes([sample(LEFT), sample(HorizontalBoxes(RIGHT))])[1].equal(RIGHT)


def test_boxes_of_another_type(monkeypatch):
    upright = types.SimpleNamespace(tensor=LEFT)
    monkeypatch.setattr(HorizontalBoxes, 'convert_to', lambda self, kind: {'hbox': upright}[kind])
    assert object_boxes([sample(HorizontalBoxes(RIGHT))])[0] is LEFT
