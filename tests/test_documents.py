"""Links of the documents lead somewhere, their code runs, and their tables of settings are complete."""

import ast
import dataclasses
import inspect
import re
import subprocess

import pytest
import torch
from helpers import ROOT
from mmdet.registry import HOOKS, MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import nn

import sbp_mmdet
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.plan import command
from sbp_mmdet.plan.snippet import snippet
from sbp_mmdet.plan.variants import load_config
from sbp_mmdet.presets import PRESETS, Settings
from sbp_mmdet.surgery import model_hooks
from sbp_mmdet.verify.checks import verify_modules

PAGES = sorted(
    p for pattern in ('*.md', 'docs/*.md', 'docs/research/*.md', 'configs/*/*.md') for p in ROOT.glob(pattern)
)
FOR_USERS = [page for page in PAGES if page.parent.name != 'research']
LINK = re.compile(r'\]\(([^)\s]+)\)')
FENCE = re.compile(r'^```.*?^```', re.DOTALL | re.MULTILINE)


def _read(name):
    return (ROOT / name).read_text()


def _find_anchors(text):
    """Return the anchors of the headings of a page, as Git hosts make them."""
    heads = re.findall(r'^#+ (.+)$', FENCE.sub('', text), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', head.lower()).replace(' ', '-') for head in heads}


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
            assert anchor in _find_anchors(target.read_text()), link


def test_nothing_is_out_of_sight():
    index, shown = _read('docs/index.md'), ''.join(page.read_text() for page in PAGES)
    for page in ROOT.glob('docs/**/*.md'):
        path = str(page.relative_to(ROOT / 'docs'))
        assert path == 'index.md' or f']({path})' in index, path
    for picture in ROOT.glob('docs/pictures/*'):
        assert f'pictures/{picture.name})' in shown, picture.name


def _find_python_blocks(name):
    return re.findall(r'^```python\n(.*?)^```', _read(name), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize('name', ['README.md', 'docs/usage.md', 'docs/pretrained.md'])
def test_examples(name, tmp_path):
    for number, block in enumerate(_find_python_blocks(name)):
        if '_base_' in block:
            (tmp_path / f'{number}.py').write_text(block)
            model, _ = _build_and_change(Config.fromfile(tmp_path / f'{number}.py'))
            assert any(isinstance(m, LeanModule) for m in model.modules())
            continue
        exec(block, names := {})
        if 'custom_hooks' in names:
            assert len(list(model_hooks(names['custom_hooks']))) == len(names['custom_hooks'])
        elif isinstance(model := names.get('model'), dict) and 'sbp_cfg' in model['backbone']:
            assert sbp_mmdet.SBPConvNeXt('atto', sbp_cfg=model['backbone']['sbp_cfg']).sbp


@pytest.mark.parametrize('page', FOR_USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands(page, monkeypatch):
    """Shell blocks are valid, refer to existing files, and give valid arguments to sbp-mmdet."""
    monkeypatch.setattr(command, 'load_config', lambda *args: 1 / 0)
    for block in re.findall(r'^```bash\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE):
        assert subprocess.run(['bash', '-n'], input=block, text=True, check=False).returncode == 0, block
        for file in re.findall(r'(?<![\w/.-])(?:tools|research|configs)/[\w/.-]+', block):
            assert (ROOT / file).exists(), file
        for line in re.findall(r'^sbp-mmdet (.*?)(?:  #.*)?$', block, re.M):
            words = line.split()
            with pytest.raises(SystemExit if words == ['check'] else ZeroDivisionError):
                command.main(words)


def test_lines_of_the_planner():
    """Recipes next to a call of the planner are the lines that it prints for 'exact'."""
    asked = re.findall(r'^sbp-mmdet plan (mmdet::\S+) --budget', _read('docs/usage.md'), re.M)
    assert asked
    for config in asked:
        assert f'{snippet(load_config(config), "exact")}\n' in _find_python_blocks('docs/usage.md')


def test_line_in_the_log(tmp_path):
    block = next(
        block for block in _find_python_blocks('docs/usage.md') if 'mask-rcnn_swin-t' in block and 'exact' in block
    )
    (tmp_path / 'swin.py').write_text(block)
    _, said = _build_and_change(Config.fromfile(tmp_path / 'swin.py'))
    for name in ('README.md', 'docs/usage.md'):
        assert f'\nLeanHook: {said[0].splitlines()[0]}\n' in _read(name), said[0]


def _build_and_change(cfg):
    """Return the detector of a config after its hooks have changed it, and the messages of the hooks."""
    init_default_scope('mmdet')
    cfg.model.backbone.init_cfg, said = None, []
    model = MODELS.build(cfg.model)
    for hook in model_hooks(cfg.get('custom_hooks')):
        said.append(hook.apply(model))
    return model, said


def test_example_of_a_family():
    names, (family, operation) = {}, _find_python_blocks('docs/extending.md')
    exec(family, names)
    assert len(family.split('@adapter')[1].splitlines()) < 30
    model = nn.Sequential(names['MyBlock'](8), names['MyBlock'](8))
    x, gradients = torch.randn(2, 8, 16, 16), []
    for preset in ('none', 'exact'):
        if preset == 'exact':
            assert {'0', '1'} <= sbp_mmdet.apply_lean(model, preset=preset).changed.keys()
        gradients.append(torch.autograd.grad(model(x).square().sum(), [*model.parameters()]))
    for exact, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))
    exec(operation, names)
    mlp, tokens, mask = names['mlp'], names['tokens'], names['mask'].flatten()[:, None]
    expected = torch.where(mask, mlp(tokens), mlp(tokens).detach())
    for out in (names['out'], expected):
        gradients.append(torch.autograd.grad(out.square().sum(), tokens)[0])
    torch.testing.assert_close(*gradients[-2:], rtol=1e-4, atol=1e-5)


def test_example_of_a_family_is_verified_with_dropped_positions():
    """The example's blocks are verified. Their depthwise convolution has an adapter without a reference form."""
    names = {}
    exec(_find_python_blocks('docs/extending.md')[0], names)
    stages = [nn.Sequential(names['MyBlock'](8), names['MyBlock'](8)) for _ in range(2)]
    model = nn.Sequential(stages[0], nn.Conv2d(8, 8, 2, 2), stages[1])
    report = sbp_mmdet.apply_lean(model, preset='sbp')
    assert sum('0.5' in change for change in report.changed.values()) == 2
    findings = verify_modules(model, report.changed, lambda model: model(torch.randn(2, 8, 16, 16)))
    assert findings.kinds and not findings.skipped and not findings.failed
    assert not [kind for kind in findings.kinds if kind.skipped]


@pytest.mark.parametrize(
    'kind',
    [
        kind
        for name in sbp_mmdet.__all__
        if isinstance(kind := getattr(sbp_mmdet, name), type) and name != 'AtomicBackend'
    ],
    ids=lambda kind: kind.__name__,
)
def test_docstrings_of_registered_classes(kind):
    """A docstring has each argument with its default, and an example that builds."""
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert re.search(rf'^        (\w+, )?{name}\b.* \(.+\): ', kind.__doc__, re.M), name
    example = kind.__doc__.split('Example:')[1].strip(' `\n')
    exec(example, names := {})
    if hooks := names.get('custom_hooks'):
        assert kind in [type(HOOKS.build(hook)) for hook in hooks]
    else:
        init_default_scope('mmdet')
        cfg = {key: value for key, value in names['backbone'].items() if key != '_delete_'}
        with torch.device('meta'):
            assert isinstance(MODELS.build(cfg), kind)


def test_every_key_has_a_row():
    lines = re.findall(r'^\| `(\w+)` \| .+? \| (\S+) \| ', _read('docs/usage.md').split('## Presets')[0], re.M)
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {key: ast.literal_eval(cell.strip('`')) for key, cell in lines} == fields | {'preset': 'exact'}


def test_every_preset_has_a_row():
    presets = re.findall(r'^\| `(\w+)` \|', _read('docs/usage.md').split('## Presets')[1].split('\n## ')[0], re.M)
    assert presets == [*PRESETS]
    shown = re.findall(r'^\| `(\w+)` \|', _read('README.md'), re.M)
    assert shown == ['with_cp', *(name for name in PRESETS if name in shown[1:])]
