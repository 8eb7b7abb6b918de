"""What is wrong with a config or its data ends in one line that names the key, the value and the remedy."""

import importlib
import re

import pytest
import torch
from mmcv.transforms import BaseTransform
from mmdet.registry import MODELS, TRANSFORMS
from mmengine.config import Config
from test_plan_sizes import LOAD, RESIZE, coco, config_of  # noqa: I001
from torch import nn

from sbp_mmdet.plan import command
from sbp_mmdet.plan.channels import find_channel_mismatch, loaded_channels
from sbp_mmdet.plan.config_keys import describe_mistake
from sbp_mmdet.plan.errors import bad_input, describe_data_error, describe_error
from sbp_mmdet.plan.memory import LiveBytes
from sbp_mmdet.plan.planner import Row

FRCNN = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
SOFT = 'mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py'
RETINA = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
VIS = 'mmdet::mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2021.py'
BYTE_TRACK = 'mmdet::bytetrack/bytetrack_yolox_x_8xb4-80e_crowdhuman-mot17halftrain_test-mot17halfval.py'
REID = 'mmdet::reid/reid_r50_8xb32-6e_mot17train80_test-mot17val20.py'
EMPTY = Config(dict())
ALONE = 'visualizer = dict(vis_backends=[])\nval_cfg = val_dataloader = val_evaluator = None'
PLAN = ('--budget', '8GiB')
SMALL = (*PLAN, '--batch', '1', '--size', '64x64', '--boxes', '2')
REMEDY = '; give the size of the images, for example --size 800x1333'


def catch(function, *args, **kwargs):
    """Call a function and return the error that it raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args, **kwargs)
    return caught.value


def line_of(capsys, *words):
    """Return the line of a command that ends with an error, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        command.main([*words])
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith('counts ')]
    assert stopped.value.code == 2 and len(said) == 1 and said[0].startswith('sbp-mmdet: error: '), said
    return said[0]


@pytest.fixture
def project(tmp_path):
    """Return a function that writes a config with data, a line added."""
    folder = coco(tmp_path, [(48, 64)] * 3)

    def write(steps=(RESIZE,), line='', load=LOAD):
        dataset = config_of(folder, [*steps], load).train_dataloader.dataset.to_dict()
        text = f'_base_ = {RETINA!r}\ntrain_dataloader = dict(dataset=dict(_delete_=True, **{dataset!r}))\n{line}\n'
        (tmp_path / 'wrong.py').write_text(text)
        return str(tmp_path / 'wrong.py')

    return write


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (('plan', FRCNN, '--budget', 'lots'), "budget 'lots' cannot be read"),
        (('plan', FRCNN, '--budget', '8GiB', '--size', 'large'), "size 'large' cannot be read"),
        (('plan', FRCNN, '--budget', '8GiB', '--batch', 'two'), "'two' is not a number of images; give one, or 'max'"),
        (('plan', FRCNN, '--budget', '8GiB', '--boxes', '0'), '--boxes 0 must be 1 or more'),
        (('plan', FRCNN), 'this machine has no GPU; give the memory of yours, for example --budget 8GiB'),
        (('plan', SOFT, '--budget', '8GiB'), 'SoftTeacher trains on branches of images for a student and a teacher'),
        (('plan', BYTE_TRACK, '--budget', '8GiB'), 'ByteTrack trains its model.detector together with a tracker'),
        (('plan', 'nowhere.py', '--budget', '8GiB'), 'nowhere.py does not exist'),
        (('report', 'nowhere.py'), 'nowhere.py does not exist'),
        (('report', RETINA, '--preset', 'sbp'), "preset='sbp' drops positions, and no module of"),
        (('report', RETINA, '--preset', 'fast'), "preset='fast' is unknown"),
    ],
)
def test_bad_input(words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit) as stopped:
        command.main([*words])
    assert stopped.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['plan', FRCNN, '--budget', '-4GiB'], '-4GiB'),
        (['plan', FRCNN, '--size', '-320x320', *PLAN], "size '-320x320' cannot be read; give height and width"),
        (['plan', FRCNN, *PLAN, '--boxes', '-5'], '--boxes -5 must be 1 or more'),
        (['plan', FRCNN, *PLAN, '--boxes', '2.5'], "--boxes: '2.5' is not a whole number; see sbp-mmdet plan --help"),
        (['plan', FRCNN, *PLAN, '--gpus', 'two'], "--gpus: 'two' is not a whole number"),
        (['plan', FRCNN, *PLAN, '--batch', 'maxx'], "'maxx' is not a number of images; give one, or 'max'"),
        (['verify', FRCNN, '--batch', 'max'], "--batch: 'max' is not a whole number; see sbp-mmdet verify --help"),
        (['plan', FRCNN, '--budgt', '8GiB'], 'unrecognized arguments: --budgt 8GiB; did you mean --budget?'),
        (['plan'], 'the following arguments are required: config; see sbp-mmdet plan --help'),
        (['plann', FRCNN], "invalid choice: 'plann'"),
        (['plan', FRCNN, *PLAN, '--cfg-options', 'model'], "'model' must be KEY=VALUE"),
        (['report', FRCNN, '--preset', 'papers'], "preset='papers' is unknown; did you mean 'sbp'?"),
        (['verify', FRCNN, '--preset', 'exakt'], "preset='exakt' is unknown; did you mean 'exact'?"),
        (['verify', FRCNN, '--preset', 'with_cp'], 'there is nothing to verify'),
    ],
    ids=str,
)
def test_errors_are_one_line_without_the_usage(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith('sbp-mmdet: error: ') and said in line


def test_an_assertion_without_a_message_is_named_by_its_code(capsys):
    options = ['--size', '64x64', '--cfg-options', 'model.backbone.out_indices=1,2,3']
    with pytest.raises(SystemExit):
        command.main(['plan', FRCNN, '--budget', '8GiB', *options])
    assert 'AssertionError: assert len(inputs) == len(self.in_channels) (fpn.py' in capsys.readouterr().err


# --- files ---------------------------------------------------------------------------------------------------------


def test_missing_weights_are_not_blamed_on_the_data(project, capsys):
    line = "model = dict(backbone=dict(init_cfg=dict(checkpoint='gone.pth')))"
    said = line_of(capsys, 'rehearse', project(line=f'{line}\n{ALONE}'))
    assert said.endswith("wrong.py: model.backbone.init_cfg.checkpoint='gone.pth' does not exist; correct it")


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('option', 'said'),
    [
        ('model.backbone.dept=50', "model.backbone: ResNet has no argument 'dept'; did you mean 'depth'?"),
        ('model.backbone.type=ResNett', "model.backbone.type='ResNett' is not registered; did you mean 'ResNet'?"),
        (
            'model.bbox_head.loss_cls.type=Zyxwvut',
            "model.bbox_head.loss_cls.type='Zyxwvut' is not registered; import its module by custom_imports",
        ),
        (
            'model.neck.qqq=3',
            "model.neck: FPN has no argument 'qqq'; remove it; if it is inherited, set _delete_=True in model.neck",
        ),
    ],
)
@pytest.mark.parametrize('words', [('report',), ('plan', *SMALL)])
def test_a_misspelt_name_in_the_model(words, option, said, capsys):
    verb, *more = words
    assert line_of(capsys, verb, RETINA, *more, '--cfg-options', option) == f'sbp-mmdet: error: {RETINA}: {said}'


