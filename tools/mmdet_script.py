"""Runs a script of the installed mmdet, or of mmpretrain for its configs, after the checks of :mod:`preflight`.

The script parses its own command line, so every option has the same meaning as in mmdet. The decisions of the checks
are written into the parsed arguments, which the script's ``main`` uses.
"""

import atexit
import contextlib
import errno
import importlib.util
import io
import os
import re
import signal
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from types import ModuleType

__all__ = [
    'check_start',
    'checkpoint_options',
    'find_script',
    'find_work_dir',
    'let_threads_sleep',
    'run',
    'say',
    'toolbox_of',
]

_OF_CONFIGS = AttributeError, FileNotFoundError, KeyError, TypeError  # a value of the config may have caused them
_OF_FULL_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DICT = re.compile(r'(^|[\[(,])\s*[\'"]?(dict\(|\{)')  # at the beginning of a value, or of a member of it
# mmengine's parser, which looks for a comma outside of brackets, does not return for these.
_TEXT_BEFORE_BRACKET = re.compile(r'[^\[\](),\s][\[(][^\[\]()]*,')


def run(name: str, splits: tuple[str, ...]) -> None:
    """Check the config that the command line names and run the toolbox's script on the same command line.

    Args:
        name (str): 'train.py' or 'test.py'.
        splits (tuple[str, ...]): Datasets that it reads: 'train', 'val', 'test'.

    Raises:
        SystemExit: With one line that names the bad input and the remedy, or says that the user interrupted it.
    """
    try:
        _check_and_run(name, splits)
    except KeyboardInterrupt:  # imports and checks take seconds
        say('interrupted')
        sys.exit(128 + signal.SIGINT)


def _check_and_run(name, splits):
    let_threads_sleep()
    try:
        find_script(name)  # the checks need mmdet, whichever toolbox's script runs
        with _quiet_imports():
            script = _load(find_script(name, toolbox_of(sys.argv[1:])))
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')
    try:
        args = script.parse_args()
    except (AssertionError, ValueError, RecursionError):  # of mmengine's action for --cfg-options
        _refuse_bad_options(sys.argv[1:], parsed=False)
        raise
    _refuse_bad_options(sys.argv[1:], parsed=True)

    with _quiet_imports():
        from hook_checks import given
        from preflight import PreflightError, check_arguments, check_config, load_config  # needs mmdet

    try:
        config = load_config(args.config, args.cfg_options)
        check_arguments(config, args)
        check_config(config, splits)
        if name == 'train.py':
            check_start(config, args)
        else:
            _checkpoints().check_checkpoint(args.checkpoint, 'checkpoint', config, all_weights=True)
    except PreflightError as error:
        sys.exit(f'error: {error}')
    except ImportError as error:  # of a name in a pure Python config, which is imported when it is used
        sys.exit(f'error: config file {args.config}: {error}')
    options = checkpoint_options(config) if name == 'train.py' else {}
    cpu_ranks = args.launcher != 'none' and _join_cpu_ranks(config, args.launcher)
    if cpu_ranks:
        options.update(_cpu_rank_options(config))
    args.cfg_options = {**(args.cfg_options or {}), **options} or None
    script.parse_args = lambda: args
    try:
        script.main()
    except KeyboardInterrupt:
        say('interrupted; --resume goes on from the last checkpoint' if name == 'train.py' else 'interrupted')
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_FULL_DISKS:
            where = error.filename or find_work_dir(config, args)
            sys.exit(f'error: {where} cannot be written: {error.strerror}; make room there, and go on with --resume')
        if text := _describe_mistake(config, error):
            sys.exit(f'error: {config.filename}: {text}')
        for warning in given:  # they may say why, and were printed long ago
            atexit.register(say, warning)  # after the traceback
        raise
    if cpu_ranks:
        # Everything is written. An ordinary exit from here is aborted by gloo's threads in one process of ten.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextlib.contextmanager
def _quiet_imports():
    """Drop what onedl-mmdetection prints when it is imported, between the lines that tell about the training.

    Its metrics warn that faster_coco_eval, which is optional, is missing.
    """
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'faster_coco_eval is not installed')
        yield


def _refuse_bad_options(words, parsed):
    """End with a line that names the first wrong override, see :func:`_find_bad_option`."""
    if wrong := _find_bad_option(words, parsed):
        sys.exit(f'error: --cfg-options: {wrong}')


