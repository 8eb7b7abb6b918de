"""Runs a script of the installed mmdet, or of mmpretrain for its configs, after the checks of :mod:`preflight`."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

__all__ = ['find_script', 'let_threads_sleep', 'run', 'toolbox_of']


def toolbox_of(words: list[str]) -> str:
    """Whose script a config wants.

    Returns:
        str: 'mmpretrain' if the first config file among them is a child of its configs, otherwise 'mmdet', which says
        what is wrong where there is no config.
    """
    file = next((word for word in words if word.endswith('.py') and Path(word).is_file()), None)
    try:
        from mmengine.config import Config

        scope = file and Config.fromfile(file, import_custom_modules=False).get('default_scope')
    except ModuleNotFoundError as error:  # of the package that the config inherits from
        scope = str(error).partition(' ')[0]
    except Exception:  # whatever is wrong with it, the checks say so
        scope = None
    return 'mmpretrain' if scope == 'mmpretrain' else 'mmdet'


def find_script(name: str, toolbox: str = 'mmdet') -> Path:
    """Finds a toolbox's own script, without importing the toolbox.

    Returns:
        Path: In an installed package ``mmdet/.mim/tools``, in a source checkout ``tools`` beside the package.

    Raises:
        FileNotFoundError: If the toolbox is not installed, or without its scripts.
    """
    spec = importlib.util.find_spec(toolbox)
    if spec is None or not spec.origin:
        remedy = 'tools/setup_env.sh makes an environment and says where'
        remedy = remedy if toolbox == 'mmdet' else f'pip install {toolbox} torchvision'
        raise FileNotFoundError(f'{toolbox} is not installed for {sys.executable}; {remedy}')
    package = Path(spec.origin).parent
    places = [package / '.mim/tools' / name, package.parent / 'tools' / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{toolbox}'s {name} was not found at {' or '.join(map(str, places))}; reinstall it")


def let_threads_sleep() -> None:
    """Threads of a CPU that wait for each other go to sleep soon, unless the environment says how they wait.

    By its default GNU's OpenMP lets them spin for milliseconds. On a machine that has something else to do they spin on
    the very core that the other thread waits for: a step of the quick start took six times as long. To be called before
    torch is imported.
    """
    if not {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'} & set(os.environ):
        os.environ['GOMP_SPINCOUNT'] = '1000'


def run(name: str, splits: tuple[str, ...]) -> None:
    """Checks the config that the command line names and runs the toolbox's script on the same command line."""
    let_threads_sleep()
    try:
        script = find_script(name)  # mmdet has to be there for the checks, whose script it is
        if (toolbox := toolbox_of(sys.argv[1:])) != 'mmdet':
            script = find_script(name, toolbox)
        script = runpy.run_path(str(script))
    except FileNotFoundError as error:
        sys.exit(f'error: {error}')
    args = script['parse_args']()  # its own, so that --help and wrong options are its business

    from preflight import PreflightError, check_config, load_config  # needs mmdet, which is there by now

    try:
        config = load_config(args.config, args.cfg_options)
        check_config(config, splits)
        if name == 'train.py':
            _check_start(config, args)
        else:
            _checkpoints().check_checkpoint(args.checkpoint, 'checkpoint', config, all_weights=True)
    except PreflightError as error:
        sys.exit(f'error: {error}')
    if name == 'train.py':
        _write_whole_checkpoints(config)
        _evaluate_what_ended(config)
    cpu_ranks = args.launcher != 'none' and _allow_cpu_ranks(config)
    script['main']()
    if cpu_ranks:
        # All is done and written. gloo's threads abort one in ten processes that end in the ordinary way from here.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _checkpoints():
    import checkpoints  # needs torch

    return checkpoints


