#!/usr/bin/env bash
# Tests values and gradients of the training passes on a GPU, then measures their time and memory.
#   bash scripts/gpu.sh              writes tests.txt and the benches' tables to output/gpu
#   bash scripts/gpu.sh -k media     arguments go to pytest; OUTPUT names another folder
# It takes minutes and needs the package with its dependencies, pytest, pytest-xdist and hypothesis, but
# no network. PYTHON names another interpreter. Without a GPU the sizes are small.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# NVIDIA's images set these two, and TF32 would round the float32 references.
unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE
# Deterministic steps need this setting, which torch reads at the first matrix product.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
export HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3} out=${OUTPUT:-output/gpu} status=0
mkdir -p "$out"

sizes=(--size 3b 7b --attentions sdpa flash_attention_2 --prompts 1000 4000 8000 2000 --group-sizes 8 16)
logits=(--dtype bfloat16)
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  sizes=(--size small --layers 2 --prompts 64 128 --group-sizes 4 --completions 16 16)
  logits=(--vocabulary 4096 --lengths 64)
fi
# -rP adds to tests.txt what passed tests print: the checksums of deterministic steps.
files=(tests/gpu tests/unit/logits/test_passes.py)
"$python" -m pytest "${files[@]}" -n 1 -q -rsP -o faulthandler_timeout=120 "$@" | tee "$out/tests.txt" || status=1
bench() { # OUTPUT BENCH ARGUMENTS...
  timeout 240 "$python" "scripts/bench/$2.py" "${@:3}" --repetitions 2 --output "$out/$1.json" | tee "$out/$1.md" || status=1
}
bench prompt_once prompt_once "${sizes[@]}" --max-seconds 10
bench deterministic prompt_once "${sizes[@]}" --prompts 1000 --group-sizes 8 --deterministic
bench logits logits "${logits[@]}"
exit "$status"
