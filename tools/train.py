"""Train a detector: mmdet's own tools/train.py, with its arguments (see --help), after checks of the config. For a
config of mmpretrain it is mmpretrain's.

python tools/train.py CONFIG [--work-dir DIR] [--resume [CHECKPOINT]] [--cfg-options KEY=VALUE ...] ...
"""

from mmdet_script import run

if __name__ == '__main__':
    run('train.py', splits=('train', 'val'))
