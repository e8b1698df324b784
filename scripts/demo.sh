#!/usr/bin/env bash
# Sets up an environment and trains with GRPO on images, with the real ms-swift and vLLM, on CPU.
# An existing environment, model, data set or checkpoint is used again.
#   SEED=1 bash scripts/demo.sh                                     another seed
#   STEPS=200 bash scripts/demo.sh                                  more steps; 80 and 200 are published
#   RUN=output/g4 bash scripts/demo.sh --num_generations 4          arguments go to `swift rlhf`
bash "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

seed=${SEED:-42}
steps=${STEPS:-80}
name=digits-seed$seed
[ "$steps" = 80 ] || name=$name-$steps
[ $# = 0 ] || [ -n "${RUN:-}" ] || fail "a run with other settings ($*) needs another folder:
RUN=output/NAME bash scripts/demo.sh $*"
run=${RUN:-output/$name}

make_assets
step "Training: $steps steps of GRPO, seed $seed (the first one takes about a minute)"
mkdir -p "$run"
"$VENV/bin/swift-grpo-ext" view "$run" --port 0 >"$run/page.log" 2>&1 & # waits for the run to begin
trap 'kill $! 2>/dev/null || true' EXIT
"$PYTHON" examples/digits/train.py --model "$ASSETS/tiny_vlm" --data "$ASSETS/digits" \
  --output "$run" --seed "$seed" --max-steps "$steps" --page "$run/page.log" -- "$@"
step "Evaluation on held-out images, before and after training (about a minute)"
if [ ! -f "$run/evaluation.json" ]; then
  "$PYTHON" examples/digits/evaluate.py "$ASSETS/tiny_vlm" "$run/checkpoint-$steps" \
    --data "$ASSETS/digits/heldout.jsonl" --output "$run/evaluation.json" >"$run/evaluate.log" 2>&1 ||
    { tail -n 25 "$run/evaluate.log" >&2; fail "the evaluation failed; see $run/evaluate.log"; }
fi
"$PYTHON" examples/digits/summarize.py "$run"
if [ $# = 0 ] && [ -f "examples/digits/results/steps$steps.json" ]; then # published seeds
  step "Comparison with the published runs"
  "$PYTHON" examples/digits/experiment.py check --gain-only "$run"
fi

printf '\nThe page is closed now. Open it again in this folder:\n\n  source %s/bin/activate\n  swift-grpo-ext view %s\n' \
  "$VENV" "$run"
printf '\nNext, try another seed (SEED=1 bash scripts/demo.sh), or adapt the preset
examples/digits/grpo.yaml to your own data.\n'
