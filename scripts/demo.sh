#!/usr/bin/env bash
# The main job: GRPO on images with the real ms-swift and the real vLLM, on CPU, from nothing.
# What is there already (environment, model, data, checkpoints) is used again.
#   SEED=1 bash scripts/demo.sh                                     another seed
#   STEPS=200 bash scripts/demo.sh                                  as long as the published runs
#   RUN=output/g4 bash scripts/demo.sh --num_generations 4          arguments go to `swift rlhf`
bash "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

seed=${SEED:-42}
steps=${STEPS:-80}
name=digits-seed$seed
[ "$steps" = 80 ] || name=$name-$steps
[ $# = 0 ] || [ -n "${RUN:-}" ] || fail "a run with settings of its own ($*) needs a folder of its own:
RUN=output/NAME bash scripts/demo.sh $*"
run=${RUN:-output/$name}

make_assets
step "Training: $steps steps of GRPO, seed $seed (the first one takes about a minute)"
mkdir -p "$run"
"$VENV/bin/swift-grpo-ext" view "$run" --port 0 >"$run/page.log" 2>&1 & # it waits for the run
trap 'kill $! 2>/dev/null || true' EXIT
"$PYTHON" examples/digits/train.py --model "$ASSETS/tiny_vlm" --data "$ASSETS/digits" \
  --output "$run" --seed "$seed" --max-steps "$steps" --page "$run/page.log" -- "$@"
step "Held-out images, before and after (about a minute)"
if [ ! -f "$run/evaluation.json" ]; then
  "$PYTHON" examples/digits/evaluate.py "$ASSETS/tiny_vlm" "$run/checkpoint-$steps" \
    --data "$ASSETS/digits/heldout.jsonl" --output "$run/evaluation.json" >"$run/evaluate.log" 2>&1 ||
    { tail -n 25 "$run/evaluate.log" >&2; fail "the evaluation failed; see $run/evaluate.log"; }
fi
"$PYTHON" examples/digits/summarize.py "$run"
if [ $# = 0 ] && [ -f "examples/digits/results/steps$steps.json" ]; then # published seeds
  step "Is that what to expect?"
  "$PYTHON" examples/digits/experiment.py check --gain-only "$run"
fi

printf '\nThe page is closed now. Open it again, in this folder:\n\n  source %s/bin/activate\n  swift-grpo-ext view %s\n' \
  "$VENV" "$run"
printf '\nThen: another seed (SEED=1 bash scripts/demo.sh), or data of your own with this preset as the
start (examples/digits/grpo.yaml).\n'
