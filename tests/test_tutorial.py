"""The notebook docs/tutorial.ipynb runs to its end, with fewer steps."""

import json

import matplotlib
import pytest
from helpers import ROOT

from sbp_mmdet.plan import command
from sbp_mmdet.plan.variants import load_config


@pytest.mark.slow
def test_tutorial(monkeypatch, capsys):
    matplotlib.use('agg')
    monkeypatch.chdir(ROOT / 'docs')
    monkeypatch.setenv('SBP_TUTORIAL_STEPS', '2')
    monkeypatch.setenv('NUCLEI', '../examples/nuclei')
    asked = []  # a plan of this detector takes half a minute, and has tests of its own
    monkeypatch.setattr(command, 'main', asked.append)
    names = {'__name__': 'tutorial'}
    for cell in json.loads((ROOT / 'docs/tutorial.ipynb').read_text())['cells']:
        if cell['cell_type'] == 'code':
            exec(''.join(cell['source']), names)
    said, runs, paper = capsys.readouterr().out, names['runs'], names['paper']
    (verb, config, *_) = asked.pop()
    assert verb == 'plan' and load_config(config).model.type == 'MaskRCNN'
    assert ' modules changed' in said and "preset='exact_min'" in said
    peaks = {name: max(run.curve.points) for name, run in runs.items()}
    assert peaks['exact_min'] < 0.6 * peaks['none'] and peaks['exact_min'] < 0.7 * peaks['with_cp']
    for name in ('with_cp', 'exact_min'):
        assert runs[name].losses == pytest.approx(runs['none'].losses, rel=1e-3)
    plain, thinned = paper.values()
    # The forward pass is complete. Its rounding may move a proposal across a threshold.
    assert thinned.losses[0] == pytest.approx(plain.losses[0], rel=1e-3)
    assert max(thinned.curve.points) < 0.6 * max(plain.curve.points)
