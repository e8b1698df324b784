# shellcheck shell=bash
# Paths, settings and helpers that the other scripts source.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
ASSETS=${ASSETS:-.assets} # the tiny model and its data set, which are made once
PYTHON=$VENV/bin/python
[ -t 2 ] || export TQDM_MININTERVAL=10 # seconds: a log file needs no moving bar
# By default torch's threads spin while they wait, so one busy core delays them all: beside another busy
# process, a step of the demo took 14 s instead of 1.4 s. With PASSIVE it takes 2.4 s (1.5 s alone).
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export VLLM_NCCL_SO_PATH=${VLLM_NCCL_SO_PATH-none} # only torch's GPU builds contain NCCL
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # model and data are made on this machine

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# follow LOG WORDS COUNT COMMAND...: runs COMMAND with its output in LOG. Every 10 seconds it prints
# WORDS and the output of the command COUNT.
follow() {
  local log=$1 words=$2 count=$3 start=$SECONDS next=10 pid
  "${@:4}" >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - start >= next)); then
      printf '  %3d s: %s%s\n' "$next" "$words" "$($count)"
      ((next += 10))
    fi
  done
  wait "$pid"
}

# make_assets: makes the tiny model and the digits unless they exist.
make_assets() {
  [ -f "$ASSETS/tiny_vlm/tiny_vlm.json" ] || step "Making a tiny Qwen2.5-VL and handwritten digits in $ASSETS (once; about a minute)
   Supervised training teaches the model the form of an answer and a third of the digits, so that GRPO has a start."
  "$PYTHON" scripts/make_digits.py --output "$ASSETS/digits"
  "$PYTHON" scripts/make_tiny_vlm.py --output "$ASSETS/tiny_vlm" --data "$ASSETS/digits"
}