def _find_bad_option(words, parsed):
    """Return which override among the words of a command line is wrong, and why, or ``None``.

    If mmengine has ``parsed`` them, only those with a dict are, which it takes for text.
    """
    overrides = False
    for word in words:
        if word.startswith('--'):
            name, _, word = word.partition('=')
            overrides = len(name) > 3 and '--cfg-options'.startswith(name)
        if not overrides or not word:
            continue
        value = word.partition('=')[2].strip('\'"')
        if _DICT.search(value):
            return (
                f'{word!r} contains a dict; override one of its keys, such as optim_wrapper.type=X, or write the dict '
                'in a config'
            )
        if parsed:
            continue
        if word.find('=') < 1:
            return f'{word!r} must be KEY=VALUE, for example model.backbone.depth=101'
        if any(word.count(opening) != word.count(closing) for opening, closing in ('()', '[]')):
            return f'{word!r} has a bracket without its counterpart'
        if _TEXT_BEFORE_BRACKET.search(value):
            return f'{word!r} has text in front of a bracket'
    return None


def _describe_mistake(config, error):
    """Return which value of the config an error is about, or ``None`` if it is not known to be about one."""
    try:
        from sbp_mmdet.plan.config_keys import describe_mistake
        from sbp_mmdet.resume import NoBatch
    except ImportError:
        return None
    if isinstance(error, NoBatch):
        return f'{error}'
    return describe_mistake(config, error) if isinstance(error, _OF_CONFIGS) else None


def toolbox_of(words: list[str]) -> str:
    """Return the toolbox whose script a command line is meant for.

    Args:
        words (list[str]): The command line.

    Returns:
        str: 'mmpretrain' if the first config file among the words inherits from its configs; otherwise 'mmdet', whose
        script also reports a missing config.
    """
    file = next((word for word in words if word.endswith('.py') and Path(word).is_file()), None)
    try:
        from mmengine.config import Config

        scope = file and Config.fromfile(file, import_custom_modules=False).get('default_scope')
    except ModuleNotFoundError as error:  # of the package that the config inherits from
        scope = str(error).partition(' ')[0]
    except (Exception, SystemExit):  # a broken config is reported by the checks
        scope = None
    return 'mmpretrain' if scope == 'mmpretrain' else 'mmdet'


