"""Tables as data, and where the tools write: nothing that was measured is lost for want of a folder."""

import argparse
import json
import os

import pytest

from sbp_mmdet.provenance import CHECKOUT
from sbp_mmdet.reporting import Column, add_outputs, compact, markdown_table, text_table, write_outputs


def parsed(*args, plot=True):
    parser = argparse.ArgumentParser()
    add_outputs(parser, plot)
    return parser.parse_args(list(map(str, args)))


def test_files_in_new_folders(tmp_path, capsys):
    files = tmp_path / 'new/out.json', tmp_path / 'other/out.png'
    args = parsed('--json', files[0], '--plot', files[1])
    write_outputs(args, dict(a=1), lambda path: path.write_text('drawn'))
    assert json.loads(files[0].read_text()) == dict(a=1) and files[1].read_text() == 'drawn'
    assert capsys.readouterr().out == f'written to {files[0]}\nwritten to {files[1]}\n'


def test_an_old_file_is_never_half_written(tmp_path):
    """What another name of the old file shows is what a call would read that begins while this one writes."""
    file, old = tmp_path / 'out.json', tmp_path / 'old'
    file.write_text('{"a": 1}')
    os.link(file, old)
    write_outputs(parsed('--json', file, plot=False), dict(a=2))
    assert json.loads(old.read_text()) == dict(a=1) and json.loads(file.read_text()) == dict(a=2)
    assert sorted(os.listdir(tmp_path)) == ['old', 'out.json']


def test_nothing_unasked(tmp_path, capsys):
    write_outputs(parsed(), {}, lambda path: pytest.fail('nothing to draw'))
    write_outputs(parsed(plot=False), {})
    assert not capsys.readouterr().out


@pytest.mark.parametrize('option', ['--json', '--plot'])
def test_a_folder_is_refused_before_anything_is_measured(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parsed(option, tmp_path)
    assert f'{tmp_path} is a folder' in capsys.readouterr().err


def test_tables():
    columns = [Column('name', lambda row: row['name']), Column('AP', lambda row: row.get('ap') and f'{row["ap"]:.3f}')]
    records = [dict(name='none', ap=0.25), dict(name='nothing yet')]
    assert text_table(columns, records).splitlines() == ['name            AP', 'none         0.250', 'nothing yet']
    expected = ['| name | AP |', '|---|---|', '| none | 0.250 |', '| nothing yet |  |']
    assert markdown_table(columns, records).splitlines() == expected


def test_rounding():
    node = dict(a=[1.23456789, None, 2], b=dict(c=1.5e-9, d='x'))
    assert compact(node, 3) == dict(a=[1.23, None, 2], b=dict(c=1.5e-9, d='x'))


def test_no_path_of_this_machine_is_written(tmp_path):
    file = tmp_path / 'out.json'
    results = dict(case=dict(config=f'{CHECKOUT}/configs/a.py'), paths=['/mnt/disks/shelf/epoch_1.pth', 'a/b.json'])
    write_outputs(parsed('--json', file), results)
    assert json.loads(file.read_text()) == dict(
        case=dict(config='configs/a.py'), paths=['$DATA/epoch_1.pth', 'a/b.json']
    )