def test_an_argument_that_a_subclass_hands_on():
    config = Config(dict(model=dict(backbone=dict(type='ResNetV1d', depth=50, num_stagess=4))))
    error = catch(MODELS.build, config.model.backbone.to_dict())
    assert describe_mistake(config, error) == (
        "model.backbone: ResNetV1d has no argument 'num_stagess'; did you mean 'num_stages'?"
    )


def test_a_misspelt_module_of_a_hook(tmp_path, capsys):
    hook = "[dict(type='CheckpointModulesHook', modules=['nek'])]"
    (tmp_path / 'child.py').write_text(
        f'_base_ = {RETINA!r}\ncustom_imports = dict(imports=["sbp_mmdet"])\ncustom_hooks = {hook}\n'
    )
    said = line_of(capsys, 'plan', str(tmp_path / 'child.py'), *SMALL)
    assert re.search(
        r"child.py: .*'nek' .*the model has \['data_preprocessor', 'backbone', 'neck', 'bbox_head'\]", said
    )
    assert 'ValueError' not in said and 'line' not in said


def test_a_misspelt_transform_is_not_cured_by_a_size(project, capsys):
    said = line_of(capsys, 'plan', project([dict(type='Resise', scale=(64, 64))]), *PLAN)
    assert 'train_dataloader.dataset.pipeline.2.type=' in said
    assert said.endswith("'Resise' is not registered; did you mean 'Resize'?)")


# --- data ----------------------------------------------------------------------------------------------------------


@TRANSFORMS.register_module(force=True)
class Refuses(BaseTransform):
    """A transform of the user's own that always fails, without a message."""

    def transform(self, results):
        raise AssertionError


def test_the_transform_that_fails_is_named(project, capsys):
    steps = [RESIZE, dict(type='RandomChoice', transforms=[[dict(type='Refuses')]])]
    said = line_of(capsys, 'plan', project(steps), *PLAN)
    place = r'Refuses: AssertionError: raise AssertionError, test_command_errors.py, line \d+'
    assert re.search(rf'wrong.py: its train pipeline cannot be run here \({place}\)$', said)


