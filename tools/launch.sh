# Sourced by the launch scripts.
# shellcheck shell=bash disable=SC2034,SC2086
set -euo pipefail
set -f # SRUN_ARGS and PY_ARGS are split into words, but no word is expanded to file names

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

source "$root/tools/usage.sh"
answer_help "$@"

# usage: prints the comment at the head of the script, and stops.
usage() {
    print_usage >&2
    exit 2
}

# check_number NAME VALUE: stops unless the value is a whole number above 0.
check_number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] && return
    echo "error: $1='$2' must be a whole number of 1 or more; $0 without arguments prints their order" >&2
    exit 2
}

# by_torchrun GPUS SCRIPT [ARG ...]
by_torchrun() {
    local gpus=$1
    [[ $gpus == auto || $gpus == gpu ]] || check_number GPUS "$gpus" # torchrun counts them for these two words
    shift
    exec "${PYTHON:-python}" "$root/tools/torchrun.py" \
        --nnodes="${NNODES:-1}" \
        --node_rank="${NODE_RANK:-0}" \
        --master_addr="${MASTER_ADDR:-127.0.0.1}" \
        --master_port="${PORT:-29500}" \
        --nproc_per_node="$gpus" \
        "$@" ${PY_ARGS:-}
}

# by_srun PARTITION JOB_NAME SCRIPT [ARG ...]
by_srun() {
    local partition=$1 job_name=$2 gpus=${GPUS:-8}
    check_number GPUS "$gpus"
    local gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
    shift 2
    export MASTER_PORT="${PORT:-${MASTER_PORT:-29500}}"
    exec srun \
        --partition="$partition" \
        --job-name="$job_name" \
        --gres="gpu:$gpus_per_node" \
        --ntasks="$gpus" \
        --ntasks-per-node="$gpus_per_node" \
        --cpus-per-task="${CPUS_PER_TASK:-5}" \
        --kill-on-bad-exit=1 \
        ${SRUN_ARGS:-} \
        "${PYTHON:-python}" -u "$@" ${PY_ARGS:-}
}
