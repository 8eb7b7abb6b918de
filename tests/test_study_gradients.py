"""The study of gradients, against numbers worked out by hand and SBP by its definition in plain torch."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import CONFIGS, make_project
from mmcv.cnn.bricks import DropPath
from mmengine.config import Config
from oracles import SMALL, image, loss_of, masks_of, oracle_convnext, record_keep, small_backbone, where_sbp

from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.functional import sbp
from sbp_mmdet.masks import Positions
from sbp_mmdet.models.convnext_layers import ConvNeXtBlock
from sbp_mmdet.study import gradient_norms, gradients, kept, measures, subject
from sbp_mmdet.study import settings as study_settings

OPTIONS = dict(arch=SMALL, out_indices=[0, 1, 2, 3], gap_before_final_norm=False, layer_scale_init_value=1.0)
BACKBONE = Config(dict(model=dict(backbone=dict(type='SBPConvNeXt', **OPTIONS))))


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """A detector of a few layers with a data set of eight small images."""
    folder = tmp_path_factory.mktemp('project')
    return load_config(str(make_project(folder)), {'train_dataloader.dataset.data_root': f'{folder}/data/shapes/'})


@pytest.fixture(scope='module')
def model(config):
    return subject.build_model(config)


@pytest.fixture(scope='module')
def batches(config):
    return list(subject.train_batches(config, 2))


@pytest.fixture(scope='module')
def exact(model, batches):
    return gradients.exact_pass(model, batches[0], 3)


def of_backbone(sbp_cfg=None, seed=0):
    """A small backbone's weights, and an exact pass of it with a loss that weighs every output entry differently."""
    weights = small_backbone(dtype=torch.float32)
    x = image(dtype=torch.float32)
    outputs = weights(x)
    output_gradients = torch.autograd.grad(loss_of(outputs), outputs)
    exact = gradients.ExactPass({}, x, tuple(o.detach() for o in outputs), output_gradients, 0.0, seed)
    return weights, exact


def test_compare_by_hand():
    exact = {
        'backbone.stages.0.0.norm.weight': torch.tensor([3.0, 4.0]),
        'backbone.stages.0.0.norm.bias': torch.tensor([0.0]),
        'backbone.norm3.weight': torch.tensor([[1.0], [2.0]]),
        'roi_head.fc.weight': torch.tensor([12.0]),
    }
    estimate = {
        'backbone.stages.0.0.norm.weight': torch.tensor([6.0, 8.0]),
        'backbone.stages.0.0.norm.bias': torch.tensor([5.0]),
        'backbone.norm3.weight': torch.tensor([[2.0], [-1.0]]),
        'roi_head.fc.weight': exact['roi_head.fc.weight'],
    }
    found = measures.compare(exact, estimate)
    assert list(found) == ['network', 'backbone', 'stage 1', 'stages.0.0.norm', 'stage 4', 'norm3', 'mean layer']

    def check(part, cosine, relative_error, norm_ratio):
        expected = dict(cosine=cosine, relative_error=relative_error, norm_ratio=norm_ratio)
        assert found[part] == pytest.approx(expected), part

    # e = (3, 4, 0), s = (6, 8, 5): product 50, norms 5 and sqrt(125), difference (3, 4, 5)
    check('stages.0.0.norm', 50 / (5 * 125**0.5), 50**0.5 / 5, 125**0.5 / 5)
    check('stage 1', 50 / (5 * 125**0.5), 50**0.5 / 5, 125**0.5 / 5)
    check('norm3', 0, (1 + 9) ** 0.5 / 5**0.5, 1)
    check('backbone', 50 / (30 * 130) ** 0.5, (50 + 10) ** 0.5 / 30**0.5, (130 / 30) ** 0.5)
    check('network', 194 / (174 * 274) ** 0.5, 60**0.5 / 174**0.5, (274 / 174) ** 0.5)
    mean = [(found['stages.0.0.norm'][m] + found['norm3'][m]) / 2 for m in measures.MEASURES]
    check('mean layer', *mean)


def test_compare_where_there_is_nothing():
    exact = {'backbone.norm0.weight': torch.ones(2), 'backbone.norm1.weight': torch.zeros(2)}
    found = measures.compare(exact, {})
    assert found['norm0'] == dict(cosine=None, relative_error=1, norm_ratio=0)
    assert found['norm1'] == dict(cosine=None, relative_error=None, norm_ratio=None)
    assert found['mean layer'] == dict(cosine=None, relative_error=1, norm_ratio=0)
    with pytest.raises(ValueError, match='backbone.norm2.weight'):
        measures.compare(exact, {'backbone.norm2.weight': torch.ones(2)})