def test_where_the_data_are_not_there_a_size_will_do(project, tmp_path, capsys):
    path = project([dict(type='Refuses')])
    (tmp_path / 'a.json').unlink()
    assert line_of(capsys, 'plan', path, *PLAN).endswith(REMEDY)
    for file in coco(tmp_path, [(48, 64)] * 3).glob('*.png'):
        file.unlink()  # the annotations are there, and the pictures are not
    assert line_of(capsys, 'plan', path, *PLAN).endswith(REMEDY)


def test_where_a_package_is_missing_a_size_will_do(project, capsys, monkeypatch):
    monkeypatch.setattr('mmdet.datasets.transforms.transforms.albumentations', None)
    said = line_of(capsys, 'plan', project([dict(type='Albu', transforms=[])]), *PLAN)
    assert 'RuntimeError: albumentations is not installed' in said and said.endswith(REMEDY)


@pytest.mark.parametrize(
    ('text', 'said'),
    [('[]', "AssertionError: annotation file format <class 'list'>"), ('{"images": [', 'JSONDecodeErr')],
)
@pytest.mark.parametrize('words', [('plan', *PLAN), ('rehearse',)])
def test_the_annotation_file_that_cannot_be_read_is_named(words, text, said, project, tmp_path, capsys):
    path = project(line=f'model = dict(backbone=dict(init_cfg=None))\n{ALONE}')
    (tmp_path / 'a.json').write_text(text)
    line = line_of(capsys, words[0], path, *words[1:])
    assert said in line and line.endswith(
        f'; this happened while {tmp_path}/a.json was read: look at that file, or name another in ann_file'
    )


def test_classes_that_the_file_does_not_have(project, tmp_path, capsys):
    path = project(
        line="train_dataloader['dataset'].update(metainfo=dict(classes=('cup', 'plate')), filter_cfg=dict("
        'filter_empty_gt=True))'
    )
    said = line_of(capsys, 'plan', path, *PLAN)
    assert (
        f"no category of {tmp_path}/a.json is one of the classes of metainfo; the file has ['thing'], metainfo has"
        in said
    )
    assert "metainfo has ['cup', 'plate']; set metainfo=" in said and '--size' not in said


@pytest.mark.parametrize(('path', 'what'), [(VIS, 'clips of videos'), (REID, 'crops of persons'), (SOFT, 'branches')])
@pytest.mark.parametrize('verb', ['plan', 'verify'])
def test_models_of_other_batches_are_not_counted(verb, path, what, capsys):
    said = line_of(capsys, verb, path, *(PLAN if verb == 'plan' else ()))
    assert f'trains on {what}' in said
    assert ('counted' if verb == 'plan' else 'LeanHook verifies its modules itself') in said


# --- quotations ----------------------------------------------------------------------------------------------------


@MODELS.register_module(force=True)
class InModel(nn.Module):
    """A module whose operation fails."""

    def forward(self, x):
        return x[[2, 1, 0]]


def test_the_place_is_that_of_the_model_and_not_of_a_dispatch_mode():
    def run(mode):
        with mode:
            InModel()(torch.zeros(1, 4, 4))

    assert re.search(r'IndexError: .*\(test_command_errors.py, line \d+\)', describe_error(catch(run, LiveBytes())))


def test_messages_are_cut_at_the_end_of_a_sentence_or_a_word():
    url = 'https://example.org/' + 'a' * 300
    two = 'One sentence that is long enough to stand alone for the reader. More at ' + url
    assert describe_error(catch(_raise, KeyError(two))).startswith(f'KeyError: {two[: two.index(". ") + 1]} (')
    words = describe_error(catch(_raise, RuntimeError('word ' * 100)))
    assert re.fullmatch(r'RuntimeError: (word ){30,40}\.\.\. \(.*\)', words)
    assert 'https' not in describe_error(catch(_raise, RuntimeError(f'see {url}')))
    assert "KeyError: 'video_length'" in describe_error(catch(_raise, KeyError('video_length')))


def _raise(error):
    raise error


def test_an_error_without_a_message_is_its_line_of_code():
    def fail():
        raise AssertionError

    said = describe_data_error('it cannot be run', catch(fail), EMPTY)
    assert re.fullmatch(
        r'it cannot be run here \(AssertionError: raise AssertionError, test_command_errors.py, line \d+\)', said
    )


def test_a_value_error_of_the_models_own_keeps_its_place():
    assert re.fullmatch(
        r'a.py: it fails: ValueError: no (.*line \d+\))',
        str(bad_input('a.py', 'it fails', catch(_raise, ValueError('no')), EMPTY)),
    )


