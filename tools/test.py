"""Evaluate a detector: mmdet's own tools/test.py, with its arguments (see --help), after checks of the config. For a
config of mmpretrain it is mmpretrain's.

python tools/test.py CONFIG CHECKPOINT [--work-dir DIR] [--show-dir DIR] [--cfg-options KEY=VALUE ...] ...
"""

from mmdet_script import run

if __name__ == '__main__':
    run('test.py', splits=('test',))
