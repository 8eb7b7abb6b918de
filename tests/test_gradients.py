"""The study of gradients compares with exact gradients, and its figures follow from the definitions."""

import copy
import json
import sys

import pytest
import torch
from helpers import make_project
from mmengine.config import Config
from torch import nn

import gradients  # isort: skip  (helpers puts research/ on the path)
from gradients import compare, exact_pass, run_study, study_table
from plain_detector import build_model, train_batches
from stand_ins import copy_into_module

from sbp_mmdet import apply_lean


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp('project')
    path = make_project(folder, train=4, val=1)
    config = Config.fromfile(path)
    config.train_dataloader.dataset.data_root = str(folder / 'data/shapes') + '/'
    config.model.backbone.drop_path_rate = 0.3
    return path, config


@pytest.fixture(scope='module')
def model(project):
    return build_model(project[1])


@pytest.fixture(scope='module')
def batches(project):
    return list(train_batches(project[1], 2))


def test_exact_pass_is_that_of_a_training_step(model, batches):
    exact = exact_pass(model, batches[0], seed=3)
    torch.manual_seed(3)
    hook = model.backbone.register_forward_pre_hook(lambda *_: torch.manual_seed(3) and None)
    data = model.data_preprocessor(copy.deepcopy(batches[0]), True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    hook.remove()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert exact.loss == loss.item() and set(exact.gradients) == set(expected)
    assert all(torch.equal(exact.gradients[name], grad) for name, grad in expected.items())
    model.zero_grad()


@pytest.mark.parametrize('whole', [False, True])
def test_study(model, batches, whole, monkeypatch):
    """Exact presets are exact, the paper's gradient is as short as its keep ratio says, and the model stays plain."""
    if whole:  # heads without kinks: on each CPU rounding puts other numbers on the other side of a ReLU's
        model = copy.deepcopy(model)
        for module in model.modules():
            if getattr(module, 'with_activation', False):
                module.activate = nn.GELU()
        soft = copy_into_module('torch.nn.functional', lambda x, inplace=False: torch.nn.functional.softplus(x), 'relu')
        monkeypatch.setattr(torch.nn.functional, 'relu', soft)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = ['exact', 'with_cp', 'sbp'] if not whole else ['exact']
    keys = dict(modules=['backbone', 'neck', 'roi_head']) if whole else {}  # RPN's operation has a ReLU of its own
    study = run_study(model, {name: (name, keys) for name in names}, batches, whole=whole)
    for name in names:
        row = study[name]['backbone']
        assert len(row['cosine']['values']) == len(batches)
        exact = name != 'sbp'
        assert (row['relative_error']['mean'] < 1e-4) == exact
    if not whole:
        paper = study['sbp']
        assert 0.3 < paper['backbone']['cosine']['mean'] < 0.95 and paper['backbone']['norm_ratio']['mean'] < 1
        assert paper['stage 4']['cosine']['mean'] > 0.999 > paper['stage 1']['cosine']['mean']  # stage 4 is not thinned
        assert paper['neck']['relative_error']['mean'] == 0
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_another_forward_pass_is_refused(model, batches, monkeypatch):
    def spoil(*args, **keys):
        report = apply_lean(*args, **keys)
        args[0].register_forward_hook(lambda module, _, outs: tuple(1.1 * out for out in outs))
        return report

    monkeypatch.setattr(gradients, 'apply_lean', spoil)
    with pytest.raises(ValueError, match='the forward pass differs from the plain one by'):
        run_study(model, {'exact': ('exact', {})}, batches[:1])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="'mine': .*keep_ratio=7"):
        run_study(model, {'mine': ('sbp', dict(keep_ratio=7))}, batches[:1])


def test_compare_by_hand():
    exact = {'backbone.a': torch.tensor([3.0, 4]), 'backbone.b': torch.tensor([2.0]), 'neck.c': torch.zeros(2)}
    estimated = {'backbone.a': torch.tensor([3.0, 0]), 'backbone.b': torch.tensor([2.0])}
    rows = compare(exact, estimated, {'backbone.a': 1})
    assert rows['stage 1'] == pytest.approx(dict(cosine=0.6, relative_error=0.8, norm_ratio=0.6))
    assert rows['backbone']['relative_error'] == pytest.approx((16 / 29) ** 0.5)
    assert rows['mean layer']['cosine'] == pytest.approx(0.8)
    assert rows['neck'] == dict(cosine=None, relative_error=None, norm_ratio=None)


def test_starts(project, tmp_path):
    """The study starts from a checkpoint of a detector, from one of a backbone, or without any."""
    _, config = project
    model = build_model(config, seed=4)
    assert model.training
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'whole.pth')
    torch.save(model.backbone.state_dict(), tmp_path / 'backbone.pth')
    whole, part = (build_model(config, str(tmp_path / f'{name}.pth'), seed=5) for name in ('whole', 'backbone'))
    for name, p in model.state_dict().items():
        assert torch.equal(whole.state_dict()[name], p)
        if name.startswith('backbone.'):
            assert torch.equal(part.state_dict()[name], p)
    torch.save(dict(state_dict={'backbone.x': torch.zeros(1)}), tmp_path / 'other.pth')
    for name, message in (('other', 'is not one of this config'), ('none', 'does not exist')):
        with pytest.raises(ValueError, match=message):
            build_model(config, str(tmp_path / f'{name}.pth'))


def test_command_line(project, monkeypatch, tmp_path, capsys):
    path, config = project
    out = tmp_path / 'out.json'
    root = f'train_dataloader.dataset.data_root={config.train_dataloader.dataset.data_root}'
    words = ['--presets', 'sbp,keep_ratio=0.25', '--batches', '2', '--json', str(out)]
    monkeypatch.setattr(sys, 'argv', ['gradients.py', str(path), *words, '--cfg-options', root])
    gradients.main()
    results = json.loads(out.read_text())
    assert 'mean ± standard deviation' in capsys.readouterr().out
    assert study_table(results).splitlines()[1].count(' ± ') == 9
    for words, message in ((['--batches', '0'], '--batches 0'), (['--presets', 'fused'], "preset='fused'")):
        monkeypatch.setattr(sys, 'argv', ['gradients.py', str(path), *words])
        with pytest.raises(SystemExit):
            gradients.main()
        assert message in capsys.readouterr().err
