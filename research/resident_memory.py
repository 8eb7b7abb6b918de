"""Measures by how much a training step raises the resident set of a process, as the operating system reports it.

    python research/resident_memory.py mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py --size 800x1344
    python research/resident_memory.py CONFIG --variants none with_cp+targets exact int8 --json FILE

It needs no GPU, and no figure is calculated. Each variant trains one step on a synthetic batch in a process of its
own (fp32, on the CPU), after a small step that loads kernels and makes the gradients. Linux only.
"""

import argparse
import contextlib
import ctypes
import io
import re
import subprocess
import sys
from pathlib import Path

import torch
from mmdet.testing import demo_mm_inputs
from mmengine.logging import MessageHub
from mmengine.runner import set_random_seed
from provenance import describe_machine, output_file, write_json

from sbp_mmdet.plan.detector import build_detector
from sbp_mmdet.plan.memory import LiveBytes
from sbp_mmdet.plan.planner import parse_size
from sbp_mmdet.plan.variants import NotApplicable, load_config, make_plain, with_variant

DEFAULT = ['none', 'with_cp+targets', 'with_cp+targets+cp-heads+cp-rpn+cp-neck', 'exact', 'int8']
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt: large blocks come by mmap and go back when they are freed


def lift(config: str, variant: str, batch: int, size: tuple[int, int], boxes: int, counted: bool = False) -> float:
    """Return by how much a step raises the resident set of this process, in MB.

    Args:
        config (str): Config file, or ``mmdet::FAMILY/NAME.py``.
        variant (str): Preset and pieces, such as 'exact+cp-heads'.
        batch (int): Number of images.
        size (tuple[int, int]): Height and width of the images, in pixels.
        boxes (int): Number of boxes in each image.
        counted (bool): Whether to count the tensors of the step instead, as the planner does, but with those that this
            CPU makes. Default: False.
    """
    libc = ctypes.CDLL('libc.so.6')
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        libc.mallopt(option, 1 << 16)
    set_random_seed(0)  # all variants have the same weights, and so the same proposals and dropped images
    changed = with_variant(make_plain(load_config(config)), variant)
    if changed.model.backbone.get('drop_path_rate'):
        changed.model.backbone.drop_path_rate = 0.0  # one image would be dropped by other blocks in each variant
    model, _ = build_detector(changed, torch.device('cpu'))
    MessageHub.get_current_instance().update_info('iter', 0)
    _step(model, batch, (256, 256), 2)
    model.zero_grad(set_to_none=False)
    data = _batch(model, batch, size, boxes)
    if counted:
        with LiveBytes() as counter:
            _loss(model, data).backward()
        return counter.peak / 1e6
    libc.malloc_trim(0)
    before = _status('VmRSS')
    Path('/proc/self/clear_refs').write_text('5', encoding='utf-8')  # the peak begins anew
    _loss(model, data).backward()
    return _status('VmHWM') - before


def measure_lift(config: str, variant: str, batch: int, size: tuple[int, int], boxes: int, counted=False) -> float:
    """Run :func:`lift` in a process of its own, with the same arguments and result.

    Raises:
        RuntimeError: If that process fails.
    """
    words = [config, '--size', '{}x{}'.format(*size), '--batch', f'{batch}', '--boxes', f'{boxes}']
    words += ['--one', 'counted' if counted else 'measured', '--variants', variant]
    command = [sys.executable, '-W', 'ignore', __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'{variant} failed:\n{done.stderr[-2000:]}')
    return float(re.search(r'LIFT ([\d.]+)', done.stdout)[1])


def _batch(model, batch, size, boxes):
    masks = any('mask' in name for name, _ in model.named_modules())
    shapes = [[3, *size]] * batch
    data = demo_mm_inputs(batch, shapes, num_items=[boxes] * batch, num_classes=10, with_mask=masks)
    return model.data_preprocessor(data, True)


def _loss(model, data):
    torch.manual_seed(0)
    return model.parse_losses(model(**data, mode='loss'))[0]


def _step(model, batch, size, boxes):
    _loss(model, _batch(model, batch, size, boxes)).backward()


def _status(key):
    lines = Path('/proc/self/status').read_text(encoding='utf-8').splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--variants', nargs='+', default=DEFAULT, help='presets and pieces (default: %(default)s)')
    parser.add_argument('--size', type=parse_size, default=(800, 1344), help='size of the images (default: 800x1344)')
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: 1)')
    parser.add_argument('--boxes', type=int, default=15, help='boxes in each image (default: 15)')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    parser.add_argument('--one', choices=['measured', 'counted'], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with contextlib.redirect_stdout(io.StringIO()):
            found = lift(args.config, args.variants[0], args.batch, args.size, args.boxes, args.one == 'counted')
        print(f'LIFT {found:.1f}')
        return
    rows, config = [], make_plain(load_config(args.config))
    for variant in args.variants:
        try:
            with_variant(config, variant)
        except NotApplicable as error:
            print(f'{variant:45} not measured: {error}', flush=True)
            continue
        try:
            megabytes = measure_lift(args.config, variant, args.batch, args.size, args.boxes)
        except RuntimeError as error:
            sys.exit(str(error))
        rows.append(dict(variant=variant, megabytes=megabytes))
        share = rows[-1]['megabytes'] / rows[0]['megabytes']
        print(f'{variant:45} {rows[-1]["megabytes"]:8,.0f} MB  {share:.3f}', flush=True)
    if args.json:
        case = dict(config=args.config, batch=args.batch, height=args.size[0], width=args.size[1], boxes=args.boxes)
        write_json(args.json, dict(machine=describe_machine(), case=case, rows=rows))


if __name__ == '__main__':
    main()
