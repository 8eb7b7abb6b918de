"""Annotation files are checked before a training, the large ones without parsing them."""

import json

import pytest
from helpers import make_dataset

import annotation_files  # isort: skip  (helpers puts tools/ on the path)
from annotation_files import PreflightError, check_image_folder  # isort: skip


def test_large_files_are_not_parsed(tmp_path, monkeypatch):
    make_dataset(tmp_path / 'shapes', train=2, val=1, size=64)
    path = tmp_path / 'shapes/annotations/instances_train.json'
    content = path.read_bytes()
    monkeypatch.setattr(annotation_files, '_PARSE_BYTES', 100)
    monkeypatch.setattr(annotation_files.json, 'loads', lambda text: pytest.fail('parsed'))
    annotation_files.check_annotations(path, 'key', ('star',))
    with pytest.raises(PreflightError, match='no category of'):
        annotation_files.check_annotations(path, 'key', ('cat',))
    unlabelled = content.replace(b'"categories"', b'"labels"')
    for bad, message in ((content[:-20], 'complete'), (unlabelled, 'lacks categories')):
        path = tmp_path / 'bad.json'
        path.write_bytes(bad)
        with pytest.raises(PreflightError, match=message):
            annotation_files.check_annotations(path, 'key')


BOX = dict(id=7, image_id=1, category_id=1, bbox=[0, 0, 9, 9], area=81, segmentation=[[0, 0, 9, 0, 9, 9]])
FILTER = dict(filter_empty_gt=True, min_size=32)


@pytest.mark.parametrize(
    ('annotations', 'message'),
    [
        ([BOX], None),
        ([BOX, dict(id=8, ignore=True)], None),
        ([dict(BOX, iscrowd=1)], None),
        ([], 'removes all 1 images of .*, because none has .*; it has no annotations'),
        ([dict(BOX, image_id='1')], "the first of its 1 annotations has image_id='1', category_id=1; these must be"),
        ([dict(BOX, category_id=99)], 'category_id=99; these must be ids of its images and categories'),
        ([{key: BOX[key] for key in BOX if key != 'area'}], 'annotation with id=7 in .* lacks area; mmdet reads'),
        ([{key: BOX[key] for key in BOX if key != 'segmentation'}], 'has a segmentation, but .*with_mask=False'),
    ],
)
def test_annotations_that_leave_nothing_to_train_with(annotations, message, tmp_path):
    path = _write(tmp_path, annotations)
    if message is None:
        return annotation_files.check_training_images(path, 'key', ('star',), FILTER, masks=True)
    with pytest.raises(PreflightError, match=message) as found:
        annotation_files.check_training_images(path, 'key', ('star',), FILTER, masks=True)
    assert '\n' not in str(found.value)


def test_images_that_the_filter_removes(tmp_path):
    path = _write(tmp_path, [BOX])
    with pytest.raises(PreflightError, match='filter_cfg.min_size=65 removes all images of .*smaller min_size'):
        annotation_files.check_training_images(path, 'key', ('star',), dict(min_size=65))
    empty = _write(tmp_path, [])
    annotation_files.check_training_images(empty, 'key', ('star',))
    with pytest.raises(PreflightError, match='lists no images'):
        annotation_files.check_training_images(_write(tmp_path, [], images=[]), 'key', ('star',))


def test_one_class_without_a_comma(tmp_path):
    with pytest.raises(PreflightError, match=r"classes='star', a string, .*: classes=\('star',\)"):
        annotation_files.check_annotations(_write(tmp_path, [BOX]), 'key', 'star')


def _write(folder, annotations, images=(dict(id=1, file_name='a.png', width=64, height=64),)):
    path = folder / 'set.json'
    content = dict(images=list(images), annotations=annotations, categories=[dict(id=1, name='star')])
    path.write_text(json.dumps(content))
    return path


def test_a_folder_without_the_images(tmp_path):
    """A folder that has one of them is right: filters may remove the others."""
    file, folder = tmp_path / 'a.json', tmp_path / 'images'
    images = [dict(id=i, file_name=f'{i}.png', width=8, height=8) for i in range(3)]
    file.write_text(json.dumps(dict(images=images, annotations=[], categories=[])))
    with pytest.raises(PreflightError, match=r'^the key: none of the 3 images of .*a.json is in .*images, .*/0.png'):
        check_image_folder(file, 'the key', folder)
    folder.mkdir()
    (folder / '2.png').touch()
    check_image_folder(file, 'the key', folder)
