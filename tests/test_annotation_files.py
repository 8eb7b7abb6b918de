"""Annotation files are checked before a training, the large ones without parsing them."""

import pytest
from helpers import make_set

import annotation_files  # isort: skip  (helpers puts tools/ on the path)
from annotation_files import PreflightError  # isort: skip


def test_large_files_are_not_parsed(tmp_path, monkeypatch):
    make_set(tmp_path / 'shapes', train=2, val=1, size=64)
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