def find_script(name: str, toolbox: str = 'mmdet') -> Path:
    """Find a toolbox's own script, without importing the toolbox.

    Args:
        name (str): Name of the script.
        toolbox (str): Import name of the toolbox. Default: 'mmdet'.

    Returns:
        Path: In an installed package ``mmdet/.mim/tools``, in a source checkout ``tools`` beside the package.

    Raises:
        FileNotFoundError: If the toolbox is not installed, or without its scripts.
    """
    spec = importlib.util.find_spec(toolbox)
    if spec is None or not spec.origin:
        remedy = 'tools/setup_env.sh makes an environment and prints its python'
        remedy = remedy if toolbox == 'mmdet' else f'pip install {toolbox} torchvision'
        raise FileNotFoundError(f'{toolbox} is not installed for {sys.executable}; {remedy}')
    package = Path(spec.origin).parent
    places = [package / '.mim/tools' / name, package.parent / 'tools' / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{toolbox}'s {name} was not found at {' or '.join(map(str, places))}; reinstall it")


def let_threads_sleep() -> None:
    """Shorten the time for which idle OpenMP threads spin, unless the environment sets it.

    To be called before torch is imported. By default GNU's OpenMP lets threads spin for milliseconds. On a busy machine
    they spin on the core that another thread waits for: a step of the quick start took six times as long.
    """
    if not {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'} & set(os.environ):
        os.environ['GOMP_SPINCOUNT'] = '1000'


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f'toolbox_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _checkpoints():
    import checkpoints  # needs torch

    return checkpoints


def check_start(config, args: Namespace) -> None:
    """Check the files that a training starts from, and write into ``args.resume`` which one that is.

    mmdet's rules decide: ``--resume`` goes before the config's ``resume`` and ``load_from``. If the newest checkpoint
    is damaged, the newest whole one is taken. If there is nothing to resume from yet, ``load_from`` counts, which
    mmdet's script alone would forget.

    Args:
        config (Config): The config, with the overrides of the command line.
        args (Namespace): Arguments of train.py.

    Raises:
        PreflightError: If the checkpoint cannot be used.
    """
    checkpoints = _checkpoints()
    load_from = config.get('load_from') if args.resume is None else args.resume
    resume = args.resume is not None or config.get('resume', False)
    if resume and load_from in (None, 'auto'):
        load_from, reason = checkpoints.last_whole_checkpoint(find_work_dir(config, args))
        if reason and load_from is None:
            raise checkpoints.PreflightError(
                f'--resume: {reason}, and there is no whole checkpoint beside it; without --resume the training '
                'starts anew'
            )
        if reason:
            say(f'--resume: {reason}; going on from {load_from}')
            args.resume = str(load_from)
        if load_from is None and args.resume == 'auto' and config.get('load_from'):
            resume, load_from, args.resume = False, config.load_from, None
            say(f'--resume: there is nothing to go on from yet, so the training starts from load_from={load_from}')
    checkpoints.check_initial_weights(config)
    if load_from:
        checkpoints.check_checkpoint(str(load_from), '--resume' if resume else 'load_from', config, whole_run=resume)


def find_work_dir(config, args: Namespace) -> Path:
    """Return the folder that mmdet's script writes to.

    Args:
        config (Config): The config, with the overrides of the command line.
        args (Namespace): Arguments of the script.
    """
    given = getattr(args, 'work_dir', None)
    given = config.get('work_dir') if given is None else given
    return Path('work_dirs', Path(config.filename or '').stem) if given is None else Path(given)


def checkpoint_options(config) -> dict:
    """Return config options for checkpoints that appear whole or not at all, and for a last evaluation after a resume.

    Args:
        config (Config): The config. If it does not import the package, or says itself how checkpoints are written,
            nothing is added.

    Returns:
        dict: Options as of ``--cfg-options``.
    """
    if 'sbp_mmdet.resume' not in sys.modules:
        return {}
    hooks, options = config.get('default_hooks', {}), {}
    if hooks is None:  # the runner takes None for the default hooks, but no key can be merged into it
        hooks, options = {}, {'default_hooks._delete_': True}
    if 'evaluation' not in hooks:
        options['default_hooks.evaluation.type'] = 'EvaluateEndedHook'
    hook = hooks.get('checkpoint', {})
    if not isinstance(hook, dict):
        return options
    if not {'backend_args', 'file_client_args'} & set(hook) and '://' not in f'{hook.get("out_dir")}':
        options['default_hooks.checkpoint.backend_args.backend'] = 'atomic'
        if 'type' not in hook:
            options['default_hooks.checkpoint.type'] = 'CheckpointHook'
    if hook.get('max_keep_ckpts') == 1:
        say(
            'default_hooks.checkpoint.max_keep_ckpts=1: mmengine removes the old checkpoint before it writes the new '
            'one, and a run that is killed between them has none; 2 is safe'
        )
    return options


def _join_cpu_ranks(config, launcher: str) -> bool:
    """Start distributed CPU processes over gloo where there is no accelerator, for trying things out.

    mmengine's own start sets a CUDA device in every process; with the process group already there, it leaves it alone.

    Args:
        config (Config): The config.
        launcher (str): 'pytorch', 'slurm' or 'mpi'.

    Returns:
        bool: Whether these are CPU ranks. With an accelerator nothing is done.
    """
    import torch
    from mmengine.device import get_device
    from mmengine.dist import init_dist

    if get_device() != 'cpu':
        return False
    set_device = torch.cuda.set_device
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch.cuda, 'set_device', set_device)
        torch.cuda.set_device = lambda device: None
        init_dist(launcher, **{**(config.get('env_cfg') or {}).get('dist_cfg', {}), 'backend': 'gloo'})
    words = ' '.join(f'{key}={value}' for key, value in _cpu_rank_options(config).items())
    say(f'no GPU here: CPU ranks, as if with --cfg-options {words}')
    return True


def _cpu_rank_options(config) -> dict:
    """Return config options for gloo, and for DistributedDataParallel without a device."""
    options = {'env_cfg.dist_cfg.backend': 'gloo', 'model_wrapper_cfg.device_ids': None}
    if 'model_wrapper_cfg' not in config:  # then mmengine would have made this one
        options['model_wrapper_cfg.type'] = 'MMDistributedDataParallel'
        options['model_wrapper_cfg.broadcast_buffers'] = False
        options['model_wrapper_cfg.find_unused_parameters'] = config.get('find_unused_parameters', False)
    return options


def say(message: str) -> None:
    """Print in the first process only."""
    ranks = ('RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK')  # torchrun, Slurm, MPI
    if next((os.environ[name] for name in ranks if name in os.environ), '0') == '0':
        print(message, file=sys.stderr)
