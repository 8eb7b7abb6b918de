#!/usr/bin/env bash
# Evaluate under Slurm, one task per GPU.
#
#   bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [options of tools/test.py]
#
#   GPUS            in all: 8
#   GPUS_PER_NODE   8, or GPUS where that is less
#   CPUS_PER_TASK   5
#   SRUN_ARGS       more options of srun, split at blanks; --gres=none for nodes without GPU
#   PY_ARGS         more options of tools/test.py, split at blanks
#   PORT            for the processes to meet, 29500; two jobs on one node need two
#   MASTER_ADDR     where they meet: the first node, by its name in Slurm
#   PYTHON          the interpreter: python

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
[ $# -ge 4 ] || usage
partition=$1 job_name=$2 config=$3 checkpoint=$4
shift 4
by_srun "$partition" "$job_name" "$root/tools/test.py" "$config" "$checkpoint" --launcher=slurm "$@"
