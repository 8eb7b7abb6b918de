"""Checks of the checkpoint that a run starts from, before mmdet loads it.

mmengine itself loads all weights that fit, even from a damaged file. It lists the others in a warning and continues
with random weights for them.
"""

import importlib.util
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from mmengine.config import Config
from preflight import PreflightError, build_on_meta

__all__ = ['check_checkpoint', 'check_initial_weights', 'describe_damage', 'last_whole_checkpoint']

_MISMATCH = re.compile(r'size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)')
_RESUMABLE = re.compile(r'(epoch|iter)_(\d+)\.pth')
_SECONDS = 10  # that a server may take to answer
_FOREIGN = 'is not a checkpoint of torch'


def describe_damage(path: Path) -> str | None:
    """Return how a checkpoint file is damaged, or ``None``; torch writes checksums but does not check them.

    Returns:
        str | None: The damage. ``None`` if the file is intact, or has no checksums: files in torch's format before 1.6,
        and folders that FSDP and DeepSpeed write.
    """
    if path.is_dir():
        return None
    if not path.is_file():
        return 'does not exist'
    with path.open('rb') as file:
        start = file.read(2)
    if start == b'\x80\x02':
        return None
    if start != b'PK':
        return 'is empty' if not start else _FOREIGN
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError):
        return 'is truncated'
    return bad and f'is corrupt (check sum of {bad})'


def last_whole_checkpoint(work_dir: Path) -> tuple[Path | None, str | None]:
    """Find the checkpoint from which ``--resume`` without a path continues.

    Returns:
        tuple[Path | None, str | None]: The checkpoint, and why it is not the one that mmengine would use (``None`` if
        it is). If there is neither an intact checkpoint nor a reason, a new run begins.
    """
    pointer = work_dir / 'last_checkpoint'
    if not pointer.is_file():
        return None, None
    last = Path(pointer.read_text().strip() or work_dir)
    reason = 'is empty' if last == work_dir else describe_damage(last)
    if reason is None:
        return last, None
    reason = f'{pointer} {reason}' if last == work_dir else f'{last}, which {pointer} names, {reason}'
    folder = last if last == work_dir else last.parent
    others = [path for path in folder.glob('*.pth') if path != last and _RESUMABLE.fullmatch(path.name)]
    others.sort(key=lambda path: int(_RESUMABLE.fullmatch(path.name)[2]), reverse=True)
    return next((path for path in others if describe_damage(path) is None), None), reason


def check_initial_weights(config: Config) -> None:
    """Check the files that parts of the model are initialised from, which mmengine reads after everything is built.

    Raises:
        PreflightError: If a ``checkpoint`` of an ``init_cfg`` is a path of this machine without a whole checkpoint, an
            address that cannot be reached and was not downloaded before, or of torchvision, which is not installed.
    """
    for key, path in _initial_weights('model', config.get('model') or {}):
        if problem := _explain_unreachable(path):
            raise PreflightError(
                f'{key}: {path} {problem}; put a downloaded file in its place, or train from random weights with '
                f'--cfg-options {key.removesuffix(".checkpoint")}=None'
            )
        reason = None if '://' in path else describe_damage(Path(path).expanduser())
        if reason and reason != _FOREIGN:  # mmengine may have a loader of the user's for it
            raise PreflightError(f'{key}: {path} {reason}; name a whole checkpoint (working folder: {Path.cwd()})')


