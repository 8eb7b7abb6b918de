#!/usr/bin/env bash
# Style check and tests. Makes its environment like quickstart.sh, or finds the one made before.
#
#   bash tools/run_tests.sh [arguments of pytest]
#
# The environment variables of tools/setup_env.sh apply.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
answer_help "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The tests start some hundred processes, each of which would compile this package again.
export PYTHONDONTWRITEBYTECODE=
python=$(bash tools/setup_env.sh)
# The tests are for the CPU, for mmcv may have been compiled without its GPU operators; backbones and operations run on a
# GPU with SBP_TEST_DEVICE=cuda.
[ "${SBP_TEST_DEVICE:-cpu}" != cpu ] || export CUDA_VISIBLE_DEVICES=
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}" # see let_threads_sleep in mmdet_script.py
if "$python" -c 'import ruff' 2>/dev/null; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
else
    echo '[tests] no ruff in this environment: style is not checked' >&2
fi
# One process for each core, with one thread each: threads gain little on tests of this size. SBP_TEST_WORKERS=0 runs all
# in one process.
workers=${SBP_TEST_WORKERS:-$(count_cores)}
if [ "$workers" -gt 0 ] && [ "${SBP_TEST_DEVICE:-cpu}" = cpu ] && "$python" -c 'import xdist' 2>/dev/null; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    set -- --numprocesses "$((workers < 4 ? workers : 4))" --dist loadfile --no-loadscope-reorder "$@"
fi
exec "$python" -m pytest "$@"
