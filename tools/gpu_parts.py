"""The parts that `tools/gpu_report.py` measures, in order of importance."""

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = 'configs/sbp_convnext/'
T = CONFIGS + 'mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'
B = CONFIGS + 'cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
SHAPES = CONFIGS + 'mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
PRESETS = 'none with_cp exact int8 sampled sbp'
# Of each family and of what else is changed: config and module. Small, for nothing is timed.
ATTO = ' --cfg-options model.backbone.arch=atto'
SMOKE = {
    'convnext': (T, 'backbone' + ATTO),
    'convnext_v2': ('configs/lean/mask-rcnn_convnext-v2-b_fpn_lean-amp-ms-crop-3x_coco.py', 'backbone' + ATTO),
    'swin': ('configs/sbp_swin/mask-rcnn_sbp-swin-t_fpn_amp-ms-crop-3x_coco.py', 'backbone'),
    'vit': ('configs/sbp_vit/mask-rcnn_vit-t_fpn_amp-ms-crop-3x_coco.py', 'backbone'),
    'resnet': ('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', 'backbone'),
    'cspnext': ('mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py', 'backbone'),
    'rtmdet_neck': ('mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py', 'neck'),
    'dino_encoder': ('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', 'encoder'),
    'dino_decoder': ('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', 'decoder --cfg-options model.num_queries=50'),
}
VERIFIED = ['resnet', 'convnext', 'swin', 'dino_encoder']  # of SMOKE, each kind of module beside its own code
TESTS = ['test_ops*.py', 'test_training.py', 'test_models*.py', 'test_adapters_*.py', 'test_autocast.py']
RIVALS = {'selective': 40, 'save-on-cpu': 40} | {f'compile{budget}': 200 for budget in ('', '-0.5', '-0.25', '-0.1')}


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of the report.

    Attributes:
        name (str): Of its files and its section.
        seconds (float): That it should take; it is cut after twice as many.
        commands (tuple[str, ...]): For python; {out} is the folder of the report, {lines} the file of its rows,
            {presets} those that have no row yet.
        presets (tuple[str, ...]): Its rows, the baseline first. Default: none.
        timed (bool): It runs alone. Default: True.
        quick (bool): Of the report of ten minutes. Default: False.
        counted (tuple[str, str, str]): File of docs/results, key of what it counted, key of what is measured.
            Default: nothing.
    """

    name: str
    seconds: float
    commands: tuple[str, ...]
    presets: tuple[str, ...] = ()
    timed: bool = True
    quick: bool = False
    counted: tuple[str, str, str] | None = None


def parts_of_report(rehearse: bool) -> list[Part]:
    """Return all parts; for a rehearsal on a CPU, in a tiny size."""
    device, fp16, rounds = ('cpu', 'bf16', 1) if rehearse else ('cuda', 'fp16', 20)

    def measured(name, seconds, config, options, presets=PRESETS, rounds=rounds, **more):
        if rehearse and more.get('timed', True):
            config, presets = SHAPES, ' '.join(presets.split()[:3])
        command = f'research/benchmark.py {config} --presets {{presets}} --lines {{lines}} --device {device} --batch 2 '
        options += ' --size 64x64 --boxes 2' if rehearse else ' --boxes 60'
        return Part(name, seconds, (f'{command}--rounds {rounds} {options}',), tuple(presets.split()), **more)

    def backbone(amp, options=''):
        found = dict(quick=True, counted=('convnext_b', 'backbone', 'saved_bytes'))
        return measured(f'backbone_b_{amp}' + '_nhwc' * bool(options), 45, B, f'--amp {amp} {options}', **found)

    def steps(size, cap=None, **more):
        name, config = f'steps_{size}' + (f'_{cap}GiB' if cap else ''), dict(t=T, b=B)[size]
        options = '--step' + (f' --cap {cap}' if cap and not rehearse else '')
        found = dict(rounds=3 if cap and not rehearse else rounds, counted=(f'convnext_{size}', 'peak', 'peak_bytes'))
        return measured(name, 45 if cap else 60, config, options, **found, **more)

    def verified(name, config):
        size = '64x64' if rehearse else '512x512'
        command = f'-m sbp_mmdet.plan verify {SHAPES if rehearse else config} --device {device} --batch 2 --size {size}'
        return Part(f'verify_{name}', 60, (command,), timed=False, quick=True)

    smoke = dict(presets=PRESETS + ' reference', rounds=0, timed=False, quick=True)
    files = sorted(path.name for name in TESTS for path in (ROOT / 'tests').glob(name))
    pytest = '-m pytest -o addopts= -q -rfE --tb=short -p no:cacheprovider ' + '--collect-only ' * rehearse
    return [
        *(verified(name, SMOKE[name][0]) for name in VERIFIED),
        *(
            measured(f'smoke_{name}', 60, config, f'--size 256x256 --amp {fp16} --module {module}', **smoke)
            for name, (config, module) in SMOKE.items()
        ),
        *(Part(file[:-3], 75, (f'{pytest} tests/{file}',), timed=False, quick=True) for file in files),
        backbone(fp16),
        steps('b', quick=True),
        steps('b', 8, quick=True),
        backbone('bf16' if not rehearse else 'off'),
        steps('b', 6, quick=True),
        steps('t', quick=True),
        *(backbone(amp, '--channels-last') for amp in ([fp16] if rehearse else ['fp16', 'bf16'])),
        *(
            measured(f'block_t_{stage}', 30, T, f'--module backbone.stages.{stage}.0', rounds=1 if rehearse else 30)
            for stage in (0, 2)
        ),
        measured('backbone_t', 40, T, '', counted=('convnext_t', 'backbone', 'saved_bytes')),
        *(steps(size, cap) for size, cap in (('b', 5), ('b', 10), ('t', 3), ('t', 4))),
        *(measured(f'rival_{name}', seconds, T, '', f'none {name}') for name, seconds in RIVALS.items()),
        *(_training(preset, rehearse) for preset in ('none', 'exact', 'sbp')),
    ]  # fmt: skip


def _training(preset, rehearse):
    images, size, epochs = (4, 64, 1) if rehearse else (1000, 128, 6)
    data = f'tools/make_synthetic_coco.py --out {{out}}/data --train {images} --val {images} --size {size} --seed 0'
    words = f'tools/train.py {SHAPES} --work-dir {{out}}/training_{preset} --cfg-options'
    words += f' model.backbone.sbp_cfg.preset={preset} train_cfg.max_epochs={epochs} train_cfg.val_interval={epochs}'
    words += ' default_hooks.logger.interval=1 default_hooks.checkpoint.interval=-1'
    words += ' train_dataloader.dataset.data_root={out}/data/ val_dataloader.dataset.data_root={out}/data/'
    words += ' val_evaluator.ann_file={out}/data/annotations/instances_val.json'
    words += ' train_dataloader.batch_size=2' if rehearse else ' train_dataloader.num_workers=8'
    words += f' optim_wrapper.type={"" if rehearse else "Amp"}OptimWrapper'
    return Part(f'training_{preset}', 180, (data, words))
