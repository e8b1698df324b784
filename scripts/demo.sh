#!/usr/bin/env bash
# The main job: GRPO on images with the real ms-swift and the real vLLM, on CPU, from nothing.
# What is there already (environment, model, data, checkpoints) is used again.
#   SEED=1 bash scripts/demo.sh                                     another seed
#   RUN=output/g4 bash scripts/demo.sh --num_generations 4          arguments go to `swift rlhf`
bash "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

seed=${SEED:-42}
steps=${STEPS:-200}
[ $# = 0 ] || [ -n "${RUN:-}" ] || fail "a run with settings of its own ($*) needs a folder of its own:
RUN=output/NAME bash scripts/demo.sh $*"
run=${RUN:-output/digits-seed$seed}

step "Tiny model and data (in $ASSETS)"
make_assets
step "Training: $steps steps of GRPO, seed $seed"
"$PYTHON" examples/digits/train.py --model "$ASSETS/tiny_vlm" --data "$ASSETS/digits" \
  --output "$run" --seed "$seed" --max-steps "$steps" -- "$@"
step "Held-out images, before and after"
if [ ! -f "$run/evaluation.json" ]; then
  "$PYTHON" examples/digits/evaluate.py "$ASSETS/tiny_vlm" "$run/checkpoint-$steps" \
    --data "$ASSETS/digits/heldout.jsonl" --output "$run/evaluation.json" >"$run/evaluate.log" 2>&1 ||
    { tail -n 25 "$run/evaluate.log" >&2; fail "the evaluation failed; see $run/evaluate.log"; }
fi
"$PYTHON" examples/digits/summarize.py "$run"

if [ "$steps" = 200 ] && [ $# = 0 ]; then # what the published results are about
  step "Is that what to expect?"
  "$PYTHON" examples/digits/experiment.py check --gain-only "$run"
fi

printf '\nNext, in this folder:\n\n  source %s/bin/activate\n  swift-grpo-ext view %s\n' "$VENV" "$run"
printf '\nThen: another seed (SEED=1 bash scripts/demo.sh), or data of your own with this preset as the
start (examples/digits/grpo.yaml).\n'
