"""Tools say in one line what is wrong with their arguments, and what to do, before anything is measured."""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import CONFIGS, TOOLS

sys.path[:0] = [str(TOOLS / 'analysis_tools')]
import attention_study  # noqa: E402
import benchmark_block  # noqa: E402
import draw_object_masks  # noqa: E402
import read_vit_onnx  # noqa: E402
import run_under_cap  # noqa: E402

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
    ],
)
def test_block_benchmark(words, message, monkeypatch, capsys):
    assert message in refused(monkeypatch, capsys, benchmark_block, '--arch', 'tiny', '--device', 'cpu', *words.split())


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
