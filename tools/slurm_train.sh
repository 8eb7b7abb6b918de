#!/usr/bin/env bash
# Train under Slurm, one task per GPU.
#
#   bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [options of tools/train.py]
#
#   GPUS            in all: 8
#   GPUS_PER_NODE   8, or GPUS where that is less
#   CPUS_PER_TASK   5
#   SRUN_ARGS       more options of srun, split at blanks; --gres=none for nodes without GPU
#   PY_ARGS         more options of tools/train.py, split at blanks
#   PORT            for the processes to meet, 29500; two jobs on one node need two
#   PYTHON          the interpreter: python
set -euo pipefail
set -f # SRUN_ARGS and PY_ARGS are split into words, but no word is expanded to file names

if [ $# -lt 4 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
partition=$1 job_name=$2 config=$3 work_dir=$4
shift 4
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export MASTER_PORT="${PORT:-${MASTER_PORT:-29500}}"
# shellcheck disable=SC2086
exec srun \
    --partition="$partition" \
    --job-name="$job_name" \
    --gres="gpu:$gpus_per_node" \
    --ntasks="$gpus" \
    --ntasks-per-node="$gpus_per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$root/tools/train.py" "$config" --work-dir="$work_dir" --launcher=slurm "$@" ${PY_ARGS:-}
