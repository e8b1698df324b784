# shellcheck shell=bash
# Sourced by the other scripts: where things are, and how progress is shown.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
ASSETS=${ASSETS:-.assets} # tiny model and data set, made once
PYTHON=$VENV/bin/python
[ -t 2 ] || export TQDM_MININTERVAL=10 # seconds: a log file needs no moving bar
# Else torch's threads spin while they wait, and a core that is taken away holds all of them up: beside
# one busy process a step of the demo took 14 s instead of 1.4 (with this 2.4, and 1.5 alone).
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export VLLM_NCCL_SO_PATH=${VLLM_NCCL_SO_PATH-none} # NCCL comes with a build of torch for GPUs
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # everything here is made on this machine

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

not_in_index="a package is not in the package index that pip uses here (above). Set PIP_INDEX_URL to one that has it."

# why_pip_failed LOG: the cause, and the remedy, from pip's own words.
why_pip_failed() {
  local log=$1 unreachable
  unreachable='the package index could not be reached. Look at the network, PIP_INDEX_URL and proxy variables, and run this again.'
  if grep -qiE 'no space left|disk quota exceeded' "$log"; then
    echo "the disk is full. Make room (4.3 GB, and pip's cache: \`$PYTHON -m pip cache purge\`) and run this again."
  elif grep -qF 'Retry(total=0,' "$log"; then # then pip goes on, and misses the package
    echo "$unreachable"
  elif grep -qE 'No matching distribution|Could not find a version' "$log"; then
    echo "$not_in_index"
  elif grep -qiE 'connection (error|refused|reset)|ConnectionError|timed out|name resolution|not known|ProxyError|SSLError|Network is unreachable' "$log"; then
    echo "$unreachable"
  elif grep -qiE 'permission denied' "$log"; then
    echo "a file could not be written (above). Name an environment of your own: VENV=... bash scripts/setup.sh"
  else
    echo "pip failed (above)."
  fi
}

# run_pip LOG TOTAL ARGUMENTS...: `pip install`, with its output in LOG; says every few seconds how
# many of TOTAL packages have come.
run_pip() {
  local log=$1 total=$2 pid status=0 start=$SECONDS next=20 doing
  shift 2
  "$PYTHON" -m pip install "$@" >"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS - start >= next)); then
      next=$((next + 20))
      doing="$(grep -cE '^(Collecting|Processing|Requirement)' "$log" || true) of $total packages"
      if grep -q '^Installing collected' "$log"; then doing="installing $total packages"; fi
      printf '   %3ss: %s\n' $((SECONDS - start)) "$doing"
    fi
  done
  wait "$pid" || status=$?
  trap - INT TERM
  return "$status"
}

# explain LOG: ends with the cause of pip's failure.
explain() {
  tail -n 5 "$1" >&2
  fail "$(why_pip_failed "$1")
The whole log is $1"
}

# pip_install LOG TOTAL ARGUMENTS...: as `run_pip`, and a failure ends the script.
pip_install() { run_pip "$@" || explain "$1"; }

# make_assets: the tiny model and the digits, unless they are there.
make_assets() {
  "$PYTHON" scripts/make_digits.py --output "$ASSETS/digits"
  "$PYTHON" scripts/make_tiny_vlm.py --output "$ASSETS/tiny_vlm" --data "$ASSETS/digits"
}
