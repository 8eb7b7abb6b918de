#!/usr/bin/env bash
# On a machine with a GPU: tests, bytes, times, caps and a short training in one go, and a page with tables.
#
#   bash tools/gpu_report.sh [--minutes 25] [--out DIR] [--wheels DIR] [--parts NAME ...] [--rehearse]
#
# Every part has its own time limit, of less than ten minutes, and is written as soon as it is there. Started again with
# the same --out it goes on with what is missing; --minutes is for one such call. Nothing is downloaded.
#
#   --wheels DIR   first install the wheels in DIR or DIR/wheels (of mmcv, mmdet and so on) into a folder below --out
#   --rehearse     everything in a tiny size on a CPU
#   SBP_PYTHON     the python with torch (default python3)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=${SBP_PYTHON:-python3}
out=$root/work_dirs/gpu_report
wheels=
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a folder} && shift 2 ;;
        --out) out=${2:?--out needs a folder} && shift 2 ;;
        *) arguments+=("$1") && shift ;;
    esac
done
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
"$python" -c 'import torch, mmcv.ops, mmdet, pytest, hypothesis, matplotlib' || {
    echo "$python lacks what the report needs (see above): name another one by SBP_PYTHON, or its wheels by --wheels" >&2
    exit 2
}
exec "$python" tools/gpu_report.py --out "$out" ${arguments[@]+"${arguments[@]}"}
