# shellcheck shell=bash
# Sourced by the other scripts: where things are, and how progress is shown.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
ASSETS=${ASSETS:-.assets} # tiny model and data set, made once
PYTHON=$VENV/bin/python
[ -t 2 ] || export TQDM_MININTERVAL=10 # seconds: a log file needs no moving bar
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # everything here is made on this machine

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# pip_install LOG TOTAL ARGUMENTS...: `pip install`, with its output in LOG; says every few seconds
# how many of TOTAL packages have come, and shows the end of LOG on failure.
pip_install() {
  local log=$1 total=$2 pid status=0 start=$SECONDS doing
  shift 2
  "$PYTHON" -m pip install "$@" >"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 2
    if (((SECONDS - start) % 20 < 2)); then
      doing="$(grep -cE '^(Collecting|Processing|Requirement)' "$log" || true) of $total packages"
      if grep -q '^Installing collected' "$log"; then doing="installing $total packages"; fi
      printf '   %3ss: %s\n' $((SECONDS - start)) "$doing"
    fi
  done
  wait "$pid" || status=$?
  trap - INT TERM
  if ((status)); then
    tail -n 25 "$log" >&2
    fail "pip install failed (exit $status); the whole log is $log"
  fi
}

# make_assets: the tiny model and the digits, unless they are there.
make_assets() {
  "$PYTHON" scripts/make_digits.py --output "$ASSETS/digits"
  "$PYTHON" scripts/make_tiny_vlm.py --output "$ASSETS/tiny_vlm" --data "$ASSETS/digits"
}
