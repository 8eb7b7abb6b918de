"""Variants whose step cannot be run, as DDQ's in mixed precision, are told and left out of the plan.

Of configs that cannot be planned at all, the message says what is true of them.
"""

import re
from pathlib import Path

import pytest
from mmdet.models import RetinaNet
from mmdet.registry import MODELS
from test_command_errors import RETINA, line_of
from test_plan_command import FRCNN, GB, _count_of_variant

from sbp_mmdet.plan import command, counts
from sbp_mmdet.plan.batch_size import find_largest_batches
from sbp_mmdet.plan.planner import plan
from sbp_mmdet.plan.variants import load_config, make_plain

CASE = ['plan', FRCNN, '--size', '64x64', '--boxes', '1', '--budget', '8GiB']
HALF = RuntimeError('no such product in half precision')


def fail_in(*failing):
    """Return a function that counts 20 GB for each variant, and raises for some."""

    def measure(variant, *_):
        if any(variant.endswith(name) for name in failing):
            raise HALF
        return _count_of_variant(20 * GB, GB)

    return measure


@pytest.mark.parametrize('failing', [('amp',), ('with_cp',), ('int8', 'cp-heads', 'cp-rpn', 'cp-neck')], ids=str)
def test_the_others_are_counted(failing):
    config, told = make_plain(load_config(FRCNN)), []
    presets = ('none', 'with_cp', 'exact', 'int8')
    expected = [row.variant for row in plan(config, GB, fail_in(), presets)]
    rows = plan(config, GB, fail_in(*failing), presets, failed=lambda *failure: told.append(failure))
    dropped = [name for name in expected if name not in [row.variant for row in rows]]
    assert len(dropped) == 1 and [row.variant for row in rows] == [name for name in expected if name not in dropped]
    assert {name for name, _ in told} >= {*dropped} and all(error is HALF for _, error in told)
    with pytest.raises(RuntimeError, match='half precision'):
        plan(config, GB, fail_in(*failing), presets)


def test_a_plain_model_that_fails_has_no_plan():
    with pytest.raises(RuntimeError, match='half precision'):
        plan(make_plain(load_config(FRCNN)), GB, fail_in('none'), ('none', 'exact'), failed=lambda *failure: None)


def test_largest_batches_of_the_others():
    config, told, presets = load_config(FRCNN), [], ('none', 'exact')
    options = dict(failed=lambda *failure: told.append(failure))
    rows = find_largest_batches(config, GB, fail_in('exact+amp'), presets, **options)
    assert [row.variant for row in rows] == ['none', 'exact', 'none+amp'] and told == [('exact+amp', HALF)]
    with pytest.raises(RuntimeError, match='half precision'):
        find_largest_batches(config, GB, fail_in('none'), presets, **options)


@pytest.mark.parametrize('batch', ['2', 'max'])
def test_the_command_warns(batch, monkeypatch, capsys):
    monkeypatch.setattr(counts, 'list_presets', lambda base: ['none', 'exact'])
    monkeypatch.setattr(command, 'list_presets', lambda base: ['none', 'exact'])
    monkeypatch.setattr(counts, 'count_step', lambda config, *args: fail_in('amp')(args[0]))
    monkeypatch.setattr(command, 'count_step', lambda config, *args: fail_in('amp')(args[0]))
    with pytest.raises(SystemExit) as ended:
        command.main([*CASE, '--batch', batch])
    printed = capsys.readouterr()
    assert ended.value.code == 1 and 'Traceback' not in printed.err and 'exact' in printed.out
    warning = f'sbp-mmdet: warning: {FRCNN}: a training step with none+amp cannot be run: RuntimeError: {HALF} ('
    assert warning in printed.err and 'it is left out' in printed.err