def _explain_unreachable(path):
    """Return why weights cannot be downloaded, or ``None``."""
    scheme = path.partition('://')[0]
    if scheme in ('torchvision', 'modelzoo') and importlib.util.find_spec('torchvision') is None:
        return 'needs torchvision, which is not installed'
    if scheme not in ('http', 'https'):
        return None
    name = Path(urllib.parse.urlparse(path).path).name
    if Path(torch.hub.get_dir(), 'checkpoints', name).is_file():
        return None
    try:
        urllib.request.urlopen(urllib.request.Request(path, method='HEAD'), timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return None  # the server is there, and may only refuse this request
    except (OSError, ValueError) as error:
        reason = getattr(error, 'reason', error)
        # A slow server may still answer the download.
        return None if isinstance(reason, TimeoutError) else f'cannot be downloaded here ({reason})'
    return None


def _initial_weights(key, node):
    """Yield key and path of each checkpoint in an ``init_cfg`` inside of a config."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, str) and name == 'checkpoint' and 'init_cfg' in key.split('.')[-2:]:  # one, or a list
            yield f'{key}.{name}', value
        elif isinstance(value, (dict, list, tuple)):
            yield from _initial_weights(f'{key}.{name}', value)


def check_checkpoint(path: str, key: str, config: Config, whole_run: bool = False, all_weights: bool = False) -> None:
    """Check that a checkpoint can be read and belongs to the detector of the config.

    Args:
        path (str): Path or URL of the checkpoint. A URL is not checked.
        key (str): Key or option that names it, for messages.
        config (Config): Config of the detector.
        whole_run (bool): Whether a training run is resumed from it, which needs more than weights. Default: False.
        all_weights (bool): Whether each weight of the detector has to be in it. Default: False.

    Raises:
        PreflightError: For the first thing that is wrong.
    """
    if '://' in path:
        return
    if Path(path).expanduser().is_dir():
        if 'strategy' in config:  # those of FSDP and DeepSpeed write folders
            return
        raise PreflightError(f'{key}: {path} is a folder; name a checkpoint in it, such as epoch_12.pth')
    reason = describe_damage(Path(path).expanduser())
    if reason:
        raise PreflightError(f'{key}: {path} {reason}; name a whole checkpoint (working folder: {Path.cwd()})')
    content = _read(path)
    if content is None:
        return
    lacks = [part for part in ('optimizer', 'message_hub', 'meta') if part not in content]
    if whole_run and lacks:
        raise PreflightError(
            f'{key}: {path} cannot be resumed from: it lacks {", ".join(lacks)}, as published weights and best_*.pth '
            'do; to start a new training from its weights, use --cfg-options load_from=PATH and not --resume'
        )
    _check_weights(content.get('state_dict', content), path, key, config, whole_run, all_weights)


def _check_weights(weights, path, key, config, whole_run, all_weights):
    """Compare weights with the detector as mmengine loads them, including the hooks of the model that rename and
    resize."""
    detector = build_on_meta(config)
    if detector is None:
        return
    own = [name for name in detector.state_dict() if not name.endswith('num_batches_tracked')]
    differ, missing = _differences(detector, weights, by_name=whole_run)
    # mmengine does without the counters of batch norms, which old checkpoints lack.
    missing = [name for name in own if name in missing]
    if missing == own:
        raise PreflightError(
            f'{key}: no weight of {path} has a name of this detector: it has {_some(weights)}, '
            f'the detector {_some(own)}'
        )
    strict = whole_run or all_weights
    wrong = [name for name in differ if strict or name.startswith('backbone.')]
    if wrong:
        there, here = differ[wrong[0]]
        raise PreflightError(
            f'{key}: {path} is of another model: {len(wrong)} weights have other shapes, such as {wrong[0]}, '
            f'{there} there and {here} in {config.filename}; check arch and num_classes'
        )
    if strict and missing:
        raise PreflightError(
            f'{key}: {path} lacks {len(missing)} weights of the detector, such as {_some(missing)}; is it a backbone '
            'only? To start a training from it, use --cfg-options load_from=PATH'
        )


def _read(path):
    """Read a checkpoint with its tensors left on disk; return ``None`` if only mmengine can read it."""
    resume = sys.modules.get('sbp_mmdet.resume')  # imported by the config; without it there is nothing of ours in it
    if resume is None:
        return None
    try:
        content = resume.read_checkpoint(Path(path).expanduser())
    except Exception:  # an old format, or classes of other people: mmengine may know better
        return None
    return content if isinstance(content, dict) else None


def _differences(detector, weights, by_name):
    """Return the shapes in file and detector by name where they differ, and the names that the file lacks.

    By name: without the hooks of the model. Optimizer states have none, so a run is resumed with the same weights only.
    """
    found = OrderedDict(
        (name.removeprefix('module.'), torch.empty_like(value, device='meta'))
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
    )
    if by_name:
        own = {name: value.shape for name, value in detector.state_dict().items()}
        differ = {name: (found[name].shape, own[name]) for name in own if name in found}
        differ = {name: tuple(map(tuple, pair)) for name, pair in differ.items() if pair[0] != pair[1]}
        return differ, set(own) - set(found)
    found._metadata = getattr(weights, '_metadata', None)  # versions, which tell hooks what to rename
    from sbp_mmdet.models.weights import quiet  # the config has imported it, or nothing was read

    try:
        with quiet():
            return {}, set(detector.load_state_dict(found, strict=False).missing_keys)
    except RuntimeError as error:
        shapes = (
            (name, tuple(tuple(map(int, re.findall(r'\d+', shape))) for shape in pair))
            for name, *pair in _MISMATCH.findall(str(error))
        )
        return dict(shapes), set()


def _some(names):
    names = list(names)
    return ', '.join(names[:2]) + (f' and {len(names) - 2} more' if len(names) > 2 else '')