def _check_start(config, args):
    """Checks what a training starts from, by mmdet's rules: --resume goes before the config's resume and load_from."""
    checkpoints = _checkpoints()
    load_from = config.get('load_from') if args.resume is None else args.resume
    resume = args.resume is not None or config.get('resume', False)
    if resume and load_from in (None, 'auto'):
        work_dir = Path(args.work_dir or config.get('work_dir') or Path('work_dirs', Path(args.config).stem))
        path, reason = checkpoints.last_whole_checkpoint(work_dir)
        if reason and path is None:
            raise checkpoints.PreflightError(
                f'--resume: {reason}, and there is no whole checkpoint beside it; without --resume the training '
                'starts anew'
            )
        if reason:
            _say(f'--resume: {reason}; going on from {path}')
            sys.argv += ['--resume', str(path)]
        load_from = path
        if path is None and args.resume == 'auto' and config.get('load_from'):
            resume, load_from = False, config.load_from
            _say(f'--resume: there is nothing to go on from yet, so the training starts from load_from={load_from}')
            _forget_resume()
    if load_from:
        checkpoints.check_checkpoint(str(load_from), '--resume' if resume else 'load_from', config, whole_run=resume)


def _forget_resume():
    """Takes ``--resume`` from the command line: with it the toolboxes' scripts forget the config's load_from."""
    for i, word in enumerate(sys.argv):
        name, equals, _ = word.partition('=')
        if len(name) > 4 and '--resume'.startswith(name):
            del sys.argv[i : i + (1 if equals or sys.argv[i + 1 : i + 2] != ['auto'] else 2)]
            return


def _write_whole_checkpoints(config):
    """Checkpoints appear whole or not at all, unless the config says how to write them."""
    hook = config.get('default_hooks', {}).get('checkpoint', {})
    if not isinstance(hook, dict) or 'sbp_mmdet.resume' not in sys.modules:
        return
    if not {'backend_args', 'file_client_args'} & set(hook) and '://' not in f'{hook.get("out_dir")}':
        options = ['default_hooks.checkpoint.backend_args.backend=atomic']
        if 'type' not in hook:
            options.append('default_hooks.checkpoint.type=CheckpointHook')
        sys.argv += ['--cfg-options', *options]
    if hook.get('max_keep_ckpts') == 1:
        _say(
            'default_hooks.checkpoint.max_keep_ckpts=1: mmengine removes the old checkpoint before it writes the new '
            'one, and a run that is killed between them has none; 2 is safe'
        )


def _evaluate_what_ended(config):
    """A run that was killed in its last evaluation is evaluated when it is resumed."""
    if 'sbp_mmdet.resume' in sys.modules and 'evaluation' not in config.get('default_hooks', {}):
        sys.argv += ['--cfg-options', 'default_hooks.evaluation.type=EvaluateEndedHook']


def _say(message):
    """Once, not in each process."""
    ranks = ('RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK')  # torchrun, Slurm, MPI
    if next((os.environ[name] for name in ranks if name in os.environ), '0') == '0':
        print(message, file=sys.stderr)


def _allow_cpu_ranks(config):
    """mmengine's distributed start assumes an accelerator. Where there is none, for trying things out:

    - ``torch.cuda.set_device``, which it calls in every process, does nothing;
    - the processes talk through gloo;
    - DistributedDataParallel is not given the number of a GPU.

    Where there is an accelerator this changes nothing.

    Returns:
        bool: Whether these are CPU ranks.
    """
    import torch
    from mmengine.device import get_device

    if get_device() != 'cpu':
        return False
    torch.cuda.set_device = lambda device: None
    options = ['env_cfg.dist_cfg.backend=gloo', 'model_wrapper_cfg.device_ids=None']
    if 'model_wrapper_cfg' not in config:  # then mmengine would have made this one
        find_unused = config.get('find_unused_parameters', False)
        options += [
            'model_wrapper_cfg.type=MMDistributedDataParallel',
            'model_wrapper_cfg.broadcast_buffers=False',
            f'model_wrapper_cfg.find_unused_parameters={find_unused}',
        ]
    sys.argv += ['--cfg-options', *options]
    _say(f'no GPU here: CPU ranks, as if with --cfg-options {" ".join(options)}')
    return True
