"""What mmengine's runner would end with a traceback about is a line of the training script."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import TOOLS  # noqa: F401  it puts tools/ on the path
from mmdet.datasets import AspectRatioBatchSampler
from mmdet.registry import HOOKS
from mmengine.config import Config
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.hooks import EMAHook
from mmengine.model import MMDistributedDataParallel
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import IterBasedTrainLoop
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import sbp_mmdet
from sbp_mmdet.plan.command import main
from sbp_mmdet.plan.config_checks import check_config, refuse_uncounted_models
from sbp_mmdet.plan.config_keys import describe_mistake, refuse_bad_priorities, refuse_missing_scope
from sbp_mmdet.plan.config_values import list_loaders as list_loaders_of_the_planner
from sbp_mmdet.plan.pipeline import CannotRun
from sbp_mmdet.plan.rehearse import build_largest_batch
from sbp_mmdet.plan.strategies import refuse_strategies
from sbp_mmdet.resume import NoBatch, refuse_empty_loader

import hook_checks  # isort: skip
from annotation_files import PreflightError  # isort: skip
from runner_checks import check_launcher, check_optimizer, check_runner_keys, list_loaders  # isort: skip

IMAGES = [torch.zeros(1)] * 3
LOOP = dict(
    model=dict(type='DINO'),
    train_dataloader=dict(batch_size=2, dataset=dict(type='CocoDataset')),
    train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=1),
    optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
)


WRONG_VALUES = [
    (dict(train_cfg=dict(max_epochs='two')), "train_cfg.max_epochs='two' must be a whole number of 1 or more"),
    (dict(train_cfg=dict(max_epochs=1.5)), 'train_cfg.max_epochs=1.5 must be a whole number'),
    (dict(train_cfg=dict(max_iters=0)), 'train_cfg.max_iters=0 must be a whole number of 1 or more'),
    (dict(train_cfg=dict(val_interval=0)), 'train_cfg.val_interval=0 must be a whole number of 1 or more'),
    (dict(train_cfg=dict(max_iters=float('inf'))), 'train_cfg.max_iters=inf must be a whole number'),
    (dict(train_dataloader=dict(num_workers=-1)), 'train_dataloader.num_workers=-1 must be a whole number of 0'),
    (dict(randomness=dict(seed='abc')), "randomness.seed='abc' must be a whole number of 0 or more"),
    (
        dict(optim_wrapper=dict(accumulative_counts=0)),
        'optim_wrapper.accumulative_counts=0 must be a whole number of 1',
    ),
    (
        dict(default_hooks=dict(logger=dict(interval=0))),
        'default_hooks.logger.interval=0 must be a whole number of 1 or more',
    ),
    (dict(default_hooks=dict(logger=dict(interval=50.0))), 'default_hooks.logger.interval=50.0 must be a whole number'),
    (dict(log_processor=dict(window_size=0)), 'log_processor.window_size=0 must be a whole number of 1 or more'),
    (dict(log_level='foo'), "log_level='foo' is unknown; write one of 'DEBUG', 'INFO'"),
    (
        dict(train_dataloader=dict(dataset=dict(datasets=[dict(type='CocoDataset'), dict(times=0, dataset={})]))),
        'train_dataloader.dataset.datasets.1.times=0 leaves no image; write 1 or more',
    ),
    (
        dict(train_dataloader=dict(dataset=dict(datasets=()))),
        r'train_dataloader.dataset.datasets=\[\] leaves no image; name one data set or more',
    ),
]


class Stream(IterableDataset):
    def __iter__(self):
        yield from IMAGES


def test_a_config_without_validation_is_right():
    check_runner_keys(Config(dict(LOOP, val_cfg=None)), ('train', 'val'))


def test_numbers_that_the_loop_takes_are_right():
    numbers = dict(max_iters=9e4, val_begin=10.0, val_interval=18000.0)  # 90000 / 5, as in a config for V3Det
    loader = DataLoader(IMAGES, batch_size=2)
    loop = IterBasedTrainLoop(SimpleNamespace(iter=0), loader, **numbers)
    assert loop.max_iters == 90_000
    check_runner_keys(Config(dict(LOOP, train_cfg=dict(numbers, type='IterBasedTrainLoop'))), ('train',))
    never = dict(type='EpochBasedTrainLoop', max_epochs=1, val_interval=float('inf'))
    check_runner_keys(Config(dict(LOOP, train_cfg=never)), ('train',))
    counted = OptimWrapper(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), accumulative_counts=2.0)
    counted.initialize_count_status(torch.nn.Linear(1, 1), 0, 4)
    assert [counted.should_update() for counted._inner_count in range(1, 5)] == [False, True, False, True]
    counts = dict(optim_wrapper=dict(LOOP['optim_wrapper'], accumulative_counts=2.0))
    check_runner_keys(Config(dict(LOOP, **counts)), ('train',))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(model='DINO'), "model='DINO' must be a dict"),
        (dict(model=None), 'model=None must be a dict'),
        (dict(train_dataloader=None), 'has no train_dataloader; add what is missing'),
        (dict(train_cfg=None, optim_wrapper=None), 'has no train_cfg and no optim_wrapper'),
        (
            dict(val_cfg=dict(type='ValLoop')),
            'has no val_dataloader and no val_evaluator; .* set val_cfg to None to leave this loop out',
        ),
        (dict(train_dataloader=dict(batch_size='2')), "train_dataloader.batch_size='2' must be a whole number"),
        (dict(train_dataloader=dict(batch_size=0)), 'train_dataloader.batch_size=0 must be a whole number of 1'),
        (dict(train_dataloader=dict(batch_size=True)), 'train_dataloader.batch_size=True must be a whole number of 1'),
        (dict(train_dataloader=dict(dataset=dict(times=0, dataset={}))), 'train_dataloader.dataset.times=0 leaves no'),
        (
            dict(train_dataloader=dict(dataset=dict(dataset=dict(datasets=[])))),
            r'train_dataloader.dataset.dataset.datasets=\[\] leaves no image',
        ),
        *WRONG_VALUES,
    ],
)
def test_keys_of_the_runner(change, message):
    with pytest.raises(PreflightError, match=message):
        check_runner_keys(Config(dict(LOOP, **change)), ('train', 'val'))


@pytest.mark.parametrize(('change', 'message'), WRONG_VALUES)
def test_the_planner_refuses_the_same_values(change, message):
    check_config(Config(dict(LOOP, randomness=dict(seed=None), log_level=20)))
    with pytest.raises(ValueError, match=message):
        check_config(Config(dict(LOOP, **change)))


@pytest.mark.parametrize('several', [dict, list])
def test_several_loaders(several):
    """A loop of the user's own may have several. Each is checked, and no command takes their batches for a single's."""
    parts = dict(a=LOOP['train_dataloader'], b=LOOP['train_dataloader'] | dict(batch_size=0))
    loaders = parts if several is dict else [*parts.values()]
    config = Config(dict(LOOP, train_dataloader=loaders, val_dataloader=loaders, custom_hooks=[]))
    second = 'b' if several is dict else '1'
    with pytest.raises(PreflightError, match=f'train_dataloader.{second}.batch_size=0 must be'):
        check_runner_keys(config, ('train',))
    check_config(config)
    with pytest.raises(ValueError, match=f'data loaders .train_dataloader.., train_dataloader.{second}.. Such'):
        refuse_uncounted_models('a.py', config)
    with pytest.raises(CannotRun, match=f'list of data loaders .* train_dataloader.{second}'):
        build_largest_batch(SimpleNamespace(train_dataloader=None, cfg=config))
    config.train_dataloader = dict(a=parts['a']) if several is dict else [parts['a']]  # such a loop may have one
    with pytest.raises(ValueError, match='data loaders .train_dataloader.[a0]..'):
        refuse_uncounted_models('a.py', config)
    with pytest.raises(CannotRun, match='list of data loaders .train_dataloader.[a0]'):
        build_largest_batch(SimpleNamespace(train_dataloader=None, cfg=config))


def test_a_data_set_with_a_misspelt_key_is_no_loader():
    """What wraps a data set has one as a loader has; the scripts then say that the key should be 'dataset'."""
    loader = dict(batch_size=1, datset=dict(type='RepeatDataset', times=2, dataset=dict(type='CocoDataset')))
    config = Config(dict(LOOP, train_dataloader=loader))
    for found in (list_loaders(config, 'train'), list_loaders_of_the_planner(config, 'train_dataloader')):
        assert found == dict(train_dataloader=loader)


@pytest.mark.parametrize('own', [True, False], ids=['batch sampler', 'loader'])
def test_a_loader_that_drops_its_only_batch(own):
    def make(sampler, batch, drop=True):
        if own:
            return DataLoader(IMAGES, batch_sampler=AspectRatioBatchSampler(sampler, batch, drop_last=drop))
        return DataLoader(IMAGES, batch, sampler=sampler, drop_last=drop)

    with pytest.raises(
        NoBatch, match='drop_last=True leaves no batch, because a process has 3 images, .* batch_size=3'
    ):
        refuse_empty_loader(make(DefaultSampler(IMAGES), 4))
    refuse_empty_loader(make(DefaultSampler(IMAGES), 3))
    refuse_empty_loader(make(DefaultSampler(IMAGES), 4, drop=False))
    refuse_empty_loader(make(InfiniteSampler(IMAGES), 4))  # goes on with the first image again


def test_loaders_that_do_not_tell():
    refuse_empty_loader([DataLoader(IMAGES)])
    refuse_empty_loader(DataLoader(IMAGES, batch_size=None))
    refuse_empty_loader(DataLoader(Stream(), batch_size=4, drop_last=True))


@pytest.mark.parametrize('arguments', [dict(lr='0.01'), dict(lr=-1), dict(lrr=0.1), dict(lr=0.1, momentum='0.9')])
def test_arguments_that_an_optimizer_does_not_accept(arguments):
    check_optimizer(Config(LOOP))
    optimizer = dict(type='SGD', **arguments)
    key, value = [*arguments.items()][-1]
    with pytest.raises(PreflightError, match=rf'optim_wrapper.optimizer: SGD does not accept .*{key}={value!r} \('):
        check_optimizer(Config(dict(LOOP, optim_wrapper=dict(optimizer=optimizer))))


@pytest.mark.parametrize(('launcher', 'name'), [('pytorch', 'RANK'), ('slurm', 'SLURM_PROCID'), ('mpi', 'OMPI_COMM')])
def test_a_launcher_that_was_not_used(launcher, name, monkeypatch):
    for variable in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'SLURM_PROCID', 'OMPI_COMM_WORLD_LOCAL_RANK'):
        monkeypatch.delenv(variable, raising=False)
    check_launcher('none')
    with pytest.raises(PreflightError, match=f'--launcher {launcher}: .*{name}.* not in the environment; start'):
        check_launcher(launcher)


def test_a_launcher_that_was_used(monkeypatch):
    for variable in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'):
        monkeypatch.setenv(variable, '1')
    check_launcher('pytorch')


@pytest.mark.parametrize('priority', ['FIRST', '', 500, -1, 2.5, ['LOW']])
def test_priorities_that_mmengine_does_not_know(priority):
    hooks = [dict(type='LeanHook', priority=0), dict(type='LeanHook', priority=priority)]
    refuse_bad_priorities([*hooks[:1], dict(type='LeanHook', priority='LOW'), dict(type='LeanHook', priority=None)])
    with pytest.raises(ValueError, match=r'custom_hooks.1.priority=.* is unknown; write one of .*VERY_LOW'):
        refuse_bad_priorities(hooks)
    with pytest.raises(PreflightError, match=r'custom_hooks.1.priority='):
        hook_checks._check_priorities(Config(dict()), hooks)


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        (dict(budget='lots'), "budget 'lots' cannot be read"),
        (dict(budget=8), 'budget 8 cannot be read'),
        (dict(stop='no'), "stop='no' must be True or False"),
        (dict(budgt='8GiB'), "RehearseHook has an unknown key 'budgt'; did you mean 'budget'"),
    ],
)
def test_settings_of_a_rehearsal(keys, message):
    with pytest.raises(ValueError, match=message):
        sbp_mmdet.RehearseHook(**keys)
    config = Config(dict(custom_hooks=[dict(type='RehearseHook', **keys)], model=dict(type='DINO')))
    with pytest.raises(PreflightError, match=message):
        hook_checks.check_hooks(config)
    with pytest.raises(ValueError, match=message):
        check_config(config)


def test_a_toolbox_that_is_not_installed():
    for scope in ('mmdet', None, 'mmengine'):
        refuse_missing_scope(Config(dict(model={}, default_scope=scope)))
    with pytest.raises(ValueError, match=r"a config for mmyolo \(default_scope='mmyolo'\), which is not installed"):
        refuse_missing_scope(Config(dict(model=dict(type='YOLODetector'), default_scope='mmyolo')))


def test_a_class_of_mmdet_without_its_scope():
    """The remedy is not the name that is there already."""
    config = Config(dict(custom_hooks=[dict(type='MeanTeacherHook')]))
    error = KeyError('MeanTeacherHook is not in the mmengine::hook registry. Please check ...')
    assert HOOKS.get('MeanTeacherHook') is not None
    said = describe_mistake(config, error)
    assert said.endswith("mmdet has it; write default_scope = 'mmdet' in the config") and 'did you mean' not in said


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (
            dict(optim_wrapper=dict(constructor='LayerDecayOptimizerConstructr')),
            "optim_wrapper.constructor='LayerDecayOptimizerConstructr' is not registered; did you mean",
        ),
        (
            dict(custom_hooks=[dict(type='EMAHook', ema_type='ExpMomentumEMAA')]),
            "custom_hooks.0.ema_type='ExpMomentumEMAA' is not registered; did you mean 'ExpMomentumEMA'",
        ),
        (
            dict(activation_checkpointing=['layers', 'layers.2']),
            r"activation_checkpointing=\['layers', 'layers.2'\]: the model has no 'layers.2'; name submodules",
        ),
        (dict(efficient_conv_bn_eval='backbone'), "efficient_conv_bn_eval='backbone': the model has no 'backbone'"),
    ],
)
def test_mistakes_in_keys_without_a_type(change, said):
    """What mmengine raises when it uses them does not name the key."""
    model = nn.ModuleDict(dict(layers=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))))
    config = Config(dict(LOOP, **change))
    with pytest.raises((AttributeError, KeyError)) as found:
        if 'optim_wrapper' in change:
            build_optim_wrapper(model, dict(LOOP['optim_wrapper'], **change['optim_wrapper']))
        elif 'custom_hooks' in change:
            EMAHook('ExpMomentumEMAA').before_run(SimpleNamespace(model=model))
        elif 'activation_checkpointing' in change:
            turn_on_activation_checkpointing(model, config.activation_checkpointing)
        else:
            turn_on_efficient_conv_bn_eval(model, config.efficient_conv_bn_eval)
    assert re.match(said, describe_mistake(config, found.value)), describe_mistake(config, found.value)


def test_attribute_errors_of_other_code_are_not_about_the_config():
    with pytest.raises(AttributeError) as found:
        _ = IMAGES.no_such
    assert describe_mistake(Config(dict(LOOP, activation_checkpointing=['layers'])), found.value) is None


@MODEL_WRAPPERS.register_module(force=True)
class OwnWrapper(MMDistributedDataParallel):
    """A wrapper of the user's own, with which each GPU holds all of the model."""


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (dict(model_wrapper_cfg=dict(type='OwnWrapper')), None),
        (dict(model_wrapper_cfg=dict(type=OwnWrapper)), None),
        (dict(model_wrapper_cfg=dict(type='DistributedDataParallel')), None),
        (dict(model_wrapper_cfg=dict(find_unused_parameters=True)), None),
        (dict(strategy=dict(type='DDPStrategy')), None),
        (dict(model_wrapper_cfg=dict(type='MMFullyShardedDataParallel')), 'MMFullyShardedDataParallel spreads weights'),
        (dict(strategy=dict(type='FSDPStrategy')), 'strategy=FSDPStrategy spreads weights'),
        (dict(strategy=dict(type='DeepSpeedStrategy')), 'strategy=DeepSpeedStrategy spreads weights'),
        (
            dict(model_wrapper_cfg=dict(type='MMDistributedDataParalel')),
            "model_wrapper_cfg.type='MMDistributedDataParalel' is not registered; did you mean",
        ),
    ],
)
def test_wrappers_and_strategies(change, said):
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        refuse_strategies('a.py', Config(dict(LOOP, **change)))


def test_a_report_needs_no_optimizer(tmp_path, capsys):
    """Not every constructor of optimizers takes every model: this one takes ConvNeXt alone."""
    kind = 'LearningRateDecayOptimizerConstructor'
    options = "optimizer=dict(weight_decay=0.1), paramwise_cfg=dict(num_layers=6, decay_type='layer_wise')"
    config = "_base_ = 'mmdet::retinanet/retinanet_r18_fpn_1x_coco.py'\n"
    (tmp_path / 'a.py').write_text(f"{config}optim_wrapper = dict(constructor='{kind}', {options})\n")
    main(['report', str(tmp_path / 'a.py')])
    assert 'exact, stores less' in capsys.readouterr().out
