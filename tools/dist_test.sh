#!/usr/bin/env bash
# Evaluate with one process per GPU, on one or more nodes, through torchrun.
#
#   bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [options of tools/test.py]
#
#   NNODES, NODE_RANK, MASTER_ADDR, PORT   as for mmdet's script: 1, 0, 127.0.0.1, 29500
#   PY_ARGS                                more options of tools/test.py, split at blanks
#   PYTHON                                 the interpreter: python
#
# GPUS is the number on each node. On a machine without GPU it is the number of CPU processes, for trying things out.

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
[ $# -ge 3 ] || usage
config=$1 checkpoint=$2 gpus=$3
shift 3
by_torchrun "$gpus" "$root/tools/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