def test_a_variant_above_plain_is_told(monkeypatch, capsys):
    """Where a batch is so small that gaps between tensors decide, a preset may need more than plain training."""
    needs = {'none': 20 * GB, 'exact': 21 * GB, 'exact_min': 19 * GB}
    monkeypatch.setattr(counts, 'list_presets', lambda base: [*needs])
    count = lambda config, variant, *_: _count_of_variant(needs.get(variant, 18 * GB), GB)  # noqa: E731
    monkeypatch.setattr(counts, 'count_step', count)
    with pytest.raises(SystemExit):
        command.main([*CASE, '--batch', '1'])
    told = [line for line in capsys.readouterr().out.splitlines() if 'than plain' in line]
    assert told == ['More than plain training with this batch: exact.']


# Words of the command, what is said, and a word that is not true.
CANNOT = {
    'wrapper': (['mmdet::misc/d2_retinanet_r50-caffe_fpn_ms-90k_coco.py'], 'Wrapper is a wrapper of its', 'tracker'),
    'teacher': (['mmdet::ld/ld_r18-gflv1-r101_fpn_1x_coco.py'], "teacher_config='configs/gfl/gfl_r101", 'data_root'),
    'package': ([FRCNN, '--cfg-options', 'model.backbone.type=absent.Net'], 'absent, which is not', 'custom_imports'),
}


@pytest.mark.parametrize('case', CANNOT)
def test_what_is_said_is_true(case, capsys, recwarn):
    """A wrapper of another library has no tracker, the config of a teacher no ``data_root``, and no import helps where
    a package is missing, as in mmdet's configs with backbones of mmpretrain."""
    words, said, untrue = CANNOT[case]
    with pytest.raises(SystemExit) as ended:
        command.main(['plan', *words, *CASE[2:], '--batch', '1'])
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith('sbp-mmdet: error: ')]
    assert ended.value.code == 2 and len(error) == 1 and said in error[0] and untrue not in error[0]
    assert not [str(warning.message) for warning in recwarn if 'deprecated' in str(warning.message)]  # by mmdet's code


@MODELS.register_module()
class LaneDetector(RetinaNet):
    """Detector that reads an annotation of its own, as mmdet's CLRNet does, or uses an attribute that it lacks."""

    reads = 'sample.lanes'

    def loss(self, batch_inputs, batch_data_samples):
        return eval(self.reads, dict(sample=batch_data_samples[0], self=self))


@pytest.mark.parametrize(
    ('reads', 'name'), [('sample.lanes', 'lanes'), ('sample.gt_instances.keypoints', 'keypoints'), ('self.gone', None)]
)
def test_annotations_that_a_made_up_batch_lacks(reads, name, capsys, monkeypatch):
    monkeypatch.setattr(LaneDetector, 'reads', reads)
    said = line_of(capsys, 'plan', RETINA, *CASE[2:], '--batch', '1', '--cfg-options', 'model.type=LaneDetector')
    assert f"has no attribute '{name or 'gone'}'" in said
    assert (f"; the model reads '{name}' from its data, and the batch here has images, boxes" in said) == bool(name)
    assert said.endswith('sbp-mmdet rehearse runs a step on your own data') == bool(name)


@pytest.mark.parametrize('missing', ['train_dataloader', 'train_cfg'])
def test_a_rehearsal_without_data(missing, tmp_path, capsys):
    (tmp_path / 'bare.py').write_text(f'_base_ = {RETINA!r}\n{missing} = None\n')
    said = line_of(capsys, 'rehearse', str(tmp_path / 'bare.py'))
    assert said.endswith(f"bare.py has no {missing}; rehearse runs a step of the config's own training")


def test_the_file_that_a_missing_config_of_a_teacher_resembles(capsys):
    """mmdet looks for a teacher's config in the folder of its repository, which a wheel does not have."""
    words = ['plan', 'mmdet::ld/ld_r18-gflv1-r101_fpn_1x_coco.py', *CASE[2:], '--batch', '1']
    similar = re.search(r'did you mean (\S+)\?$', line_of(capsys, *words))
    assert Path(similar[1]).is_file() and similar[1].endswith('/configs/gfl/gfl_r101_fpn_ms-2x_coco.py')
    command.main([*words, '--cfg-options', f'model.teacher_config={similar[1]}'])
    assert 'It fits into 8.00 GiB' in capsys.readouterr().out