def test_summary():
    rows = [{'x': dict(cosine=c, relative_error=e, norm_ratio=None)} for c, e in ((0.5, 1.0), (0.75, None), (1.0, 4.0))]
    found = measures.summary(rows)['x']
    assert found['cosine']['mean'] == pytest.approx(0.75) and found['cosine']['values'] == [0.5, 0.75, 1.0]
    assert found['cosine']['std'] == pytest.approx(np.std([0.5, 0.75, 1.0], ddof=1))
    assert found['relative_error'] == dict(mean=2.5, std=pytest.approx(4.5**0.5), values=[1.0, None, 4.0])
    assert found['norm_ratio']['mean'] is None and found['norm_ratio']['std'] is None
    assert measures.summary(rows[:1])['x']['cosine'] == dict(mean=0.5, std=None, values=[0.5])


@pytest.mark.parametrize('sbp_cfg', [dict(), dict(keep_ratio=0.25, sampler='random', implementation='reference')])
def test_estimate_is_sbp_by_its_definition(sbp_cfg):
    weights, exact = of_backbone()
    backbone = gradients.backbone_with(BACKBONE, sbp_cfg, weights)
    seen = record_keep(backbone)
    found = gradients.estimate(backbone, exact)

    state = {name: p.detach().requires_grad_() for name, p in weights.named_parameters()}
    outs = oracle_convnext(state, exact.images, SMALL['depths'], masks_of(seen, *exact.images.shape[-2:]))
    torch.autograd.backward(outs, exact.output_gradients)
    assert len(found) == len(state) and len(masks_of(seen, 64, 64)) == 7
    for name, p in state.items():
        torch.testing.assert_close(found[f'backbone.{name}'], p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max().item())
    assert all(p.grad is None for p in weights.parameters())


def test_estimate_refuses_another_forward_pass():
    weights, exact = of_backbone()
    with torch.no_grad():
        weights.norm3.bias[0] += 0.1
    with pytest.raises(ValueError, match='forward pass differs'):
        gradients.estimate(gradients.backbone_with(BACKBONE, dict(), weights), exact)


@pytest.mark.parametrize('sbp_cfg', [None, dict(keep_ratio=0.5), dict(sampler='objects')])
def test_running_the_backbone_alone_is_running_the_detector(sbp_cfg, config, model, batches, in_fp64):
    """Proposals, sampled RoIs and stochastic depth included: the whole detector with SBP gives the same gradients."""
    config = copy.deepcopy(config)
    config.model.backbone.drop_path_rate = 0.5
    model = copy.deepcopy(model).double()
    alone, whole = copy.deepcopy(model), copy.deepcopy(model)
    alone.backbone = gradients.backbone_with(config, None, model.backbone)
    exact = gradients.exact_pass(alone, batches[0], 3)
    found = gradients.estimate(gradients.backbone_with(config, sbp_cfg, model.backbone), exact)
    whole.backbone = gradients.backbone_with(config, sbp_cfg, model.backbone)
    expected = gradients.exact_pass(whole, batches[0], 3).gradients
    assert found.keys() == expected.keys() and any(not name.startswith('backbone.') for name in found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6 * value.abs().max().item() + 1e-12)


def test_a_study_whose_control_fails_says_so(config, model, batches, monkeypatch):
    def doubled(*args):
        found = exact_pass(*args)
        return found._replace(output_gradients=tuple(2 * g for g in found.output_gradients))

    exact_pass = gradients.exact_pass
    monkeypatch.setattr(gradients, 'exact_pass', doubled)
    with pytest.raises(ValueError, match=r'differ from those of the detector by 1\.0e\+00'):
        gradients.study(config, {'half': {}}, batches[:1], model=model)


def test_exact_pass_repeats_itself(model, batches, exact):
    again = gradients.exact_pass(model, batches[0], 3)
    assert again.loss == exact.loss and again.gradients.keys() == exact.gradients.keys()
    for name, value in exact.gradients.items():
        assert torch.equal(again.gradients[name], value)


