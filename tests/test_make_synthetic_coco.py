"""The synthetic data set is reproducible, and its annotations describe its pictures."""

import re
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

TOOLS = Path(__file__).parents[1] / 'tools'
sys.path.insert(0, str(TOOLS))
import make_synthetic_coco as synthetic  # noqa: E402

SMALL = dict(train=6, val=3, size=96, seed=3)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp('set') / 'shapes'
    synthetic.make_dataset(out, **SMALL)
    return out


def test_same_seed_same_bytes(made, tmp_path):
    synthetic.make_dataset(tmp_path / 'again', **SMALL)
    assert contents(tmp_path / 'again') == contents(made)


def test_seed_and_split_change_the_images(made, tmp_path):
    synthetic.make_dataset(tmp_path / 'other', **dict(SMALL, seed=4))
    first, second = contents(made), contents(tmp_path / 'other')
    images = [first[name] for name in first if name.endswith('.jpg')]
    assert len(set(images)) == SMALL['train'] + SMALL['val']
    assert not set(images) & {second[name] for name in second}


def test_larger_set_begins_with_the_smaller_one(made, tmp_path):
    synthetic.make_dataset(tmp_path / 'larger', **dict(SMALL, train=8))
    larger = contents(tmp_path / 'larger')
    for name, data in contents(made).items():
        assert not name.endswith('.jpg') or larger[name] == data


@pytest.mark.parametrize('split', ['train', 'val'])
def test_annotations_describe_the_visible_pixels(split, made):
    out = made
    coco = COCO(str(out / 'annotations' / f'instances_{split}.json'))
    assert [category['name'] for category in coco.loadCats(coco.getCatIds())] == list(synthetic.CLASSES)
    for image in coco.loadImgs(coco.getImgIds()):
        assert cv2.imread(str(out / 'images' / split / image['file_name'])).shape == (96, 96, 3)
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=image['id']))
        masks = [coco.annToMask(annotation).astype(bool) for annotation in annotations]
        # No pixel shows two objects.
        assert np.sum(masks, axis=0).max() == 1
        for annotation, mask in zip(annotations, masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            assert annotation['area'] == mask.sum() > 0
            left, top, width, height = annotation['bbox']
            assert (left, left + width - 1, top, top + height - 1) == (columns[0], columns[-1], rows[0], rows[-1])


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--train', '0'], '--train 0 must be 1 or more'),
        (['--val', '-1'], '--val -1 must be 0 or more'),
        (['--size', '1'], '--size 1 must be 32 or more'),
        ([], '--out .*file/in cannot be written: .*; give another folder'),
    ],
)
def test_arguments_that_make_no_data_set(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').touch()
    monkeypatch.setattr(sys, 'argv', ['make_synthetic_coco.py', '--out', str(tmp_path / 'file/in'), *words])
    with pytest.raises(SystemExit) as stopped:
        synthetic.main()
    assert re.search(said, f'{stopped.value}\n{capsys.readouterr().err}')
