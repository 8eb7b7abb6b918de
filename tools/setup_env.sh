#!/usr/bin/env bash
# Makes the environment that quickstart.sh and run_tests.sh share, or finds the one made before.
# Messages go to stderr; the one line on stdout is the environment's python.
#
#   SBP_PYTHON=/path/to/python   use this environment as it is: nothing is installed into it
#   SBP_STACK=onedl|upstream     which mm stack to install (default onedl, the maintained one)
#   SBP_CACHE=DIR                where environments and compiled wheels live (default ~/.cache/sbp_mmdet)
#   PYTHON=python3.x             the interpreter to build on (default python3; 3.10 or newer)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
take_no_arguments "$@"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '[setup] %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

if [ -n "${SBP_PYTHON:-}" ]; then
    "$SBP_PYTHON" -c 'import torch, mmcv.ops, mmengine, mmdet' >&2 \
        || die "SBP_PYTHON=$SBP_PYTHON cannot import torch, mmcv, mmengine and mmdet; unset it to let this script make an environment"
    echo "$SBP_PYTHON"
    exit 0
fi

stack=${SBP_STACK:-onedl}
torch=2.13.0
case $stack in
    onedl) mmcv=onedl-mmcv==2.3.6 ;;
    upstream) mmcv=mmcv==2.1.0 ;;
    *) die "SBP_STACK=$stack: choose onedl or upstream" ;;
esac

base=${PYTHON:-python3}
command -v "$base" >/dev/null || die "no '$base' here; install Python 3.10 or newer, or name one: PYTHON=python3.x"
tag=$("$base" -c 'import sys; print("py%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 10))') \
    || die "'$base' is ${tag:-unknown}; Python 3.10 or newer is needed: PYTHON=python3.x"

cache=${SBP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sbp_mmdet}
# The checkout's path is part of the name because the package is installed from it (pip install -e).
env=$cache/env-$stack-$tag-torch$torch-$(printf %s "$root" | cksum | cut -d' ' -f1)
python=$env/bin/python
want=$(cat "$root/tools/setup_env.sh" "$root/setup.py" | cksum)

if [ -x "$python" ] && [ "$(cat "$env/ready" 2>/dev/null)" = "$want" ]; then
    say "environment found: $env"
    echo "$python"
    exit 0
fi

pip() { "$python" -m pip --disable-pip-version-check "$@" >&2; }

say "making $env (stack $stack, $tag, torch $torch)"
mkdir -p "$cache"
[ -x "$python" ] || "$base" -m venv "$env" || die "could not make a virtual environment; on Debian: apt-get install python3-venv"
say "step 1 of 3: torch and build tools (a few minutes, most of it download)"
pip install -q "torch==$torch" 'setuptools>=80,<81' wheel ninja psutil

# pip's own wheel cache does not know which torch a wheel was compiled against; this folder does.
wheels=$cache/wheels/$tag-torch$("$python" -W ignore -c 'import torch; print(torch.__version__)')
wheel_name=${mmcv//-/_} # onedl-mmcv==2.3.6 -> onedl_mmcv-2.3.6-cp311-...whl
if ! compgen -G "$wheels/${wheel_name/==/-}-*.whl" >/dev/null; then
    command -v c++ >/dev/null || command -v g++ >/dev/null || die "mmcv's operators need a C++ compiler; on Debian: apt-get install g++"
    if ! command -v nvcc >/dev/null; then # mmcv would try to build for a GPU that it sees, and fail
        say "no CUDA compiler (nvcc) here: mmcv's operators are compiled for the CPU only"
        export CUDA_VISIBLE_DEVICES=
    fi
    say "step 2 of 3: compiling mmcv's operators: 7 to 15 minutes on two cores, once (kept in $wheels)"
    started=$SECONDS
    MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(count_cores)} "$python" -m pip --disable-pip-version-check wheel -q \
        --no-cache-dir --no-build-isolation --no-deps -w "$wheels" "$mmcv" >&2 &
    build=$!
    while kill -0 $build 2>/dev/null; do
        sleep 2
        [ $(((SECONDS - started) % 30)) -lt 2 ] && say "  still compiling, $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s" || true
    done
    wait $build || die "mmcv did not compile; the lines above say why"
else
    say "step 2 of 3: mmcv is compiled already ($wheels)"
fi
say "step 3 of 3: mmdet, mmengine, this package and the test tools"
pip install -q --find-links "$wheels" --no-build-isolation "torch==$torch" "$mmcv" -e "$root[$stack,test]"
"$python" -c 'import mmcv.ops, mmdet, sbp_mmdet' || die "the environment does not import; delete $env and run again"
echo "$want" >"$env/ready"
say "ready after $((SECONDS / 60)) min $((SECONDS % 60)) s"
echo "$python"