def test_study(config, model, batches):
    ticks = []
    settings = {'all': dict(keep_ratio=1.0), 'most': dict(keep_ratio=0.9), 'few': dict(keep_ratio=0.1)}
    found = gradients.study(config, settings, batches, 5, lambda: ticks.append(1), model=model)
    assert len(ticks) == 2 * (1 + 3) and list(found) == list(settings)
    for part in ('network', 'backbone', 'stage 1'):
        assert found['all'][part]['cosine']['mean'] == pytest.approx(1, abs=1e-6)
        assert found['all'][part]['relative_error']['mean'] < 1e-4
        assert 1 > found['most'][part]['cosine']['mean'] > found['few'][part]['cosine']['mean']
    assert found['few']['stage 4']['relative_error']['mean'] < 1e-4  # nothing is dropped above it
    by_hand = []
    for i, batch in enumerate(batches):
        exact = gradients.exact_pass(model, batch, 5 + i)
        estimate = gradients.estimate(gradients.backbone_with(config, settings['few'], model.backbone), exact)
        by_hand.append(measures.compare(exact.gradients, estimate)['backbone']['cosine'])
    assert found['few']['backbone']['cosine']['values'] == by_hand and by_hand[0] != by_hand[1]
    assert found['few']['backbone']['cosine']['mean'] == pytest.approx(sum(by_hand) / 2)


def test_fp32_is_not_tf32(config, model, batches):
    """Neither cuDNN's nor that of matrix products; both are as before afterwards."""

    def precision():
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    seen = []
    torch.set_float32_matmul_precision('high')
    try:
        before = precision()
        gradients.study(config, {'x': {}}, batches[:1], model=model, on_exact=lambda exact: seen.append(precision()))
        assert seen == [(False, 'highest')] and precision() == before == (True, 'high')
    finally:
        torch.set_float32_matmul_precision('highest')


def test_study_names_a_bad_setting_first(config):
    with pytest.raises(ValueError, match="setting 'x'.*keep_ratio=1.5"):
        gradients.study(config, {'x': dict(keep_ratio=1.5)}, batches=None)


def test_subject_names_what_is_wrong(config, tmp_path):
    with pytest.raises(ValueError, match='SBP does not apply to it'):
        subject.build_model(load_config('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'))
    with pytest.raises(ValueError, match='none.pth does not exist'):
        subject.build_model(config, tmp_path / 'none.pth')
    torch.save(dict(state_dict={'backbone.norm0.weight': torch.ones(8)}), tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='other.pth is not one of this config: .*[Mm]issing key'):
        subject.build_model(config, tmp_path / 'other.pth')
    missing = copy.deepcopy(config)
    missing.train_dataloader.dataset.data_root = str(tmp_path)
    with pytest.raises(ValueError, match='train_dataloader: .*No such file'):
        list(subject.train_batches(missing, 1))


def test_subject_takes_a_checkpoint_and_repeats_batches(config, model, tmp_path):
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'model.pth')
    loaded = subject.build_model(config, tmp_path / 'model.pth', seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    first, again = (list(subject.train_batches(config, 6, seed=2)) for _ in range(2))  # four batches make an epoch
    ids = [[sample.img_id for sample in batch['data_samples']] for batch in first]
    assert len(ids) == 6 and len({i for pair in ids[:4] for i in pair}) == 8 and ids[4:] != ids[:2]  # shuffled anew
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a['inputs'], b['inputs'], strict=True))


@pytest.mark.parametrize(
    'sbp_cfg, layer',
    [
        (dict(), 'stages.2.1'),
        (dict(sampler='random', keep_ratio=0.25, implementation='reference'), 'stages.2.1'),
        (dict(blocks=(1, 0, 0, 0)), 'downsample_layers.2'),
        (dict(keep_ratio=[0.25, 0.5, 0.75, 0.5, 1.0]), 'stages.2.0'),
    ],
)
def test_kept_positions_of_the_last_layer_are_exact(sbp_cfg, layer, monkeypatch):
    weights, exact = of_backbone()
    check = kept.check_kept(BACKBONE, sbp_cfg, weights, exact)
    assert check.layer == layer and check.error < 1e-5 and check.dropped == 0

    def swapped(block, x, keep=None, images=None):
        return forward(block, x, keep and Positions(keep=keep.drop, drop=keep.keep), images)

    if layer.startswith('stages'):  # the check sees it if other positions than those are kept
        forward = ConvNeXtBlock.forward
        monkeypatch.setattr(ConvNeXtBlock, 'forward', swapped)
        check = kept.check_kept(BACKBONE, sbp_cfg, weights, exact)
        assert check.error == 1 and check.dropped > 0.1


