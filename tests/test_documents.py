"""Documents: links lead somewhere, no path of a machine, and tables written by hand agree with the results."""

import ast
import dataclasses
import json
import re
import runpy

import pytest
import torch
from helpers import ROOT

from sbp_mmdet import SBPConvNeXt
from sbp_mmdet.settings import PRESETS, SBPSettings

PAGES = sorted(path for pattern in ('*.md', 'docs/*.md', 'configs/*/*.md') for path in ROOT.glob(pattern))
LINK = re.compile(r'\]\(([^)\s]+)\)')
FENCE = re.compile(r'^```.*?^```', re.DOTALL | re.MULTILINE)


def _anchors(text):
    """The names of the headings of a page, as Git hosts make them."""
    heads = re.findall(r'^#+ (.+)$', FENCE.sub('', text), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', head.lower()).replace(' ', '-') for head in heads}


def _results(name):
    return json.loads((ROOT / f'docs/results/{name}.json').read_text())['rows']


@pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(page):
    text = page.read_text()
    assert not re.search(r'(?<![\w.~/-])/(work|root|home|tmp)/', text), 'a path of a machine'
    for link in LINK.findall(FENCE.sub('', text)):
        if link.startswith('https://'):
            continue
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text()), link


def test_every_page_is_in_the_index():
    text = (ROOT / 'docs/index.md').read_text()
    for page in ROOT.glob('docs/*.md'):
        assert page.name == 'index.md' or f']({page.name})' in text, page.name


def test_presets_in_the_readme_agree_with_the_results():
    lines = re.findall(r'^\| `([\w-]+)` \| (.+) \| .+ \| (.*) \| (.*) \|$', (ROOT / 'README.md').read_text(), re.M)
    shown = {name: (memory, time) for name, _, memory, time in lines}
    rows = [row for row in _results('backbone_bytes') if row['arch'] == 'base']
    plain = next(row['saved_bytes'] for row in rows if row['preset'] == 'none')
    for row in rows:
        times = [f'{block["total_ratio"]:.2f}' for block in _results('block_cpu') if block['preset'] == row['preset']]
        assert shown[row['preset']] == (f'{row["saved_bytes"] / plain:.3f}', ', '.join(times))


def test_presets_in_the_readme_are_those_of_the_package():
    lines = re.findall(r'^\| `([\w-]+)` \| `(.+?)`(.*?) \|', (ROOT / 'README.md').read_text(), re.M)
    shown = {name: (eval(code), 'with_cp=True' in more) for name, code, more in lines if name in PRESETS}
    assert shown == {name: (preset.sbp_cfg, preset.with_cp) for name, preset in PRESETS.items()}


def test_examples_in_the_readme_run():
    names = dict(torch=torch)
    algorithm, config, small, example = re.findall(
        r'^```python\n(.*?)^```', (ROOT / 'README.md').read_text(), re.S | re.M
    )
    exec(algorithm, names)
    written = names['sbp']
    exec(config, names)
    assert names['model']['backbone']['type'] == 'SBPConvNeXt'
    exec(small, names)
    kept = names['model']['backbone']['sbp_cfg']
    assert SBPConvNeXt('tiny', sbp_cfg=kept).sbp.sampler == 'objects'
    exec(example, names)
    mlp, tokens, places = names['mlp'], names['tokens'], names['positions'](names['mask'])
    gradients = []
    for out in (names['out'], written(mlp, tokens, places)):
        assert torch.allclose(out, mlp(tokens), atol=1e-6)
        gradients.append(torch.autograd.grad(out.square().sum(), tokens)[0])
    exact = torch.where(names['mask'].flatten()[:, None], mlp(tokens), mlp(tokens).detach())
    (expected,) = torch.autograd.grad(exact.square().sum(), tokens)
    for gradient in gradients:
        assert torch.allclose(gradient, expected, atol=1e-5)


def test_every_key_of_sbp_cfg_has_a_row():
    lines = re.findall(r'^\| `(\w+)` \| .+? \| (.+?) \| ', (ROOT / 'docs/sbp_cfg.md').read_text(), re.M)
    defaults = SBPConvNeXt('tiny', sbp_cfg={}).sbp
    assert [key for key, _ in lines] == [field.name for field in dataclasses.fields(SBPSettings)]
    for key, cell in lines:
        if key not in ('keep_ratio', 'blocks'):  # these depend on the backbone
            assert ast.literal_eval(cell.strip('`')) == getattr(defaults, key), key


def test_picture_of_what_is_stored_agrees_with_the_results():
    tool = runpy.run_path(str(ROOT / 'tools/analysis_tools/draw_stored.py'))
    rows = [row for row in _results('block_cpu') if row['stage'] == 1]
    assert {row['preset'] for row in rows} == set(tool['STORED'])
    for row in rows:
        n, channels, height, width = row['shape']
        unit = 4 * n * channels * height * width
        assert tool['units'](row['preset']) == pytest.approx(row['saved_bytes'] / unit, abs=0.021), row['preset']
