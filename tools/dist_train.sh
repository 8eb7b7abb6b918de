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
set -euo pipefail
set -f # PY_ARGS is split into words, but no word is expanded to file names

if [ $# -lt 2 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
config=$1 gpus=$2
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# shellcheck disable=SC2086
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$gpus" \
    "$root/tools/train.py" "$config" --launcher pytorch "$@" ${PY_ARGS:-}
