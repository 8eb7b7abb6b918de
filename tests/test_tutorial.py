"""The notebook docs/tutorial.ipynb runs to its end, with fewer steps."""

import json

import matplotlib
import pytest
from helpers import ROOT


@pytest.mark.slow
def test_tutorial(monkeypatch, capsys):
    matplotlib.use('agg')
    monkeypatch.chdir(ROOT / 'docs')
    monkeypatch.setenv('SBP_TUTORIAL_STEPS', '2')
    monkeypatch.setenv('NUCLEI', '../examples/nuclei')
    names = {'__name__': 'tutorial'}
    for cell in json.loads((ROOT / 'docs/tutorial.ipynb').read_text())['cells']:
        if cell['cell_type'] == 'code':
            exec(''.join(cell['source']), names)
    said, runs = capsys.readouterr().out, names['runs']
    assert 'It fits into 1.17 GiB with exact' in said and ' modules changed' in said and "preset='exact'" in said
    peaks = {name: max(run.curve.points) for name, run in runs.items()}
    assert peaks['exact'] < 0.8 * peaks['none'] and peaks['with_cp'] < 0.8 * peaks['none']
    for name in ('with_cp', 'exact'):
        assert runs[name].losses == pytest.approx(runs['none'].losses, rel=1e-3)
