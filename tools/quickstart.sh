#!/usr/bin/env bash
# Makes an environment, plans for a stock detector, trains a small one plain, with LeanHook and with the paper's backbone,
# evaluates it, and prints a summary. Runs on a CPU in a few minutes, plus the first set-up. A second run uses the same
# environment and trains again.
#
#   bash tools/quickstart.sh
#
# The environment variables of tools/setup_env.sh apply.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
take_no_arguments "$@"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" # the config and everything that it names stand relative to the checkout

config=configs/nuclei/mask-rcnn_convnext-atto_fpn_lean-15e_nuclei.py
work=work_dirs/quickstart
say() { printf '\n[quickstart] %s\n' "$*"; }
trap 'say "stopped at step $step; the lines above say why. Nothing is finished: run it again." >&2' ERR
step=0
begin() {
    step=$((step + 1))
    say "step $step of 7: $*"
}

begin 'environment (made once: about 10 minutes, most of it to compile mmcv; found in no time later)'
python=$(bash tools/setup_env.sh)
export CUDA_VISIBLE_DEVICES= # mmcv may have been compiled without its GPU operators

begin 'what a stock detector needs with each preset: RTMDet-S with 32 images, counted without a GPU'
"$python" -m sbp_mmdet.plan plan mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py --budget 8GiB

train_briefly() { # WORK_DIR OPTION...: two epochs, without evaluation or checkpoint
    local folder=$1
    shift
    "$python" tools/train.py "$config" --work-dir "$folder" --cfg-options custom_hooks='[]' "$@" train_cfg.max_epochs=2 \
        train_cfg.val_begin=3 default_hooks.checkpoint.interval=3 default_hooks.checkpoint.save_last=False
}

begin "plain training, to compare with ($work/plain)"
train_briefly "$work/plain"

begin "the paper's method: SBPConvNeXt backpropagates through half of the positions ($work/sbp)"
train_briefly "$work/sbp" model.backbone.sbp_cfg.keep_ratio=0.5

begin "training with LeanHook, exact_min: Mask R-CNN with a ConvNeXt on images of cell nuclei, from scratch ($work/lean)"
rm -f "$work/lean/last_checkpoint" # written again at the end of the training, so a checkpoint found there is this one's
"$python" tools/train.py "$config" --work-dir "$work/lean"
checkpoint=$(cat "$work/lean/last_checkpoint")

begin "evaluation on the held-out images: box and mask AP, pictures of ground truth and predictions"
rm -rf "$work/test"
"$python" tools/test.py "$config" "$checkpoint" --work-dir "$work/test" --show-dir predictions

begin 'summary'
"$python" tools/quickstart_summary.py "$config" "$work"