@pytest.mark.parametrize('blocks', [(1, 1, 1, 0), (1, 0, 0, 0)])  # the last layer is a block, or downsampling
def test_kept_positions_of_each_image_are_exact(blocks):
    weights, exact = of_backbone()
    exact = exact._replace(boxes=[torch.tensor([[3.0 * i, 5, 20 + 4 * i, 30]]) for i in range(len(exact.images))])
    check = kept.check_kept(BACKBONE, dict(sampler='objects', blocks=blocks), weights, exact)
    assert len(exact.images) > 1 and check.error < 1e-5 and check.dropped == 0


def test_kept_positions_where_nothing_is_dropped():
    weights, exact = of_backbone()
    assert kept.check_kept(BACKBONE, dict(keep_ratio=1.0), weights, exact) is None


def test_ready_made_settings():
    paper = [0.25, 0.32, 0.39, 0.46, 0.53, 0.60, 0.68, 0.75]
    assert study_settings.increasing(8) == paper and study_settings.increasing(1) == [0.5]
    for blocks in (2, 5, 12, 27):
        ratios = study_settings.increasing(blocks)
        assert len(ratios) == blocks and ratios == sorted(ratios) and set(ratios) <= set(paper)
        assert sum(ratios) / blocks == pytest.approx(0.5, abs=0.01)

    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py'))
    config.model.backbone.sbp_cfg = dict(keep_ratio=0.3, recompute=True, skip_dropped_images=True)
    orders = study_settings.group('orders', config)
    assert orders['uniform 0.5'] == dict(keep_ratio=0.5, recompute=True)
    assert (
        orders['increasing']['keep_ratio'] == orders['decreasing']['keep_ratio'][::-1] == study_settings.increasing(12)
    )
    # What a block keeps: channels x positions, 96 x 64, 192 x 16 and 384 x 4 of an image of 32 x 32 positions.
    stored = np.array([96 * 64] * 3 + [192 * 16] * 3 + [384 * 4] * 6)
    for order in ('increasing', 'decreasing'):
        share = (stored * orders[order]['keep_ratio']).sum() / stored.sum()
        assert any(abs(cfg['keep_ratio'] - share) < 0.006 for cfg in list(orders.values())[3:])
    assert list(study_settings.group('ratios', config)) == ['0.75', '0.5', '0.25']
    samplers = study_settings.group('samplers', config)
    assert len(samplers) == 6 and samplers['random 0.25'] == dict(keep_ratio=0.25, sampler='random', recompute=True)
    blocks = study_settings.group('blocks', config)
    assert [cfg['blocks'] for cfg in blocks.values()] == [
        (3, 0, 0, 0), (3, 3, 0, 0), (3, 3, 6, 0), (3, 3, 9, 0), (3, 3, 9, 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'order' is unknown"):
        study_settings.group('order', config)


def test_settings_as_text():
    parse = study_settings.parse_setting
    assert parse('a b: keep_ratio=0.25 sampler=random') == ('a b', dict(keep_ratio=0.25, sampler='random'))
    assert parse('x: blocks=3,3,0,0 recompute=block') == ('x', dict(blocks=[3, 3, 0, 0], recompute='block'))
    assert parse('recompute=True keep_ratio=0.3,0.5')[1] == dict(recompute=True, keep_ratio=[0.3, 0.5])
    for text in ('', ':', 'a:', 'a: b', ': keep_ratio=0.5', 'a: b="'):
        with pytest.raises(ValueError, match='setting'):
            parse(text)


def test_two_pointwise_layers_with_disjoint_positions_vanish():
    """The paper's prediction, without anything around the layers (eq. 8 and 9)."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
    x = torch.randn(2, 6, 4, requires_grad=True)
    even, odd = torch.arange(0, 6, 2), torch.arange(1, 6, 2)
    for lower, vanishes in ((Positions(even, odd), False), (Positions(odd, even), True)):
        first.zero_grad()
        sbp(second, sbp(first, x, lower), Positions(even, odd)).square().sum().backward()
        assert (not first.weight.grad.any()) == vanishes


def test_disjoint_pointwise_layers():
    weights, exact = of_backbone()
    backbone = gradients.backbone_with(BACKBONE, dict(), weights)
    seen = record_keep(backbone)
    gradient_norms.disjoint_pointwise(backbone)
    found = gradients.estimate(backbone, exact)
    masks = masks_of(seen, 64, 64)
    block = weights.stages[2][1]
    for stage, index in (key for key in masks if key[1] != 'downsample'):
        for name in ('depthwise_conv', 'norm', 'pointwise_conv1'):
            assert not found[f'backbone.stages.{stage}.{index}.{name}.weight'].any()
        assert found[f'backbone.stages.{stage}.{index}.pointwise_conv2.weight'].any()
    assert found['backbone.downsample_layers.0.0.weight'].any()  # through the residual connections

    # One block by its definition, here with masks that overlap.
    x = torch.randn(2, 16, 4, 4)
    lower, upper = torch.arange(10), torch.arange(3, 16)
    keep = Positions(keep=upper, drop=lower)  # the second layer keeps the one, the first layer the other
    weight = torch.randn(2, 16, 4, 4)

    def first(t):
        return block.pointwise_conv1(block.norm.tokens(t))

    def second(t):
        return block.pointwise_conv2(F.gelu(t)) * block.gamma

    def masked(index):
        return torch.zeros(16, dtype=torch.bool).index_fill(0, index, True).view(4, 4, 1)

    tokens = block.depthwise_conv(x).permute(0, 2, 3, 1)
    out = x + where_sbp(second, where_sbp(first, tokens, masked(lower)), masked(upper)).permute(0, 3, 1, 2)
    parameters = list(block.parameters())
    expected = torch.autograd.grad((out * weight).sum(), parameters)
    gradient_norms.disjoint_pointwise(weights)
    actual_out = block(x, keep)
    torch.testing.assert_close(actual_out[..., 1:, :], out[..., 1:, :])
    block.drop_path = DropPath(0.75)
    scaled = block(x, keep, torch.tensor([True, True]))  # images that were drawn before
    torch.testing.assert_close(scaled - x, 4 * (actual_out - x))
    actual = torch.autograd.grad((actual_out * weight).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)


def test_disjoint_blocks():
    weights, exact = of_backbone()
    backbone = gradients.backbone_with(BACKBONE, dict(sampler='random'), weights)
    seen = record_keep(backbone)
    gradient_norms.disjoint_blocks(backbone)
    gradients.estimate(backbone, exact)
    masks = masks_of(seen, 64, 64)
    order = kept.in_order(backbone.keep_ratios())
    assert order == [(0, 0), (1, 'downsample'), (1, 0), (1, 1), (2, 'downsample'), (2, 0), (2, 1)]
    for a, b in zip(order, order[1:], strict=False):
        factor = 2 ** (b[0] - a[0])
        assert torch.equal(masks[a], ~masks[b].repeat_interleave(factor, 0).repeat_interleave(factor, 1))


def test_norms_over_training(config, model, batches):
    ticks = []
    variants = {'none': (None, None), 'half': (dict(), None), 'apart': (dict(), gradient_norms.disjoint_pointwise)}
    found = gradient_norms.norms_over_training(config, variants, batches, 3, 7, lambda: ticks.append(1))
    assert len(ticks) == 9 and list(found) == list(variants)
    start = subject.build_model(config, seed=7)
    expected = gradients.exact_pass(start, batches[0], 7).gradients
    names = ['backbone.stages.2.1.norm.weight', 'backbone.stages.2.1.norm.bias']
    by_hand = sum(expected[name].square().sum() for name in names) ** 0.5
    assert found['none']['norms']['stages.2.1.norm'][0] == pytest.approx(by_hand.item(), rel=1e-3)
    total = sum(value.square().sum() for value in expected.values()) ** 0.5
    assert found['none']['norms']['network'][0] == pytest.approx(total.item(), rel=1e-3)
    assert len(set(found['none']['loss'])) == 3
    assert found['half']['loss'][0] == pytest.approx(found['none']['loss'][0], rel=1e-4)  # one start, one batch
    assert found['half']['norms']['stage 4'][0] == pytest.approx(found['none']['norms']['stage 4'][0], rel=1e-3)
    assert found['half']['norms']['stage 1'][0] < 0.9 * found['none']['norms']['stage 1'][0]
    assert found['apart']['norms']['stages.2.1.pointwise_conv1'] == [0, 0, 0]
