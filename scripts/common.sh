# shellcheck shell=bash
# Sourced by the other scripts: where things are, and how progress is shown.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
ASSETS=${ASSETS:-.assets} # tiny model and data set, made once
PYTHON=$VENV/bin/python
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # everything here is made on this machine

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# with_progress LABEL LOG PATTERN TOTAL COMMAND...: runs COMMAND with its output in LOG, and says
# every few seconds how many lines of LOG match PATTERN, of TOTAL. Shows the end of LOG on failure.
with_progress() {
  local label=$1 log=$2 pattern=$3 total=$4 pid status=0 start=$SECONDS
  shift 4
  "$@" >"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 2
    if [ -t 1 ] || (( (SECONDS - start) % 20 < 2 )); then
      printf '   %s: %s of %s, %ss\n' "$label" "$(grep -cE "$pattern" "$log" || true)" "$total" \
        $((SECONDS - start))
    fi
  done
  wait "$pid" || status=$?
  trap - INT TERM
  if ((status)); then
    tail -n 25 "$log" >&2
    fail "$label failed (exit $status); the whole log is $log"
  fi
}

# make_assets: the tiny model and the digits, unless they are there.
make_assets() {
  "$PYTHON" scripts/make_digits.py --output "$ASSETS/digits"
  "$PYTHON" scripts/make_tiny_vlm.py --output "$ASSETS/tiny_vlm" --data "$ASSETS/digits"
}
