"""The file that the name of a config means, and the config that a misspelt name resembles."""

import difflib
import importlib.util
from pathlib import Path

__all__ = ['find_config_file', 'find_similar_config']


def find_config_file(name: str) -> Path:
    """Return the file of a config.

    Args:
        name (str): Path of a file, or ``mmdet::family/name.py`` for a config that a package installs.

    Returns:
        Path: The file.

    Raises:
        ValueError: If there is no such package or file. The message names the config that the name resembles.
    """
    if not name:
        raise ValueError('the name of the config is empty; give the path of a config file')
    package, _, rest = name.rpartition('::')
    file = _folder_of(package, name) / rest if package else Path(name)
    if file.is_dir():
        raise ValueError(f'{name} is a folder; give the path of a config file in it')
    if not file.is_file():
        where = '' if package else f' (working folder: {Path.cwd()})'
        similar = find_similar_config(file, package or 'mmdet')
        hint = f'did you mean {similar}?' if similar else 'check the path'
        raise ValueError(f'config file {name} does not exist{where}; {hint}')
    return file


def find_similar_config(file: Path, package: str = 'mmdet') -> str | None:
    """Return the config that the path of a missing file resembles.

    A config of the same name is preferred: in the folder that the path's own folder resembles, or else wherever the
    package has it.

    Args:
        file (Path): Path of a file that does not exist.
        package (str): Package whose configs are considered besides the files near the path. Default: 'mmdet'.

    Returns:
        str | None: Name of a config as :func:`find_config_file` takes it, or ``None`` if nothing resembles the path.
    """
    folder = _folder_of(package, package)
    stem = file.name.removesuffix('.py')
    resembling = _find_resembling(file)
    same_name = [one for one in (resembling, *sorted(folder.rglob('*.py'))) if one is not None and one.stem == stem]
    found = next(iter(same_name), resembling)
    if found is None:
        return None
    return f'{package}::{found.relative_to(folder)}' if found.is_relative_to(folder) else str(found)


def _find_resembling(file):
    """Return the path that exists whose parts are those of a file or the ones that resemble them most, or ``None``."""
    found = Path(file.anchor)
    for part in file.relative_to(found).parts:
        if not (found / part).exists():
            try:
                names = [one.name for one in found.iterdir() if one.is_dir() or (one.suffix == '.py' and one.exists())]
            except OSError:  # no folder, or one that may not be read
                return None
            near = difflib.get_close_matches(part, names, n=1)
            if not near:
                return None
            part = near[0]
        found = found / part
    return found


def _folder_of(package, name):
    """Return the folder of a package's configs, found as mmengine finds it, without importing the package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # of a part of a package that is not installed, or of an empty name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f'{name}: package {package} is not installed; install it, or give the path of a config file')
    folder = Path(spec.submodule_search_locations[0])
    installed = folder / '.mim/configs'
    return installed if installed.is_dir() else folder.parent / 'configs'
