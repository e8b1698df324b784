#!/usr/bin/env bash
# Runs a training that goes wrong on purpose, shows the diversity monitor's alarms and writes a report.
#   bash scripts/diversity_demo.sh collapse   the reward favours one answer, so the policy collapses
#   bash scripts/diversity_demo.sh frozen     ms-swift's own seeds with tensor parallelism repeat the
#                                             same noise at every step
# Each takes minutes on a CPU.
bash "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

run=output/diversity-${1:?expected collapse or frozen}
common=(rlhf examples/digits/grpo.yaml --model "$ASSETS/tiny_vlm" --output_dir "$run"
  --add_version false --save_strategy no
  --external_plugins plugins/grpo_ext.py examples/digits/rewards.py)
case $1 in
  collapse) own=(examples/diversity/favour.py --dataset "$ASSETS/digits/train.jsonl" --seed 1
    --reward_funcs favour --reward_weights 1 --max_steps 16) ;;
  frozen) own=(--dataset "$ASSETS/digits/train.jsonl#1" --max_steps 6 --temperature 2
    --rollout_seed_mode engine --vllm_tensor_parallel_size 2
    --per_device_train_batch_size 4 --num_generations 8 --learning_rate 1e-5 --warmup_steps 0)
    export NPROC_PER_NODE=2 ;;
  *) fail "expected collapse or frozen, not $1" ;;
esac

make_assets
step "Training ($run)"
rm -rf "$run"
mkdir -p "$run"
"$VENV/bin/swift" "${common[@]}" "${own[@]}" >"$run/train.log" 2>&1 ||
  { tail -n 25 "$run/train.log" >&2; fail "the training failed; see $run/train.log"; }
grep -ao 'diversity: .*' "$run/train.log" || echo "no alarm"
step "Report: metrics, alarms and worst groups on one page"
"$VENV/bin/swift-grpo-ext" view "$run" --output "$run/report.html"
