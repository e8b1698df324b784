#!/usr/bin/env bash
# Trains the preset with several seeds, evaluates each on held-out digits before and after, and prints a
# table.
#   bash examples/tool_call/seeds.sh        defaults: STEPS=16 SEEDS="1 2 3"
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/common.sh
source scripts/common.sh

steps=${STEPS:-16}
make_assets
for seed in ${SEEDS:-1 2 3}; do
  run=output/tool_call/seed$seed
  step "Training: $steps steps, seed $seed ($run)"
  rm -rf "$run"
  mkdir -p "$run"
  SECONDS=0
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$VENV/bin/swift" rlhf examples/tool_call/grpo.yaml \
    --model "$ASSETS/tiny_vlm" --dataset "$ASSETS/digits/train.jsonl" --seed "$seed" \
    --max_steps "$steps" --output_dir "$run" --add_version false \
    --val_dataset "$ASSETS/digits/heldout.jsonl#128" --eval_on_start true --eval_strategy steps \
    --eval_steps "$steps" --per_device_eval_batch_size 16 --num_generations_eval 2 >"$run/swift.log" 2>&1 ||
    { tail -n 25 "$run/swift.log" >&2; fail "the training failed; see $run/swift.log"; }
  echo "$SECONDS s"
done
step "Conversations on held-out digits, before and after training"
"$PYTHON" examples/tool_call/summarize.py output/tool_call
