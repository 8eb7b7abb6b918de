"""Where the tools write: nothing that was measured is lost for want of a folder."""

import argparse
import json

import pytest

from sbp_mmdet.analysis.output import add_outputs, write_outputs


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


def test_nothing_unasked(tmp_path, capsys):
    write_outputs(parsed(), {}, lambda path: pytest.fail('nothing to draw'))
    write_outputs(parsed(plot=False), {})
    assert not capsys.readouterr().out


@pytest.mark.parametrize('option', ['--json', '--plot'])
def test_a_folder_is_refused_before_anything_is_measured(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parsed(option, tmp_path)
    assert f'{tmp_path} is a folder' in capsys.readouterr().err
