#!/usr/bin/env bash
# From a checkout to a trained SBP detector: environment, data, training, evaluation, picture, summary.
# Runs on the CPU, in a few minutes plus the first set-up; running it again sets nothing up, and trains anew.
#
#   bash tools/quickstart.sh
#
# The environment variables of tools/setup_env.sh apply.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" # the config and everything that it names stand relative to the checkout

config=configs/sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py
work=work_dirs/quickstart
say() { printf '\n[quickstart] %s\n' "$*"; }
trap 'say "stopped at step $step; the lines above say why. Nothing is finished: run it again." >&2' ERR
step=0
begin() {
    step=$((step + 1))
    say "step $step of 6: $*"
}

begin 'environment (made once: about 10 minutes, most of it to compile mmcv; found in no time later)'
python=$(bash tools/setup_env.sh)
export CUDA_VISIBLE_DEVICES= # mmcv may have been compiled without its GPU operators

begin 'data: rendered shapes in COCO format, data/shapes'
"$python" tools/make_synthetic_coco.py --out data/shapes --train 1000 --val 100 --size 128 --seed 0

begin "training: Mask R-CNN with an SBP ConvNeXt, from scratch, 4 to 6 minutes on two cores ($work)"
rm -f "$work/last_checkpoint" # written again at the end of the training, so a checkpoint found there is this one's
"$python" tools/train.py "$config" --work-dir "$work"
checkpoint=$(cat "$work/last_checkpoint")

begin 'evaluation on the held-out images: box and mask AP'
"$python" tools/test.py "$config" "$checkpoint" --work-dir "$work/test"

begin "picture: predictions beside ground truth, $work/predictions.png"
"$python" tools/show_predictions.py "$config" "$checkpoint" --out "$work/predictions.png" --device cpu

begin 'summary'
"$python" tools/quickstart_summary.py "$config" "$work"
