#!/usr/bin/env bash
# Train with one process per GPU, on one or more nodes, through torchrun.
#
#   bash tools/dist_train.sh CONFIG GPUS [options of tools/train.py]
#
#   NNODES, NODE_RANK, MASTER_ADDR, PORT   as for mmdet's script: 1, 0, 127.0.0.1, 29500
#   PY_ARGS                                more options of tools/train.py, split at blanks
#   PYTHON                                 the interpreter: python
#
# GPUS is the number on each node. On a machine without GPU it is the number of CPU processes, for trying things out.

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
[ $# -ge 2 ] || usage
config=$1 gpus=$2
shift 2
by_torchrun "$gpus" "$root/tools/train.py" "$config" --launcher pytorch "$@"
