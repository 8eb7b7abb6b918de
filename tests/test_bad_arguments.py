"""Tools say in one line what is wrong with their arguments, and what to do, before anything is measured."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CONFIGS, ROOT, TOOLS

sys.path[:0] = [str(TOOLS), str(TOOLS / 'analysis_tools')]
import attention_study  # noqa: E402
import benchmark_block  # noqa: E402
import compare_models  # noqa: E402
import draw_object_masks  # noqa: E402
import gradient_norms  # noqa: E402
import gradient_study  # noqa: E402
import plan_memory  # noqa: E402
import preflight  # noqa: E402
import read_vit_onnx  # noqa: E402
import results_table  # noqa: E402
import run_under_cap  # noqa: E402
import show_predictions  # noqa: E402
import sweep  # noqa: E402
import training_study  # noqa: E402
import update_tables  # noqa: E402

T = CONFIGS / 'sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'
VIT = CONFIGS / 'nuclei/mask-rcnn_sbp-vit-t_fpn_nuclei.py'


def refused(monkeypatch, capsys, tool, *words):
    """What the tool says as it ends."""
    monkeypatch.setattr(sys, 'argv', [tool.__name__, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.split('error: ')[1]


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('--arch foo', "arch='foo' is unknown; choose"),
        ('--family Swin --arch foo', "arch='foo' is unknown; choose"),
        ('--family ViT --arch foo --unit backbone', "arch='foo' is unknown; choose"),
        ('--keep-ratio 2', 'keep_ratio=2.0 must be'),
        ('--sampler diagonal', "invalid choice: 'diagonal'"),
        ('--stage 1 7', '--stage 7: ConvNeXt has the stages 1 to 4'),
        ('--stage 0', '--stage 0: ConvNeXt has'),
        ('--family ViT --stage 2', '--stage 2: ViT has the stages 1 to 1'),
        ('--unit mlp --presets exact-block', "--presets ['exact-block']: none means anything for --unit mlp"),
        ('--family Swin --presets none block', "--presets ['block']: Swin has none of them; choose from ['none', "),
        ('--size 16 64', '--size [16, 64]: nothing is left of it in stage 4'),
        ('--batch 0', 'batch=0 must be 1 or more'),
        ('--rounds -1', 'rounds=-1 must be 0 or more'),
        ('--device tpu', "device 'tpu' is unknown"),
        ('--rounds 0 --plot x.png', '--rounds 0 measures none'),
        ('--unit backbone --stage 2', '--stage [2] means nothing for --unit backbone'),
        (f'--json {Path(__file__).name}/x.json', 'test_bad_arguments.py is no folder to write in'),
    ],
)
def test_block_benchmark(words, message, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent)
    assert message in refused(monkeypatch, capsys, benchmark_block, '--arch', 'tiny', '--device', 'cpu', *words.split())


@pytest.mark.parametrize('tool', [show_predictions, compare_models, gradient_study, gradient_norms])
def test_devices_that_are_not_there(tool, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    said = refused(monkeypatch, capsys, tool, T, 'a.pth', 'b.pth', '--device', 'cuda')
    assert "device 'cuda': torch sees no GPU; give 'cpu'" in said


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ("_base_ = 'nowhere.py'", 'nowhere.py'),
        ('model = dict(', 'SyntaxError'),
        ('model = 1 / 0', 'ZeroDivisionError'),
    ],
)
def test_a_config_that_cannot_be_read(content, message, tmp_path, monkeypatch, capsys):
    file = tmp_path / 'broken.py'
    file.write_text(content)
    said = refused(monkeypatch, capsys, plan_memory, file, '--budget', '8GiB')
    assert said.startswith(f'config file {file}: ') and message in said
    with pytest.raises(preflight.PreflightError, match=message):
        preflight.load_config(str(file))


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('--budget 8', '8'),
        ('--missing', '--missing needs --json'),
        ('--json broken.json', 'Expecting'),
    ],
)
def test_sweep(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'broken.json').write_text('{"case": ')
    monkeypatch.setattr(sweep, 'ask', None)  # nothing is measured
    assert message in refused(monkeypatch, capsys, sweep, T, *words.split())


@pytest.mark.parametrize(
    ('content', 'message'), [(None, 'results/x.json'), ('{', 'JSONDecodeError'), ('{}', "KeyError: 'machine'")]
)
def test_tables_without_results(content, message, tmp_path, monkeypatch, capsys):
    """No page is changed where one cannot be."""
    pages = [tmp_path / name for name in ('good.md', 'bad.md')]
    (tmp_path / 'results').mkdir()
    shutil.copy(ROOT / 'docs/results/nuclei_sgd.json', tmp_path / 'results/good.json')
    for page, file in zip(pages, ('good', 'x'), strict=True):
        page.write_text(f'<!-- table: results/{file}.json -->\nold\n<!-- end -->\n')
    if content:
        (tmp_path / 'results/x.json').write_text(content)
    said = refused(monkeypatch, capsys, update_tables, *pages)
    assert 'bad.md: no table can be made of results/x.json' in said and message in said
    assert 'old' in pages[0].read_text()
    assert 'nowhere.md' in refused(monkeypatch, capsys, update_tables, 'nowhere.md')


def test_results_where_one_page_has_no_place_for_them(tmp_path, monkeypatch, capsys):
    pages = [tmp_path / name for name in ('good.md', 'bad.md')]
    pages[0].write_text('<!-- results: coco -->\nold\n<!-- end -->\n')
    pages[1].write_text('nothing')
    words = ROOT / 'experiments/coco.py', '--work-dir', tmp_path / 'none', '--write', *pages
    assert 'bad.md has no marker' in refused(monkeypatch, capsys, results_table, *words)
    assert 'old' in pages[0].read_text()


def test_training_study(tmp_path, monkeypatch, capsys):
    words = ROOT / 'experiments/nuclei.py', '--work-dir', tmp_path, '--commit', 'abc'
    assert '--commit is for --no-run' in refused(monkeypatch, capsys, training_study, *words)


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['nowhere.py'], 'config file nowhere.py does not exist'),
        ([T, '--keep-ratio', 2], 'keep_ratio=2.0 must be'),
        ([T, '--object-share', 2], 'object_share=2.0 must be'),
        ([T, '--images', 0], '--images 0 must be 1 or more'),
    ],
)
def test_draw_object_masks(words, message, monkeypatch, capsys):
    assert message in refused(monkeypatch, capsys, draw_object_masks, *words, '--out', 'x.png')


@pytest.mark.parametrize('stage', [-1, 0, 4, 5])
def test_draw_object_masks_of_no_stage(stage, monkeypatch, capsys):
    exact = SimpleNamespace(output_gradients=(torch.ones(1), torch.ones(1), torch.ones(1), None))
    for name, found in dict(build_model=None, train_batches=[{}], exact_pass=exact).items():
        monkeypatch.setattr(draw_object_masks, name, lambda *args, found=found, **kwargs: found)
    said = refused(monkeypatch, capsys, draw_object_masks, T, '--out', 'x.png', '--stage', stage)
    assert said == f'--stage {stage}: nothing uses such an output; choose from [1, 2, 3]\n'


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['nowhere.py'], 'config file nowhere.py does not exist'),
        ([T], 'has an SBPConvNeXt; give the config of a detector with an SBPViT'),
        ([VIT, '--keep-ratio', 2], 'keep_ratio=2.0 must be'),
        ([VIT, '--batches', 0], '--batches 0 must be 1 or more'),
        ([VIT], 'checkpoint nowhere.pth does not exist'),
    ],
)
def test_attention_study(words, message, monkeypatch, capsys):
    assert message in refused(monkeypatch, capsys, attention_study, *words, '--backbone', 'nowhere.pth')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('--cap 200GiB', 'the cap of 200.00 GiB is above the 80.00 GiB of cuda:0'),
        ('--cap 8GiB --boxes -1', 'boxes=-1 must be 0 or more'),
        ('--cap 8GiB --device cpu', '--device cpu: a cap needs a GPU'),
        ('--cap 8GiB --device cuda:3', "device 'cuda:3': torch sees 1 GPUs"),
        ('--cap 8GiB --variants none+skip', '--variants: none applies: skip: '),
    ],
)
def test_run_under_cap(words, message, monkeypatch, capsys):
    card = SimpleNamespace(total_memory=80 * 2**30)
    gpu = dict(is_available=True, device_count=1, current_device=0, set_device=None, get_device_properties=card)
    for name, found in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, found=found: found)
    assert message in refused(monkeypatch, capsys, run_under_cap, T, *words.split())


def onnx_of(*names, embedding=()):
    """A stand-in for the package, whose files have such operations, each with a weight."""
    node = [SimpleNamespace(name=f'/backbone/{name}/MatMul', input=[f'onnx::{i}']) for i, name in enumerate(names)]
    node += [SimpleNamespace(name='/backbone/embeddings/Add', input=list(embedding))]
    sizes = {f'onnx::{i}': (2, 2) for i in range(len(names))} | dict(embedding)
    initializer = [SimpleNamespace(name=name, array=torch.ones(size).numpy()) for name, size in sizes.items()]
    graph = SimpleNamespace(node=node, initializer=initializer)
    to_array = SimpleNamespace(to_array=lambda tensor: tensor.array)
    return SimpleNamespace(load=lambda path: SimpleNamespace(graph=graph), numpy_helper=to_array)


def test_read_vit_onnx(monkeypatch, capsys, tmp_path):
    layer = 'encoder/layer.0/attention/attention/query'
    embedding = {'onnx::a': (1, 4, 2), 'onnx::b': (1, 1, 2)}
    for package, message in (
        (None, 'x.onnx is read by the package onnx: '),
        (SimpleNamespace(load=lambda path: open(path)), 'x.onnx is no ONNX file that can be read: '),
        (onnx_of(embedding=embedding), 'it has no known layers'),
        (onnx_of(layer), 'it has no known positions'),
    ):
        monkeypatch.setitem(sys.modules, 'onnx', package)
        assert message in refused(monkeypatch, capsys, read_vit_onnx, 'x.onnx', '--out', tmp_path / 'x.pth')
    monkeypatch.setitem(sys.modules, 'onnx', onnx_of(layer, embedding=embedding))
    assert read_vit_onnx.read('x.onnx')['embeddings.position_embeddings'].shape == (1, 5, 2)