@pytest.mark.parametrize(
    ('act', 'remedy'),
    [
        (
            lambda: nn.BatchNorm2d(3)(torch.ones(1, 3, 1, 1)),
            '; a batch norm after global pooling needs 2 images or more',
        ),
        (lambda: importlib.import_module('no_such_package.part'), '; install no_such_package'),
        (lambda: nn.BatchNorm2d(3)(torch.ones(1, 2, 1, 1)), ')'),
    ],
)
def test_errors_of_torch_that_have_a_remedy(act, remedy):
    said = str(bad_input('a.py', 'it fails', catch(act), EMPTY))
    assert said.startswith('a.py: it fails: ') and remedy in said[said.rindex(', line ') :]


# --- channels ------------------------------------------------------------------------------------------------------

GREY = [dict(type='LoadImageFromFile', color_type='grayscale'), LOAD[1]]


@pytest.mark.parametrize(
    ('preprocessor', 'backbone', 'channels', 'said'),
    [
        (dict(mean=[1, 2, 3], std=[1, 1, 1], bgr_to_rgb=True), {}, 3, None),
        (dict(mean=[1, 2, 3], std=[1, 1, 1], bgr_to_rgb=True), {}, 1, 'bgr_to_rgb=True needs images of 3 channels'),
        (dict(mean=[1, 2, 3], std=[1, 1, 1]), {}, 1, 'mean has 3 values, but the images have 1 channel'),
        (dict(mean=[1], std=[1]), {}, 1, 'model.backbone: in_channels=3, but the images have 1 channel'),
        (dict(mean=[1], std=[1]), dict(in_channels=1), 1, None),
        (
            dict(mean=[1], std=[1]),
            dict(in_channels=1),
            3,
            'in_channels=1, but the images have 3 channels; set model.ba',
        ),
        (dict(bgr_to_rgb=True), {}, 4, None),  # it takes the first three
        (dict(bgr_to_rgb=True), dict(in_channels=4), 4, 'the images have 3 channels behind bgr_to_rgb=True'),
        (dict(), {}, 4, 'in_channels=3, but the images have 4 channels'),
        (dict(type='PreprocessorOfMyOwn'), {}, 1, None),
        (dict(), dict(type='InModel', in_channels=64), 3, None),  # of the user's own, so nothing is known
    ],
)
def test_channels(preprocessor, backbone, channels, said):
    model = dict(
        data_preprocessor=dict(dict(type='DetDataPreprocessor'), **preprocessor),
        backbone=dict(dict(type='ResNet', depth=18), **backbone),
    )
    for config in (
        Config(dict(model=model)),
        Config(dict(model=dict(model, detector=dict(backbone=model['backbone'])))),
    ):
        found = find_channel_mismatch(config, channels)
        assert found is None if said is None else said in found


def test_grey_images_of_a_config():
    assert loaded_channels(config_of('x', [RESIZE], GREY)) == 1
    assert loaded_channels(config_of('x', [RESIZE, dict(scale=1)], GREY)) is None  # not to be built
    assert loaded_channels(config_of('x', [RESIZE])) is None
    assert loaded_channels(config_of('x', [dict(type='Refuses')], GREY)) is None  # it may give them colours


@pytest.mark.parametrize('words', [('plan', *PLAN), ('plan', *SMALL), ('verify',), ('rehearse',)])
def test_grey_images_for_a_model_of_colours(words, project, capsys):
    verb, *more = words
    path = project(load=GREY, line=f'model = dict(backbone=dict(init_cfg=None))\n{ALONE}')
    said = line_of(capsys, verb, path, *more)
    assert 'wrong.py: model.data_preprocessor: bgr_to_rgb=True needs images of 3 channels' in said
    assert "leave out color_type='grayscale'" in said


# --- boxes ---------------------------------------------------------------------------------------------------------


def test_boxes_are_those_of_the_annotations_whatever_the_size(project, monkeypatch, capsys, tmp_path):
    """The most crowded two of the images have 2 and 3 boxes."""
    shapes = []

    def count(config, budget, batch_shape, **options):
        shapes.append(batch_shape)
        return [Row('none', 'exact', 1, True)]

    monkeypatch.setattr(command, 'count_variants', count)
    path, said = project(), []
    for more in ((), ('--size', '64x96'), ('--size', '64x96', '--boxes', '7')):
        command.main(['plan', path, *PLAN, *more])
        said.append(capsys.readouterr().out)
    (tmp_path / 'a.json').unlink()
    command.main(['plan', path, *PLAN, '--size', '64x96'])
    said.append(capsys.readouterr().out)
    assert [shape['boxes'] for shape in shapes] == [3, 3, 7, 60] and (shapes[1]['height'], shapes[1]['width']) == (
        64,
        96,
    )
    sources = [re.findall(r'boxes: of [\w ]+', page) for page in said]
    assert sources == [['boxes: of the annotations']] * 2 + [[], ['boxes: of a crowded batch of COCO']]
