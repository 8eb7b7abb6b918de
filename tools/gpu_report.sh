#!/usr/bin/env bash
# Measures on a GPU: verification, tests, times of modules, profiles, whole steps, steps with limited memory. Writes a
# page and an archive.
#
#   bash tools/gpu_report.sh --quick [--wheels DIR] [--out DIR] [--archive FILE]    # the quick report, ten minutes
#   bash tools/gpu_report.sh [--minutes 25] [--parts NAME ...] [--rehearse] ...     # the long report, until time is up
#
# Every row is written as soon as it is measured. A second call with the same --out continues. Nothing is downloaded.
#
#   --wheels DIR   first install the wheels in DIR or DIR/wheels (of mmcv, mmdet and so on) into a folder below --out
#   --rehearse     run everything with tiny sizes on a CPU
#   SBP_PYTHON     the python with torch (default python3)
#   SBP_COMMIT     the commit, if the files come without their history
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
answer_help "$@"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=${SBP_PYTHON:-python3}
out=
wheels=
arguments=()
needs='torch.cuda.is_available()'
name=gpu_report
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a folder} && shift 2 ;;
        --out) out=${2:?--out needs a folder} && shift 2 ;;
        --rehearse) arguments+=("$1") && needs=True && name=gpu_rehearsal && export CUDA_VISIBLE_DEVICES= && shift ;;
        *) arguments+=("$1") && shift ;;
    esac
done
out=${out:-$root/work_dirs/$name}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [ -n "$wheels" ]; then
    compgen -G "$wheels/*.whl" >/dev/null || wheels=$wheels/wheels
    compgen -G "$wheels/*.whl" >/dev/null || { echo "--wheels $wheels: there are no wheels; name their folder" >&2; exit 2; }
    site=$out/site
    [ -e "$site/ready" ] || {
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
        touch "$site/ready"
    }
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
cd "$root"
"$python" -c "import torch, mmcv.ops, mmdet.apis, sbp_mmdet
assert $needs, 'torch sees no GPU; --rehearse runs everything in tiny sizes on a CPU'" || {
    echo "$python lacks what the report needs (see above): name another one by SBP_PYTHON, or its wheels by --wheels" >&2
    exit 2
}
"$python" -c "import pytest, hypothesis" || echo "without these the tests of the report fail; all else is measured" >&2
exec "$python" tools/gpu_report.py --out "$out" ${arguments[@]+"${arguments[@]}"}
